"""``echo``: the prompt, and how likely its tokens are, before the answer to it. What lm-eval reads likelihoods from."""

from __future__ import annotations

from collections.abc import AsyncIterator

from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.gateway.merged_stream import Piece
from inference_svc.gateway.request_schema import CompletionRequest


async def echoing(request: CompletionRequest, pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    """The pieces, the first of each choice with its prompt, and nothing of the answers where none was asked for."""
    begun: set[int] = set()
    async for piece in pieces:
        part = piece.part
        if request.only_prompt:
            _empty(part)
        if piece.choice not in begun:
            begun.add(piece.choice)
            part.text = part.prompt_text + part.text
            if request.logprobs is not None:
                both = [*part.prompt_logprobs, *part.logprobs]
                del part.logprobs[:]
                part.logprobs.extend(both)
        yield piece


def _empty(part: pb.GenerateStreamResponse) -> None:
    part.text = ""
    del part.logprobs[:]
    if part.finish_reason:
        part.finish_reason = pb.FINISH_REASON_LENGTH
        part.usage.generated_tokens = 0
        part.ClearField("stop_string")
        part.ClearField("stop_token_id")
