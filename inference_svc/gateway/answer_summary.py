"""Summary of an answer: fields of the node's log line, for the log of the fleet gateway.

A gateway that sends the header ``X-KVSidecar-Summary`` gets the summary back. A complete answer has the summary in a
header of the same name; a stream ends with the summary as a comment, which readers of events ignore. The summary
contains only values that the answer itself shows, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

SUMMARY_HEADER = "X-KVSidecar-Summary"
_COMMENT = b": kvsidecar-summary "
_TEXTS = ("model", "id", "aborted")
_COUNTS = ("prompt_tokens", "cached_tokens", "generated_tokens", "answers", "ttft_ms")
_MAX_BYTES, _MAX_TEXT = 4096, 200

Fields = dict[str, str | int | float]


def summary_of(fields: Mapping[str, str | int | float]) -> bytes:
    """Return the header's value: the fields of a log line that a summary has, with long texts cut off.

    The fleet's gateway reads no response whose headers have more than 100 KiB.
    """
    texts = {name: str(fields[name])[:_MAX_TEXT] for name in _TEXTS if name in fields}
    return json.dumps(texts | {name: fields[name] for name in _COUNTS if name in fields}).encode()


def summary_comment(fields: Mapping[str, str | int | float]) -> bytes:
    """Return the summary as the last comment of a stream."""
    return _COMMENT + summary_of(fields) + b"\n\n"


def parse_summary(data: bytes) -> Fields:
    """Return the fields of a summary; empty for text that is not a summary."""
    try:
        found = json.loads(data) if len(data) <= _MAX_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return {}
    texts = {name: found[name][:_MAX_TEXT] for name in _TEXTS if isinstance(found.get(name), str)}
    counts = {
        name: found[name] for name in _COUNTS if type(found.get(name)) in (int, float) and 0 <= found[name] < 1 << 62
    }
    return texts | counts


class SummaryFilter:
    """Removes the summary from a stream's bytes; ``fields`` has the summary after the stream's last piece."""

    def __init__(self) -> None:
        self.fields: Fields = {}
        self._held = b""  # the beginning of a line that may become the summary
        self._at_line_start = True

    def feed(self, piece: bytes) -> bytes:
        """Take a stream's next piece; return the bytes to forward to the client."""
        data, begins_line = self._held + piece, self._at_line_start
        at = 0 if begins_line and data.startswith(_COMMENT) else data.find(b"\n" + _COMMENT) + 1 or -1
        if at >= 0:  # nothing follows the summary
            self._held, self._at_line_start = data[at : at + _MAX_BYTES + len(_COMMENT)], True
            self.fields = parse_summary(self._held[len(_COMMENT) :].strip())
            return data[:at]
        last = data.rfind(b"\n") + 1
        may_begin = (last > 0 or begins_line) and _COMMENT.startswith(data[last:])
        self._held = data[last:] if may_begin else b""
        passed = data[: len(data) - len(self._held)]
        self._at_line_start = passed.endswith(b"\n") if passed else begins_line
        return passed

    def rest(self) -> bytes:
        """Return the withheld bytes after the last piece, unless they are the summary."""
        return b"" if self.fields else self._held
