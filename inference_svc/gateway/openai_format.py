"""Answers in OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kvsidecar.client import timings_dict
from kvsidecar.inference.v1 import inference_pb2 as pb

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_FINISH = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


def finish_reason(value: pb.FinishReason.ValueType) -> str | None:
    return _FINISH.get(value)


def model(found: pb.GetModelResponse, name: str, created: int) -> dict[str, Any]:
    """A model, or an adapter of it by its name, as lists of them have it. ``created`` is when the gateway started, in
    seconds since 1970: when a model was made, its files do not say. The lengths are extensions, ``max_model_len``
    and ``parent``, the model that an adapter is of, are vLLM's."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "kvsidecar",
        "context_length": found.context_length,
        "max_model_len": found.context_length,
        "parent": None if name == found.model_id else found.model_id,
    }


def usage(parts: list[pb.Usage], choices_per_prompt: int) -> dict[str, Any]:
    """Usage of all choices; a prompt counts once, however many choices it has."""
    prompts = parts[::choices_per_prompt]
    prompt_tokens = sum(u.prompt_tokens for u in prompts)
    generated = sum(u.generated_tokens for u in parts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {
            "cached_tokens": sum(u.cached_tokens for u in prompts),
            "approximate_tokens": sum(u.approximate_tokens for u in prompts),
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(u.accepted_tokens for u in parts),
            "rejected_prediction_tokens": sum(u.draft_tokens - u.accepted_tokens for u in parts),
        },
    }


def timings(value: pb.Timings) -> dict[str, float]:
    """An extension: where the time went, in milliseconds."""
    return {k: round(v, 3) for k, v in timings_dict(value).items()}


_READING = {
    pb.READING_EXACT: "exact",
    pb.READING_MOVED: "moved",
    pb.READING_REPAIRED: "repaired",
    pb.READING_COMPUTED: "computed",
}


def prompt_provenance(part: pb.GenerateStreamResponse) -> dict[str, Any]:
    """An extension: which parts of the prompt had been read before, and which bits the worker computes."""
    parts = [{"reading": _READING[p.reading], "tokens": p.tokens, "text": p.text} for p in part.prompt_parts]
    numerics = {"id": part.numerics.id, "shared_across_machines": part.numerics.shared_across_machines}
    return {"prompt_parts": parts, "numerics": numerics}


def prompt_logprobs(parts: Iterable[pb.TokenLogprob]) -> list[dict[str, Any] | None]:
    """vLLM's, of each token of a prompt: None for the first, for the others what else might have stood there."""

    def one(p: pb.TokenLogprob, rank: int) -> dict[str, Any]:
        return {"logprob": p.logprob, "rank": rank, "decoded_token": p.text}

    def at(p: pb.TokenLogprob) -> dict[str, Any] | None:
        top = {str(t.token_id): one(t, rank) for rank, t in enumerate(p.top, 1)}
        return {str(p.token_id): one(p, p.rank), **top} if p.rank else None

    return [at(p) for p in parts]


def stop_reason(part: pb.GenerateStreamResponse) -> str | int | None:
    """vLLM's: the stop string or token of the request's that ended an answer."""
    kind = part.WhichOneof("stopped_by")
    return None if kind is None else getattr(part, kind)


def chat_logprobs(parts: list[pb.TokenLogprob]) -> dict[str, Any]:
    def one(p: pb.TokenLogprob) -> dict[str, Any]:
        # Part of a character has no text, and what its bytes are is not known here.
        bytes_ = None if "\ufffd" in p.text else list(p.text.encode())
        return {"token": p.text, "logprob": p.logprob, "bytes": bytes_}

    return {"content": [{**one(p), "top_logprobs": [one(t) for t in p.top]} for p in parts], "refusal": None}


def completion_logprobs(parts: list[pb.TokenLogprob], most: int, at: int, from_prompt: bool) -> dict[str, Any]:
    """``most`` alternatives of each. ``at``: where in the answer's text the parts begin, in characters. With
    ``from_prompt`` they begin with the prompt's, before whose first there is nothing that it could follow."""
    offsets = []
    for p in parts:
        offsets.append(at)
        at += len(p.text)
    return {
        "tokens": [p.text for p in parts],
        "token_logprobs": [p.logprob if i or not from_prompt else None for i, p in enumerate(parts)],
        "top_logprobs": [_top(p, most) if i or not from_prompt else None for i, p in enumerate(parts)],
        "text_offset": offsets,
    }


def _top(p: pb.TokenLogprob, most: int) -> dict[str, float]:
    """Of several tokens with one text, such as parts of characters, the likeliest."""
    found: dict[str, float] = {}
    for t in p.top[:most]:
        found.setdefault(t.text, t.logprob)
    return found


def json_bytes(value: Any) -> bytes:
    """JSON, written piece by piece: in a thread, a large value does not hold the interpreter's lock all the while."""
    return "".join(_ENCODER.iterencode(value)).encode()


def event(data: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
