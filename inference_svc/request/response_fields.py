"""Fields of a response: log probabilities, stop reasons, reasoning and usage as protocol messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.chat_template.reasoning_splitter import ReasoningSplitter
from inference_svc.sampling.logprobs import PromptLogprob, SampledToken
from inference_svc.sequence.sequence import FinishReason, Sequence, SequenceOutput

# Returns a token's text and its bytes.
DecodeToken = Callable[[int], tuple[str, bytes]]


def token_logprob(drawn: SampledToken, decode: DecodeToken) -> pb.TokenLogprob:
    """Build the message of a sampled token or prompt token, with its likeliest alternatives."""

    def one(token: int, logprob: float) -> pb.TokenLogprob:
        text, encoded = decode(token)
        return pb.TokenLogprob(token_id=token, text=text, logprob=logprob, token_bytes=encoded)

    found = one(drawn.token, drawn.logprob or 0.0)
    found.top.extend(one(*likely) for likely in drawn.top)
    found.rank = drawn.rank if isinstance(drawn, PromptLogprob) else 0
    return found


def prompt_logprobs(sequence: Sequence, decode: DecodeToken) -> list[pb.TokenLogprob]:
    """Build the prompt logprobs of a sequence that has its first token; empty unless requested. Takes time."""
    if sequence.request.num_prompt_logprobs is None:
        return []
    scored: Iterable[SampledToken] = (SampledToken(sequence.tokens[0]), *sequence.prompt_logprobs)
    return [token_logprob(one, decode) for one in scored]


def generated_logprobs(output: SequenceOutput, decode: DecodeToken) -> list[pb.TokenLogprob]:
    """Build the message of an output's token; empty unless log probabilities are requested."""
    if output.token is None or output.token.logprob is None:
        return []
    found = token_logprob(output.token, decode)
    found.text_offset = output.text_offset
    return [found]


def copy_stop_reason(part: pb.GenerateStreamResponse, answer: pb.GenerateResponse) -> None:
    """Copy the stop reason of a stream's last part to a complete answer."""
    kind = part.WhichOneof("stopped_by")
    if kind is not None:
        setattr(answer, kind, getattr(part, kind))


def set_stop_reason(sequence: Sequence, finish: FinishReason, answer: pb.GenerateStreamResponse) -> None:
    """Set the stop string or the request's own stop token that ended the sequence."""
    if finish is not FinishReason.STOP:
        return
    if sequence.detokenizer.stopped:
        answer.stop_string = sequence.detokenizer.stopped_by
    elif sequence.tokens[-1] in sequence.request.own_stop_token_ids:
        answer.stop_token_id = sequence.tokens[-1]


def split_reasoning(splitter: ReasoningSplitter, part: pb.GenerateStreamResponse) -> None:
    """Move reasoning from a part's text to its ``reasoning``."""
    part.reasoning, part.text = splitter.split(part.text, len(part.token_ids), bool(part.finish_reason))


def add_usage(
    sequence: Sequence, part: pb.GenerateStreamResponse, generated_tokens: int, reasoning_tokens: int
) -> None:
    """Set the usage of an answer up to and including a part; the sequence may have more tokens already."""
    prompt, cached = sequence.request.num_prompt_tokens, sequence.usage.num_cached
    part.usage.prompt_tokens, part.usage.cached_tokens = prompt, cached
    part.usage.generated_tokens, part.usage.reasoning_tokens = generated_tokens, reasoning_tokens
    part.usage.approximate_tokens = sequence.usage.num_approximate
    part.usage.recomputed_tokens = sequence.usage.num_recomputed
    part.usage.draft_tokens = sequence.speculation.num_draft_tokens
    part.usage.accepted_tokens = sequence.speculation.num_accepted_tokens
    part.usage.cache_write_tokens = prompt - cached if sequence.request.cache.write else 0


def join_parts(parts: list[pb.GenerateStreamResponse]) -> list[pb.GenerateStreamResponse]:
    """Join consecutive parts of a stream to as few messages as possible. Changes the parts.

    In a message, reasoning precedes text, and text precedes calls. So a new message begins where the answer has another
    order. A new message also begins with the text after reasoning, so that log probabilities are of one of them.
    """
    joined = list[pb.GenerateStreamResponse]()
    for part in parts:
        whole = joined[-1] if joined else None
        if (
            whole is None
            or ((whole.tool_calls or whole.reasoning) and part.text)
            or (whole.tool_calls and part.reasoning)
        ):
            joined.append(part)
            continue
        text, reasoning = whole.text + part.text, whole.reasoning + part.reasoning
        whole.MergeFrom(part)
        whole.text, whole.reasoning = text, reasoning
    return joined
