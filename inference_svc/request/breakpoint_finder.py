"""Cache breakpoints of a request: the prefixes of its prompt to retain, in tokens."""

from __future__ import annotations

from collections.abc import Callable

from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.retained_prefixes import WHOLE_PROMPT, RetainedPrefixes, retained_prefixes

from inference_svc.chat_template.chat_template import ChatTemplate
from inference_svc.request.request_options import check_seconds

_MAX_BREAKPOINTS = 16
# Maximum number of prefixes that are rendered for a chat's breakpoints. Each may take as long as the whole chat.
_MAX_RENDERED = 4


class BreakpointFinder:
    """Finds where the breakpoints of prompts lie. Any thread may call the methods."""

    def __init__(self, chat_template: ChatTemplate, tokenize: Callable[[str], list[int]]) -> None:
        """``tokenize`` adds no special tokens."""
        self._chat_template, self._tokenize = chat_template, tokenize

    def retained(self, prompt: pb.Prompt, cache: pb.CacheOptions, tokens: int) -> RetainedPrefixes:
        """Return all prefixes of a prompt of ``tokens`` tokens that are retained. Raises InvalidRequest."""
        found = self.find(prompt, cache, tokens)
        if cache.HasField("retain_seconds"):
            seconds = check_seconds("cache_retain_seconds", cache.retain_seconds)
            found = retained_prefixes([*found, (WHOLE_PROMPT, seconds)])
        return found

    def find(self, prompt: pb.Prompt, cache: pb.CacheOptions, tokens: int) -> RetainedPrefixes:
        """Return the prefixes that end at a request's breakpoints. Raises InvalidRequest."""
        if len(cache.breakpoints) > _MAX_BREAKPOINTS:
            raise InvalidRequest(
                f"cache_breakpoints has {len(cache.breakpoints)} items; at most {_MAX_BREAKPOINTS} are allowed",
                param="cache_breakpoints",
            )
        is_chat, messages = prompt.WhichOneof("kind") == "chat", len(prompt.chat.messages)
        by_message: list[tuple[int, int]] = []
        found: list[tuple[int, int]] = []
        for point in cache.breakpoints:
            check_seconds("retain_seconds of a breakpoint", point.retain_seconds, "cache_breakpoints")
            kind = point.WhichOneof("end")
            end = 0 if kind is None else getattr(point, kind)
            if not end or (kind == "messages" and not is_chat):
                raise InvalidRequest(
                    "a breakpoint of cache_breakpoints ends at a number of messages (in chats) or tokens, from 1; "
                    f"this one has {kind or 'neither'}{f' {end}' if kind else ''}",
                    param="cache_breakpoints",
                )
            if kind == "messages" and end < messages:
                by_message.append((end, point.retain_seconds))
            else:
                found.append((tokens if kind == "messages" else min(end, tokens), point.retain_seconds))
        whole = max((seconds for end, seconds in found if end == tokens), default=0)
        points = [(end, seconds) for end, seconds in retained_prefixes(by_message) if seconds > whole]
        if len(points) > _MAX_RENDERED:  # merge the shortest prefixes into one, with the longest of their times
            first = points[: len(points) - _MAX_RENDERED + 1]
            points = [(first[-1][0], first[0][1]), *points[len(first) :]]
        for end, seconds in points:
            found.append((min(self._end_of_messages(prompt.chat, end) or tokens, tokens), seconds))
        return retained_prefixes(found)

    def _end_of_messages(self, chat: pb.Chat, messages: int) -> int:
        """Return the number of tokens of a chat's first messages; 0 if the template refuses these messages alone.

        The messages are tokenized without the later ones, so the result may be off by a few tokens. This error is small
        beside the length of a chunk.
        """
        return len(self._tokenize(self._chat_template.text_of_first(chat, messages)))
