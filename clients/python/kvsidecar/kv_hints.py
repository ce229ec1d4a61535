"""The KV hint envelope of vLLM and SGLang, and the cache hints in it.

An orchestrator attaches an envelope to a request: ``{protocol_version, message_id, actions}``. An action has
``action_id``, ``action_type``, ``action_version`` and ``payload``. The actions ``kv.fetch`` 1.x and ``kv.retain`` 1.x
are applied. Other actions and malformed actions are counted and ignored, because a hint is no reason to refuse a
request. https://github.com/vllm-project/vllm/issues/53421
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from kvsidecar.chunk_layout import MAX_TTL_SECONDS
from kvsidecar.retained_prefixes import WHOLE_PROMPT, RetainedPrefixes, retained_prefixes

MAX_ACTIONS, _MAX_DIRECTIVES, _MAX_PRIORITY = 16, 128, 100


@dataclass(frozen=True)
class KvHints:
    """Hints of one envelope: prefixes to retain and for how long, priority, and whether to fetch.

    ``num_applied`` and ``num_ignored`` count its actions.
    """

    retained: RetainedPrefixes = ()
    low_priority: bool = False
    fetch: bool = False
    num_applied: int = 0
    num_ignored: int = 0


NO_KV_HINTS = KvHints()


def read_kv_hints(envelope: Any) -> KvHints:
    """Read an envelope: JSON, or the engine's object with the same fields. Never raises for its content."""
    if envelope is None:
        return NO_KV_HINTS
    actions = _field(envelope, "actions")
    if not isinstance(actions, list | tuple):
        return KvHints(num_ignored=1)
    retained: list[tuple[int, int]] = []
    low_priority = fetch = False
    applied = 0
    for action in actions[:MAX_ACTIONS]:
        kind, version = _field(action, "action_type"), _field(action, "action_version")
        if not isinstance(version, str) or version.partition(".")[0] != "1":
            continue
        if kind == "kv.fetch":
            fetch, applied = True, applied + 1
        elif kind == "kv.retain" and (directives := _directives(_field(action, "payload"))) is not None:
            applied += 1
            retained += [(end, seconds) for _, end, priority, seconds in directives if priority]
            low_priority |= any(
                not (priority or start) and end == WHOLE_PROMPT for start, end, priority, _ in directives
            )
    prefixes = retained_prefixes(retained)
    return KvHints(prefixes, low_priority and not prefixes, fetch, applied, len(actions) - applied)


def _field(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _directives(payload: Any) -> list[tuple[int, int, int, int]] | None:
    """Return ``(start, end, priority, seconds)`` of each directive of ``kv.retain``; None if one is malformed."""
    given = _field(payload, "directives")
    if not isinstance(given, list) or len(given) > _MAX_DIRECTIVES:
        return None
    found = [_directive(item) for item in given]
    return None if None in found else [item for item in found if item is not None]


def _directive(item: Any) -> tuple[int, int, int, int] | None:
    if not isinstance(item, Mapping):
        return None
    end, seconds = item.get("end"), item.get("duration")
    start = _number(item.get("start", 0), WHOLE_PROMPT)
    end = WHOLE_PROMPT if end is None or item.get("covers_output") else _number(end, WHOLE_PROMPT)
    priority = _number(item.get("priority"), _MAX_PRIORITY)
    seconds = MAX_TTL_SECONDS if seconds is None else _number(seconds, MAX_TTL_SECONDS)
    if start is None or end is None or priority is None or seconds is None or start >= end:
        return None
    return start, end, priority, seconds


def _number(value: Any, most: int) -> int | None:
    """Return a number from 0 to ``most``, rounded up; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        return None
    return ceil(value)
