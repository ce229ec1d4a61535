"""Served models: the names that requests may use, and the workers that serve them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvsidecar.errors import InvalidRequest, Unavailable, UnknownModel

from inference_svc.gateway import openai_fields
from inference_svc.gateway.model_aliases import ModelAliases
from inference_svc.gateway.worker_router import Worker, WorkerRouter

_LONGEST_NAME = 256


class ServedModels:
    """The models and adapters of a gateway's workers, and their aliases."""

    def __init__(self, router: WorkerRouter, aliases: ModelAliases) -> None:
        self._router, self._aliases = router, aliases

    def answer_model(self, model: str) -> str:
        """Return the model name for an answer: the requested name or, without one, the served model's."""
        return model or next((w.model.model_id for w in self._router.workers if w.alive), "")

    def fingerprint(self, model: str) -> str | None:
        """Return ``system_fingerprint`` of a model; None if no worker that was ever up serves the model."""
        served = self.resolve(model)
        found = next((w for w in self._router.workers if w.was_up and w.serves(served)), None)
        return None if found is None else openai_fields.fingerprint(found.model)

    def worker(self, name: str) -> Worker:
        """Return a live worker that serves the model. An empty name means any model.

        Raises InvalidRequest, UnknownModel, Unavailable.
        """
        self.check(name)
        served = self.resolve(name)
        found = next((w for w in self._router.alive if w.serves(served)), None)
        if found is None:
            raise no_worker(name)
        return found

    def check(self, name: str) -> None:
        """Raise UnknownModel for a name that no worker serves, and InvalidRequest for one that is too long.

        The models of a worker that is down still count, because the worker will restart.
        """
        served, length, name = self._served(), len(name), self.resolve(name)
        if length > _LONGEST_NAME and name not in served:  # answers, events and the log repeat the name
            raise InvalidRequest(f"model has {length} characters; at most {_LONGEST_NAME} are allowed", param="model")
        if name and served and name not in served:
            raise UnknownModel.among(name, sorted(served))

    def resolve(self, name: str) -> str:
        """Return the name of the served model for a name that may be an alias."""
        return self._aliases.resolve(name, self._served())

    def _served(self) -> set[str]:
        return {name for w in self._router.workers if w.was_up for name in w.names}

    def entries(self, workers: Iterable[Worker]) -> list[dict[str, Any]]:
        """Return the model list's entries for the workers' models and for the aliases of these models."""
        served = {name: w.model for w in workers for name in w.names}
        found = self._aliases.with_aliases(served)
        return [openai_fields.model(model, name, self._router.started) for name, model in found.items()]


def no_worker(model: str) -> Unavailable:
    """Return the error for a model that no running worker serves."""
    return Unavailable(f"no worker that serves {model[:80]!r} is up; try again in a moment")
