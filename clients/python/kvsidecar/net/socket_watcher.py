"""Watches a bound Unix socket's path, and binds it again after a deletion."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvsidecar.errors import ConfigurationError
from kvsidecar.process.background_task import BackgroundTask
from kvsidecar.process.runtime_dir import ensure_private_dir

_LOOK_SECONDS = 1.0


class SocketWatcher(BackgroundTask):
    """Watcher of a bound socket's path.

    While the context is open, calls ``bind_again`` within about a second after the path was deleted; for a private
    socket it first creates the private folder again. Does nothing if another process has bound the path. Runs on the
    event loop; logs failures and tries again.
    """

    def __init__(self, path: Path, bind_again: Callable[[], Awaitable[None]], private: bool = True) -> None:
        super().__init__(self._keep)
        self._path, self._bind_again, self._private = path, bind_again, private

    async def _keep(self) -> None:
        import structlog  # lazy: clients import this module, and do not log

        log, said = structlog.get_logger("kvsidecar"), ""
        name = str(self._path)
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._path.exists():
                continue
            try:
                if self._private:
                    ensure_private_dir(self._path.parent)
                await self._bind_again()
            except (ConfigurationError, OSError, RuntimeError) as error:
                if str(error) != said:
                    log.error("the socket was deleted and cannot be made again", socket=name, error=str(error))
                said = str(error)
            else:
                log.warning("the socket was deleted, listening there again", socket=name)
                said = ""
