"""Copies pages between SGLang's host memory and the daemon; a failing daemon raises no error."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import closing

from kvkernels.paged_gather import Integers

from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.chunk_layout import new_header
from kvsidecar.kv_transfer.block_copier import BlockCopier
from kvsidecar.kv_transfer.cache_hints import NO_HINTS, CacheHints
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.error_policy import handle_failure
from kvsidecar.kv_transfer.kv_layout import PagedKVCache
from kvsidecar.kv_transfer.named_pages import LeasedPages, NamedPage, NamedPages
from kvsidecar.kv_transfer.prefix_lookup import header_of
from kvsidecar.kv_transfer.session import CompletedLoad

log = logging.getLogger(__name__)


class PageStore:
    """Stores pages under SGLang's names.

    A page's name is a hash of all tokens up to the end of the page. SGLang loads on one thread and stores on another,
    so loads and stores have separate copiers. If the daemon is unavailable, hangs or misbehaves, the methods (except
    ``clear``) do not raise: pages count as missing, and SGLang computes them.
    """

    def __init__(self, cache: PagedKVCache, connection: DaemonConnection, timeout: float) -> None:
        self._cache, self._connection = cache, connection
        self._pages = NamedPages.of(connection.namespace, cache.geometry, timeout)
        self._reader, self._writer = BlockCopier(cache), BlockCopier(cache)
        self._reader.warm_up()
        self._reading, self._writing = threading.Lock(), threading.Lock()

    def close(self) -> None:
        self._connection.close()

    def exists(self, names: Sequence[str], hints: CacheHints = NO_HINTS) -> int:
        """Return the number of stored pages before the first missing one."""
        held = self._find(names, hints)
        if held is None:
            return 0
        self._pages.release(held)
        return next((i for i in range(len(names)) if i not in held.pages), len(names))

    def load(self, names: Sequence[str], slots: Integers, hints: CacheHints = NO_HINTS) -> list[bool]:
        """Copy pages to ``slots [names * page tokens]``; return for each page whether it was copied.

        The contents of the slots of a missing page are undefined.
        """
        done, began, load = [False] * len(names), time.perf_counter(), None
        held = self._find(names, hints)
        if held is None:
            return done
        session, tokens = held.found.session, self._cache.block_tokens
        try:
            with self._reading:
                pages = sorted(held.pages.items())
                with closing(self._pages.read(held, [match for _, match in pages])) as payloads:
                    for (i, match), payload in zip(pages, payloads, strict=True):
                        header = header_of(match, self._cache.geometry)
                        self._reader.unpack(slots[i * tokens : (i + 1) * tokens], header, payload)
                        done[i] = True
            if not session.leases_valid:
                raise ConnectionError("the session ended while pages were copied")
            size_bytes = sum(match.payload_bytes for match in held.pages.values())
            load = CompletedLoad(len(held.pages) * tokens, size_bytes, time.perf_counter() - began)
        except Exception as error:
            log.warning("loading pages failed, computing instead: %s", handle_failure(self._connection, session, error))
            return [False] * len(names)
        finally:
            self._pages.release(held, load)
        return done

    def store(self, names: Sequence[str], slots: Integers, hints: CacheHints = NO_HINTS) -> list[bool]:
        """Store the pages at ``slots [names * page tokens]``; return for each page whether it is stored now."""
        session, tokens = self._connection.session, self._cache.block_tokens
        if session is None:
            return [False] * len(names)
        pages = self._named(names)

        def fill(i: int, payload: memoryview) -> None:
            header = new_header(self._cache.geometry, pages[i].token_ids(), 0)
            self._writer.pack(slots[i * tokens : (i + 1) * tokens], header, payload)

        try:
            with self._writing:
                return list(self._pages.store(session, pages, b"", fill, hints).stored)
        except Exception as error:
            log.warning("storing pages failed: %s", handle_failure(self._connection, session, error))
            return [False] * len(names)

    def clear(self) -> None:
        """Delete all pages of this model and rank, including the pages that other engines have stored.

        Raises ConnectionError when the daemon is unavailable.
        """
        session = self._connection.session
        if session is None:
            raise ConnectionError("the cache daemon is not there, nothing was deleted; try again")
        everything = pb.PrefixRef(namespace=self._connection.namespace)
        session.stub.Delete(pb.DeleteRequest(prefix=everything), timeout=60)

    def _named(self, names: Sequence[str]) -> list[NamedPage]:
        return [NamedPage(name.encode(), self._cache.block_tokens) for name in names]

    def _find(self, names: Sequence[str], hints: CacheHints) -> LeasedPages | None:
        session = self._connection.session
        if session is None or not names:
            return None
        try:
            return self._pages.find(session, self._named(names), b"", hints)
        except Exception as error:
            log.warning(
                "looking pages up failed, computing instead: %s", handle_failure(self._connection, session, error)
            )
            return None
