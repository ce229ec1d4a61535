"""Cache hints of SGLang's storage calls, from the KV hint envelope of a batch of pages."""

from __future__ import annotations

import logging
from typing import Any

from kvsidecar.kv_hints import read_kv_hints
from kvsidecar.kv_transfer.cache_hints import NO_HINTS, CacheHints
from kvsidecar.retained_prefixes import WHOLE_PROMPT

log = logging.getLogger(__name__)


class PageHints:
    """Reads the KV hint envelopes of calls; ``num_applied`` and ``num_ignored`` count their actions."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.num_applied = self.num_ignored = 0

    def of_call(self, extra_info: Any) -> CacheHints:
        """Return the hints for a call's pages, which come after the pages of its ``prefix_keys`` in the prompt.

        All pages get the retention of the first page. This is precise enough, because a batch is short and a retention
        is a minimum.
        """
        more = getattr(extra_info, "extra_info", None)
        envelope = more.get("kv_hints") if isinstance(more, dict) else None
        if envelope is None:
            return NO_HINTS
        given = read_kv_hints(envelope)
        self.num_applied += given.num_applied
        if given.num_ignored and not self.num_ignored:
            log.info("KV hints have actions other than kv.fetch 1 and kv.retain 1, which have no effect")
        self.num_ignored += given.num_ignored
        start = len(getattr(extra_info, "prefix_keys", None) or ()) * self._page_tokens
        seconds = next((seconds for end, seconds in given.retained if start < end), 0)
        retained = ((WHOLE_PROMPT, seconds),) if seconds else ()
        return CacheHints(retained=retained, low_priority=given.low_priority, fetch=given.fetch)
