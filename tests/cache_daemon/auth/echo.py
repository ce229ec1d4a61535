"""Service with the daemon's kinds of calls but without a store: it returns the caller's name and checks salts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
from kvsidecar.errors import CACHE_DOMAIN, Context, KVSidecarError, abort, unary

from cache_daemon.auth.authenticator import PrincipalResolver

SERVICE = "kvsidecar.test.Echo"


class Echo:
    """Handlers of the service. Requests and answers are plain bytes."""

    def __init__(self, principal_of: PrincipalResolver) -> None:
        self._principal_of = principal_of
        self.received: list[bytes] = []
        self.closed = asyncio.Event()

    @unary(CACHE_DOMAIN)
    async def Whoami(self, request: bytes, context: Context) -> bytes:
        return self._principal_of(context).name.encode()

    @unary(CACHE_DOMAIN)
    async def Use(self, salt: bytes, context: Context) -> bytes:
        self._principal_of(context).check_salt(salt)
        return b"used"

    @unary(CACHE_DOMAIN)
    async def Stats(self, request: bytes, context: Context) -> bytes:
        self._principal_of(context).require_operator("see the statistics of all tenants")
        return b"everything"

    @unary(CACHE_DOMAIN)
    async def Sleep(self, request: bytes, context: Context) -> bytes:
        await asyncio.sleep(float(request))
        return b"awake"

    async def Down(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        """Send as many messages of 1 MiB as the request says."""
        try:
            for _ in range(int(request)):
                yield bytes(1 << 20)
        finally:
            self.closed.set()

    async def Up(self, messages: AsyncIterator[bytes], context: Context) -> bytes:
        try:
            async for message in messages:
                self.received.append(message)
            return str(len(self.received)).encode()
        except KVSidecarError as error:
            await abort(context, error, CACHE_DOMAIN)
        finally:
            self.closed.set()

    async def Both(self, messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """Return each message; resolve the caller anew for each, as Attach does for heartbeats."""
        try:
            async for message in messages:
                self._principal_of(context)
                yield message
        except KVSidecarError as error:
            await abort(context, error, CACHE_DOMAIN)

    def add_to(self, server: grpc.aio.Server) -> None:
        def received(data: bytes) -> bytes:
            self.received.append(data)
            return data

        handlers = {
            "Whoami": grpc.unary_unary_rpc_method_handler(self.Whoami, received),
            "Use": grpc.unary_unary_rpc_method_handler(self.Use),
            "Stats": grpc.unary_unary_rpc_method_handler(self.Stats),
            "Sleep": grpc.unary_unary_rpc_method_handler(self.Sleep),
            "Down": grpc.unary_stream_rpc_method_handler(self.Down),
            "Up": grpc.stream_unary_rpc_method_handler(self.Up),
            "Both": grpc.stream_stream_rpc_method_handler(self.Both),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def add_echo(server: grpc.aio.Server, principal_of: PrincipalResolver, at: Path | None) -> None:
    Echo(principal_of).add_to(server)
