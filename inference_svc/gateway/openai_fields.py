"""Converts workers' messages to the fields of OpenAI's response format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from io import StringIO
from typing import Any

from kvsidecar import __version__
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
    """Return the entry of a model, or of one of its adapters, for model lists.

    ``created`` is the start of the gateway in seconds since 1970, because a model's files do not record their age.
    OpenAI's format has no ``context_length``, ``max_model_len`` or ``parent``; the latter two are vLLM's. ``parent`` is
    the model of an adapter.
    """
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "kvsidecar",
        "context_length": found.context_length,
        "max_model_len": found.context_length,
        "parent": None if name == found.model_id else found.model_id,
    }


def fingerprint(found: pb.GetModelResponse) -> str:
    """Return ``system_fingerprint``, which is equal for equal model, numerics and version."""
    text = json.dumps([__version__, found.model_id, found.dtype, found.numerics.id])
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def usage(parts: list[pb.Usage], choices_per_prompt: int) -> dict[str, Any]:
    """Return the usage of all choices. A prompt counts once, not once for each of its choices."""
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
            "cache_write_tokens": sum(u.cache_write_tokens for u in prompts),
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(u.reasoning_tokens for u in parts),
            "accepted_prediction_tokens": sum(u.accepted_tokens for u in parts),
            "rejected_prediction_tokens": sum(u.draft_tokens - u.accepted_tokens for u in parts),
        },
    }


def reasoning(text: str) -> dict[str, str]:
    """Return reasoning under both usual names: the one of vLLM, and the one of DeepSeek, SGLang and llama.cpp."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def timings(value: pb.Timings) -> dict[str, float]:
    """Return the times of a request's phases in milliseconds. OpenAI's format has no such field."""
    return {k: round(v, 3) for k, v in timings_dict(value).items()}


_READING = {
    pb.READING_EXACT: "exact",
    pb.READING_MOVED: "moved",
    pb.READING_REPAIRED: "repaired",
    pb.READING_COMPUTED: "computed",
}


def prompt_provenance(part: pb.GenerateStreamResponse) -> dict[str, Any]:
    """Return how the keys and values of each part of the prompt were obtained. OpenAI's format has no such field."""
    parts = [{"reading": _READING[p.reading], "tokens": p.tokens, "text": p.text} for p in part.prompt_parts]
    numerics = {"id": part.numerics.id, "shared_across_machines": part.numerics.shared_across_machines}
    reuse = part.reuse_anywhere
    anywhere = {"on": reuse.on, "verified": reuse.verified, "sentence": reuse.sentence}
    return {"prompt_parts": parts, "numerics": numerics, "reuse_anywhere": anywhere}


def miss_reason(part: pb.GenerateStreamResponse) -> dict[str, Any]:
    """Return the miss reason; None if all tokens were cached. OpenAI's format has no such field."""
    if not part.HasField("miss"):
        return {"miss": None}
    miss = part.miss
    times = {"seconds_ago": round(miss.seconds_ago, 3), "remembered_seconds": round(miss.remembered_seconds, 3)}
    found = {"kind": miss.kind, "position": miss.position, "computed_tokens": miss.computed_tokens, "by": miss.by}
    place = {"part": miss.part, "text_before": miss.text_before, "text_after": miss.text_after}
    return {"miss": {**found, **times, **place, "sentence": miss.sentence, "advice": miss.advice}}


def prompt_logprobs(parts: Iterable[pb.TokenLogprob], most: int) -> list[dict[str, Any] | None]:
    """Return vLLM's ``prompt_logprobs``, with the ``most`` likeliest tokens at each position.

    The first entry is None, because nothing predicts the first token. Every other entry maps the prompt's token and its
    alternatives to their log probabilities.
    """

    def one(p: pb.TokenLogprob, rank: int) -> dict[str, Any]:
        return {"logprob": p.logprob, "rank": rank, "decoded_token": p.text}

    def at(p: pb.TokenLogprob) -> dict[str, Any] | None:
        top = {str(t.token_id): one(t, rank) for rank, t in enumerate(p.top[:most], 1)}
        return {str(p.token_id): one(p, p.rank), **top} if p.rank else None

    return [at(p) for p in parts]


def stop_reason(part: pb.GenerateStreamResponse) -> str | int | None:
    """Return vLLM's ``stop_reason``: the stop string or stop token of the request that ended the answer, or None."""
    kind = part.WhichOneof("stopped_by")
    return None if kind is None else getattr(part, kind)


def _token(p: pb.TokenLogprob, as_ids: bool) -> str:
    """Return a token as its text, or as vLLM's ``token_id:ID``."""
    return f"token_id:{p.token_id}" if as_ids else p.text


def chat_logprobs(parts: list[pb.TokenLogprob], as_ids: bool = False) -> dict[str, Any]:
    def one(p: pb.TokenLogprob) -> dict[str, Any]:
        known = bool(p.token_bytes) or not p.text
        return {"token": _token(p, as_ids), "logprob": p.logprob, "bytes": list(p.token_bytes) if known else None}

    return {"content": [{**one(p), "top_logprobs": [one(t) for t in p.top]} for p in parts], "refusal": None}


def completion_logprobs(
    parts: list[pb.TokenLogprob], most: int, from_prompt: bool, as_ids: bool = False
) -> dict[str, Any]:
    """Return ``logprobs`` of a completion, with the ``most`` likeliest tokens at each position.

    As with OpenAI and vLLM, the generated token is always among them, so a position may have ``most`` + 1 tokens.

    With ``from_prompt``, ``parts`` begins with the prompt's tokens; the first token has no log probability.
    """
    return {
        "tokens": [_token(p, as_ids) for p in parts],
        "token_logprobs": [p.logprob if i or not from_prompt else None for i, p in enumerate(parts)],
        "top_logprobs": [_top(p, most, as_ids) if i or not from_prompt else None for i, p in enumerate(parts)],
        "text_offset": [p.text_offset for p in parts],
    }


def _top(p: pb.TokenLogprob, most: int, as_ids: bool) -> dict[str, float]:
    """Return log probabilities by text. If tokens have equal text (parts of characters), the likeliest one counts."""
    found: dict[str, float] = {}
    for t in (*p.top[:most], p):
        found.setdefault(_token(t, as_ids), t.logprob)
    return found


def json_bytes(value: Any) -> bytes:
    """Encode JSON piece by piece, so that a thread that encodes a large value does not block the event loop."""
    text = StringIO()  # a join of millions of pieces would be one long call
    text.writelines(_ENCODER.iterencode(value))
    return text.getvalue().encode()
