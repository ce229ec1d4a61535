"""Responses in the background: a client polls for the result, and may cancel."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass

import structlog
from kvsidecar.errors import KVSidecarError, Overloaded

from inference_svc.gateway.request_runner import ChoiceChunk
from inference_svc.gateway.responses_api.conversation_store import ConversationStore
from inference_svc.gateway.responses_api.response_writer import ResponseWriter

# The limits bound memory: each running response keeps its request.
_MAX_RUNNING, _MAX_RUNNING_PER_TENANT = 64, 16

log = structlog.get_logger("gateway")


@dataclass
class _Running:
    tenant: Hashable
    task: asyncio.Task[None]
    ending: bool = False

    def cancel(self) -> None:
        """Cancel the answer once. A second cancellation would interrupt the storing of the final status."""
        if not self.ending:
            self.ending = True
            self.task.cancel()


class BackgroundResponses:
    """The running background responses of one gateway. They end with its process. Runs on the event loop."""

    def __init__(self, store: ConversationStore) -> None:
        self._store = store
        self._running: dict[str, _Running] = {}

    def check_capacity(self, tenant: Hashable) -> None:
        """Raise Overloaded if the tenant, or all tenants together, already run the maximum number of responses."""
        by_tenant = Counter(one.tenant for one in self._running.values())
        if by_tenant[tenant] >= _MAX_RUNNING_PER_TENANT or by_tenant.total() >= _MAX_RUNNING:
            raise Overloaded(
                f"{by_tenant[tenant]} of your responses run in the background, {by_tenant.total()} in all; at most "
                f"{_MAX_RUNNING_PER_TENANT} and {_MAX_RUNNING} may: wait for one of them, or cancel it"
            )

    async def start(self, tenant: Hashable, writer: ResponseWriter, pieces: AsyncIterator[ChoiceChunk]) -> bytes:
        """Start the answer in a task. Returns the queued response as JSON. Raises Overloaded."""
        queued = await writer.interim("queued")
        self.check_capacity(tenant)  # others may have started while this one was encoded
        self._store.keep(tenant, queued)
        task = asyncio.create_task(self._run(tenant, writer, pieces))
        self._running[writer.id] = _Running(tenant, task)
        await asyncio.sleep(0)  # let the task begin: cancelled before that, it would never end the response
        return queued.response

    async def cancel(self, tenant: Hashable, response_id: str) -> bool:
        """Cancel a response of the tenant and wait until it has ended. Returns False if no such response runs."""
        found = self._running.get(response_id)
        if found is None or found.tenant != tenant:
            return False
        found.cancel()
        await asyncio.wait({found.task})
        return True

    async def close(self) -> None:
        """Cancel all responses."""
        running = list(self._running.values())
        for one in running:
            one.cancel()
        if running:
            await asyncio.wait({one.task for one in running})

    async def _run(self, tenant: Hashable, writer: ResponseWriter, pieces: AsyncIterator[ChoiceChunk]) -> None:
        try:
            failure = await self._answer(tenant, writer, pieces)
            if failure is not None:
                self._running[writer.id].ending = True
                self._store.keep(tenant, await writer.interim("failed", failure))
        except asyncio.CancelledError:
            self._store.keep(tenant, await writer.interim("cancelled"))
        finally:
            del self._running[writer.id]

    async def _answer(
        self, tenant: Hashable, writer: ResponseWriter, pieces: AsyncIterator[ChoiceChunk]
    ) -> Exception | None:
        """Compute the response and store it. Returns the reason if it fails."""
        try:
            self._store.keep(tenant, await writer.interim("in_progress"))
            await writer.complete(pieces)
        except KVSidecarError as error:
            return error
        except Exception as error:
            log.exception("a response in the background failed", id=writer.id)
            return error
        return None
