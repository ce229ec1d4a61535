"""Builds responses of vLLM's contract: streamed chunks and complete answers."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from smg_grpc_proto import vllm_engine_pb2 as vllm

from inference_svc.sampling.logprobs import SampledToken
from inference_svc.sequence.sequence import FinishReason, Sequence, SequenceOutput

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
ABORTED = "abort"


@dataclass(eq=False)
class VllmResponse:
    """One of a request's answers, during its generation."""

    index: int
    sequence: Sequence | None = None
    """Set with the first output."""
    drawn: list[SampledToken] = field(default_factory=list)

    def take(self, sequence: Sequence, output: SequenceOutput) -> vllm.GenerateResponse | None:
        """Add an output; return its stream chunk, or None for an output without a token."""
        first, self.sequence = not self.drawn, sequence
        if output.token is None:
            return None
        self.drawn.append(output.token)
        chunk = vllm.GenerateStreamChunk(
            token_ids=[output.token.token],
            prompt_tokens=sequence.request.num_prompt_tokens,
            completion_tokens=1,  # vLLM counts the tokens of the chunk
            cached_tokens=sequence.usage.num_cached,
            output_logprobs=_output_logprobs(sequence, [output.token]),
            input_logprobs=_input_logprobs(sequence) if first else None,
            index=self.index,
        )
        return vllm.GenerateResponse(chunk=chunk)

    def ended(self, finish: FinishReason) -> vllm.GenerateResponse:
        """Build the complete response, which also ends a stream."""
        return self._whole(_FINISH[finish])

    def aborted(self) -> vllm.GenerateResponse:
        """Build the complete response of an aborted request, with its tokens so far."""
        return self._whole(ABORTED)

    def _whole(self, reason: str) -> vllm.GenerateResponse:
        whole = vllm.GenerateComplete(
            output_ids=[drawn.token for drawn in self.drawn],
            finish_reason=reason,
            completion_tokens=len(self.drawn),
            index=self.index,
        )
        if self.sequence is not None:
            _fill(self.sequence, self.drawn, whole)
        return vllm.GenerateResponse(complete=whole)


def _fill(sequence: Sequence, drawn: Many[SampledToken], whole: vllm.GenerateComplete) -> None:
    told = vllm.GenerateComplete(
        prompt_tokens=sequence.request.num_prompt_tokens,
        cached_tokens=sequence.usage.num_cached,
        spec_draft_tokens=sequence.speculation.num_draft_tokens,
        spec_accepted_tokens=sequence.speculation.num_accepted_tokens,
        output_logprobs=_output_logprobs(sequence, drawn),
        input_logprobs=_input_logprobs(sequence),
    )
    whole.MergeFrom(told)
    if whole.finish_reason != _FINISH[FinishReason.STOP]:
        return
    # The contract does not report the model's own end-of-sequence tokens.
    if sequence.detokenizer.stopped:
        whole.matched_stop_str = sequence.detokenizer.stopped_by
    elif sequence.tokens[-1] in sequence.request.own_stop_token_ids:
        whole.matched_token_id = sequence.tokens[-1]


def _output_logprobs(sequence: Sequence, drawn: Many[SampledToken]) -> vllm.OutputLogProbs | None:
    if sequence.request.num_logprobs is None or not drawn:
        return None
    return vllm.OutputLogProbs(
        token_logprobs=[one.logprob or 0.0 for one in drawn],
        token_ids=[one.token for one in drawn],
        top_logprobs=_tops(sequence.request.num_logprobs, drawn),
    )


def _input_logprobs(sequence: Sequence) -> vllm.InputLogProbs | None:
    """Build prompt logprobs; the first token has none, because no token precedes it."""
    if sequence.request.num_prompt_logprobs is None:
        return None
    scored: list[SampledToken] = [SampledToken(sequence.tokens[0]), *sequence.prompt_logprobs]
    return vllm.InputLogProbs(
        token_logprobs=[
            vllm.InputTokenLogProb(value=(one.logprob or 0.0) if i else None) for i, one in enumerate(scored)
        ],
        token_ids=[one.token for one in scored],
        top_logprobs=_tops(sequence.request.num_prompt_logprobs, scored),
    )


def _tops(wanted: int, drawn: Many[SampledToken]) -> list[vllm.TopLogProbs]:
    """Build the likeliest tokens at each position; empty unless requested."""
    if not wanted:
        return []
    return [vllm.TopLogProbs(values=[p for _, p in one.top], token_ids=[t for t, _ in one.top]) for one in drawn]
