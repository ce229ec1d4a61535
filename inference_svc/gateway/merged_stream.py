"""What comes of one request of several choices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from kvsidecar.errors import KVSidecarError
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.requests import add_calls


@dataclass(frozen=True)
class Piece:
    """A piece of one choice of an answer."""

    choice: int
    part: pb.GenerateStreamResponse


@dataclass(eq=False)
class Choice:
    """What came of one choice."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    calls: list[pb.ToolCall] = field(default_factory=list)
    first: pb.GenerateStreamResponse | None = None
    last: pb.GenerateStreamResponse = field(default_factory=pb.GenerateStreamResponse)

    def add(self, part: pb.GenerateStreamResponse) -> None:
        self.texts.append(part.text)
        self.logprobs.extend(part.logprobs)
        add_calls(self.calls, part.tool_calls)
        if self.first is None:
            self.first = part
        self.last = part


async def first_of(pieces: AsyncIterator[Piece]) -> Piece:
    return await anext(pieces)


async def with_first(first: Piece, others: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    yield first
    async for piece in others:
        yield piece


async def about(option: str, pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    """The pieces; errors about the grammar name the option that it came by."""
    try:
        async for piece in pieces:
            yield piece
    except KVSidecarError as error:
        if error.param == "grammar":
            error.param = option
        raise
