"""How likely a prompt is, asked once however many choices go on from it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.gateway.merged_stream import Piece


def ask_once(requests: list[pb.GenerateRequest], choices: int) -> bool:
    """Leaves the scores of each prompt to the first of its ``choices`` requests, which follow each other. Whether
    there was anything to leave."""
    if choices == 1 or not requests[0].HasField("prompt_logprobs"):
        return False
    for i, request in enumerate(requests):
        if i % choices:
            request.ClearField("prompt_logprobs")
    return True


async def handed_on(pieces: AsyncIterator[Piece], choices: int) -> AsyncIterator[Piece]:
    """The pieces, the first of each choice with its prompt's scores: it waits for the choice that has them."""
    found: dict[int, pb.GenerateStreamResponse] = {}  # by the prompt
    waiting: dict[int, list[Piece]] = {}
    begun: set[int] = set()

    def scored(piece: Piece) -> Piece:
        if piece.choice not in begun:
            begun.add(piece.choice)
            piece.part.prompt_logprobs.extend(found[piece.choice // choices].prompt_logprobs)
        return piece

    async for piece in pieces:
        prompt, other = divmod(piece.choice, choices)
        if other and prompt not in found:
            waiting.setdefault(prompt, []).append(piece)
            continue
        if other:
            yield scored(piece)
            continue
        if prompt not in found:
            kept = pb.GenerateStreamResponse(prompt_logprobs=piece.part.prompt_logprobs)
            found[prompt] = kept  # a copy: who writes the piece may change it
        yield piece
        for late in waiting.pop(prompt, ()):
            yield scored(late)
