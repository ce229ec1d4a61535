"""Place of a miss in its prompt: the part of the chat, and the text around it."""

from __future__ import annotations

from collections.abc import Callable
from secrets import token_hex

from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.chat_template.chat_template import ChatTemplate
from inference_svc.sequence.detokenizer import split_text

# Maximum tokens, and maximum characters, of the text on each side of the miss.
_NEAR_TOKENS, _NEAR_CHARACTERS = 16, 160
_TOOLS, _TEMPLATE = "tools", "template"


def add_place(
    miss: pb.MissReason,
    prompt: pb.Prompt,
    tokens: list[int],
    decode: Callable[[list[int]], str],
    template: ChatTemplate,
) -> None:
    """Add the text around a miss and, in a chat, its part.

    Renders the chat and detokenizes the prompt, which takes time. A truncated prompt gets no part.
    """
    at, last = miss.position, len(tokens)
    if at >= last:
        return
    ends = sorted({max(0, at - _NEAR_TOKENS), at, min(last, at + _NEAR_TOKENS), last} - {0})
    pieces = dict(zip(ends, split_text(decode, tokens, ends), strict=True))
    before = "".join(text for end, text in pieces.items() if end <= at)
    near = "".join(text for end, text in pieces.items() if at - _NEAR_TOKENS < end <= at)
    after = next(text for end, text in pieces.items() if end > at)
    miss.text_before, miss.text_after = near[-_NEAR_CHARACTERS:], after[:_NEAR_CHARACTERS]
    if prompt.WhichOneof("kind") == "chat":
        miss.part = _part(prompt.chat, _content_starts(prompt.chat, "".join(pieces.values()), template), len(before))


def _content_starts(chat: pb.Chat, text: str, template: ChatTemplate) -> list[tuple[int, int]] | None:
    """Return ``(message, position of its content)`` in a rendered chat; None if ``text`` was rendered differently.

    Messages without content are left out. To find the positions, the function renders the chat with a marker before
    each content.
    """
    marked, marker = pb.Chat(), token_hex(16)
    marked.CopyFrom(chat)
    numbers = [i for i, message in enumerate(chat.messages) if message.content.strip()]
    for i in numbers:
        marked.messages[i].content = marker + chat.messages[i].content.strip()
    try:
        first, *pieces = template.render(marked, generation_prompt=True).split(marker)
    except InvalidRequest:  # templates may check contents
        return None
    rendered = first + "".join(pieces)
    if len(pieces) != len(numbers) or not text.endswith(rendered):
        return None
    starts, at = list[tuple[int, int]](), len(text) - len(rendered) + len(first)
    for i, piece in zip(numbers, pieces, strict=True):
        starts.append((i, at))
        at += len(piece)
    return starts


def _part(chat: pb.Chat, starts: list[tuple[int, int]] | None, at: int) -> str:
    """Return the name of the part that has the character ``at``; empty if it is unknown."""
    if starts is None:
        return ""
    number, begin = max(((i, start) for i, start in starts if start <= at), default=(-1, 0))
    following = min((i for i, start in starts if start > at), default=len(chat.messages))
    if number >= 0 and at >= begin + len(chat.messages[number].content.strip()):  # behind the content
        number = number if chat.messages[number].tool_calls else number + 1
        if number == following:
            number = -1
    if number >= 0:
        return f"messages[{number}] ({chat.messages[number].role})"
    return _TOOLS if chat.tools and following <= 1 else _TEMPLATE
