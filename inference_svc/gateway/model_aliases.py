"""Model aliases: additional names of served models, for clients with fixed model names."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvsidecar.inference.v1 import inference_pb2 as pb

CLAUDE_PREFIX = "claude-"
ALL_CLAUDE = f"{CLAUDE_PREFIX}*"
"""Entry of a model list that stands for all names that begin with ``claude-``."""


class ModelAliases:
    """Aliases from the setting ``NAME=MODEL``; with ``claude_names``, every ``claude-`` name is an alias, too."""

    def __init__(self, aliases: Mapping[str, str], claude_names: bool) -> None:
        self._aliases, self._claude = aliases, claude_names

    def resolve(self, name: str, served: Collection[str]) -> str:
        """Return the model's own name for a name that may be an alias.

        Returns an empty name for a ``claude-`` alias: it means the served model, whatever its name.
        """
        if name in self._aliases:
            return self._aliases[name]
        return "" if self._claude and name.startswith(CLAUDE_PREFIX) and name not in served else name

    def with_aliases(self, served: Mapping[str, pb.GetModelResponse]) -> dict[str, pb.GetModelResponse]:
        """Return the served models by their names and aliases. An alias of a model that is down is left out."""
        found = dict(served)
        for name in (*self._aliases, *([ALL_CLAUDE] if self._claude else ())):
            target = self.resolve(name, served)
            model = served.get(target) if target else next(iter(served.values()), None)
            if model is not None:
                found.setdefault(name, model)
        return found


def lists(models: Collection[str], name: str) -> bool:
    """Return whether a node's list of models contains a name, or the entry for all ``claude-`` names covers it."""
    return name in models or (name.startswith(CLAUDE_PREFIX) and ALL_CLAUDE in models)


def parse_aliases(text: str) -> dict[str, str]:
    """Parse NAME=MODEL,NAME=MODEL. Raises ValueError."""
    found: dict[str, str] = {}
    for part in (part.strip() for part in text.split(",")):
        name, sign, model = (side.strip() for side in part.partition("="))
        if not part:
            continue
        if not (name and sign and model):
            raise ValueError(f"{part[:80]!r} is no alias; write NAME=MODEL")
        if name in found:
            raise ValueError(f"{name[:80]!r} is given twice; an alias has one model")
        found[name] = model
    return found
