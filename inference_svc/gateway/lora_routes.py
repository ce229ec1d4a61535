"""LoRA adapter endpoints, as in vLLM: ``/v1/load_lora_adapter``, ``/v1/unload_lora_adapter``.

The gateway loads an adapter on all workers, or on none. It keeps a list of its loads and unloads. A restarted worker
gets the ones that it missed before it gets requests. A restarted gateway begins with an empty list; the workers keep
their adapters.
"""

from __future__ import annotations

import asyncio
from functools import partial

import grpc
import structlog
from fastapi import Request, Response
from fastapi.responses import PlainTextResponse
from kvsidecar.errors import KVSidecarError, PermissionDenied, UnknownModel, from_rpc
from kvsidecar.inference.v1 import inference_pb2 as pb
from pydantic import Field

from inference_svc.gateway.api_keys import ApiKeys
from inference_svc.gateway.body_model import BodyModel
from inference_svc.gateway.body_reader import BodyReader
from inference_svc.gateway.unsupported_options import B, parse
from inference_svc.gateway.worker_retry import is_retryable
from inference_svc.gateway.worker_router import Worker, WorkerRouter

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
# Timeout of a load, which may read and pack a large adapter, and of an unload, which waits for stores to the daemon.
_SECONDS = 300.0
_LONGEST_NAME, _LONGEST_PATH = 96, 4096
_FIELDS = {"name": "lora_name", "path": "lora_path"}

log = structlog.get_logger("gateway")


class LoadBody(BodyModel):
    """Body of a load: an adapter's name, and its folder below the workers' --lora-root."""

    lora_name: str = Field(min_length=1, max_length=_LONGEST_NAME)
    lora_path: str = Field(min_length=1, max_length=_LONGEST_PATH)


class UnloadBody(BodyModel):
    """Body of an unload: an adapter's name."""

    lora_name: str = Field(min_length=1, max_length=_LONGEST_NAME)


class LoraRoutes:
    """Handlers that load and unload adapters on all workers. A lock admits one change at a time."""

    def __init__(self, router: WorkerRouter, keys: ApiKeys, bodies: BodyReader) -> None:
        self._router, self._keys, self._bodies = router, keys, bodies
        self._loaded: dict[str, pb.LoadAdapterRequest] = {}
        self._unloaded: set[str] = set()
        self._lock = asyncio.Lock()
        router.prepare = self._prepare

    async def load(self, request: Request) -> Response:
        return PlainTextResponse(await self._load_on_all(await self._parse(LoadBody, request)))

    async def unload(self, request: Request) -> Response:
        return PlainTextResponse(await self._unload_on_all(await self._parse(UnloadBody, request)))

    async def _parse(self, kind: type[B], request: Request) -> B:
        if not self._keys.is_operator(request.scope):
            raise PermissionDenied("adapters are loaded and unloaded by operators; send the operator's key")
        return await self._bodies.read(request, partial(parse, kind))

    async def _load_on_all(self, body: LoadBody) -> str:
        """Load an adapter on every worker that is up. Raises KVSidecarError.

        If one worker fails, the method unloads the adapter from all workers that did not have it before.
        """
        request = pb.LoadAdapterRequest(name=body.lora_name, path=body.lora_path)
        async with self._lock:
            workers = self._router.alive
            new = [worker for worker in workers if body.lora_name not in worker.names]
            try:
                # The first worker chooses the adapter's namespace, and all other workers use the same one.
                request.namespace = (await _load(workers[0], request)).namespace
                found = await asyncio.gather(*(_load(w, request) for w in workers[1:]), return_exceptions=True)
                for error in found:
                    if isinstance(error, BaseException):
                        raise error
            except BaseException:
                rid = asyncio.gather(*(_unload(w, request.name) for w in new), return_exceptions=True)
                await asyncio.shield(rid)
                raise
            self._loaded[request.name] = request
            self._unloaded.discard(request.name)
            await asyncio.gather(*(worker.poll() for worker in workers))
        log.info("an adapter was loaded", adapter=request.name)
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    async def _unload_on_all(self, body: UnloadBody) -> str:
        """Unload an adapter from every worker that is up.

        Raises KVSidecarError; if no worker has the adapter, this is UnknownModel.
        """
        name = body.lora_name
        async with self._lock:
            workers = self._router.alive
            found = await asyncio.gather(*(_unload(worker, name) for worker in workers), return_exceptions=True)
            if None in found or name in self._loaded:
                self._loaded.pop(name, None)
                self._unloaded.add(name)
            await asyncio.gather(*(worker.poll() for worker in workers))
            for error in found:
                if error is not None and not isinstance(error, UnknownModel):
                    raise error
            if None not in found:
                raise UnknownModel(f"there is no adapter {name[:100]!r} to unload", param="lora_name")
        log.info("an adapter was unloaded", adapter=name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def _prepare(self, worker: Worker, model: pb.GetModelResponse) -> bool:
        """Apply missed loads and unloads to a worker; return False if it had missed none."""
        if not self._missing_changes(worker, model):
            return False
        async with self._lock:
            for request in self._missing_changes(worker, model):
                try:
                    if isinstance(request, str):
                        await _unload(worker, request)
                    else:
                        await _load(worker, request)
                except KVSidecarError as error:
                    if not is_retryable(error):
                        name = request if isinstance(request, str) else request.name
                        worker.refused.add(name)
                        log.warning("a worker refused an adapter change", worker=worker.target, error=str(error))
        return True

    def _missing_changes(self, worker: Worker, model: pb.GetModelResponse) -> list[pb.LoadAdapterRequest | str]:
        """Return the adapters that the worker must load, and the names that it must unload.

        The result leaves out changes that the worker has refused since it started.
        """
        there = {adapter.name for adapter in model.adapters}
        lacks = [request for name, request in self._loaded.items() if name not in there | worker.refused]
        return [*sorted(self._unloaded & there - worker.refused), *lacks]


async def _load(worker: Worker, request: pb.LoadAdapterRequest) -> pb.Adapter:
    try:
        found: pb.LoadAdapterResponse = await worker.client.stub.LoadAdapter(request, timeout=_SECONDS)
        return found.adapter
    except grpc.RpcError as error:
        raise _error_of(error) from error


async def _unload(worker: Worker, name: str) -> None:
    try:
        await worker.client.stub.UnloadAdapter(pb.UnloadAdapterRequest(name=name), timeout=_SECONDS)
    except grpc.RpcError as error:
        raise _error_of(error) from error


def _error_of(error: grpc.RpcError) -> KVSidecarError:
    """Convert a worker's error; its ``param`` becomes the field's name in the HTTP body."""
    found = from_rpc(error)
    found.param = _FIELDS.get(found.param, found.param)
    return found
