"""Translates requests of vLLM's contract into our protocol.

The worker's service checks the values.
"""

from __future__ import annotations

import json

from kvsidecar.errors import InvalidRequest, UnsupportedOption
from kvsidecar.inference.v1 import inference_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2 as vllm

_MAX_CHOICES = 8
_ANY_OBJECT = json.dumps({"type": "object"})
# Fields for images, and for KV transfer between engines.
_REFUSED = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "extra_mm_inputs", "media_refs")


def to_requests(request: vllm.GenerateRequest, context_length: int) -> list[pb.GenerateRequest]:
    """Translate into one request per answer (``n``). Raises InvalidRequest and UnsupportedOption."""
    given = {field.name for field, _ in request.ListFields()}
    for name in _REFUSED:
        if name in given:
            raise UnsupportedOption(f"{name} is not supported by this server; leave it out", param=name)
    if request.data_parallel_rank:
        raise InvalidRequest(
            f"data_parallel_rank is {request.data_parallel_rank}; this worker is rank 0 and the only one",
            param="data_parallel_rank",
        )
    params = request.sampling_params
    if params.n > _MAX_CHOICES:
        raise InvalidRequest(f"n is {params.n}; at most {_MAX_CHOICES} are allowed", param="n")
    asked = _to_request(request, params, context_length)
    several = [asked]
    for i in range(1, params.n):
        further = pb.GenerateRequest()
        further.CopyFrom(asked)
        if params.HasField("seed"):
            further.sampling.seed = (params.seed + i) % 2**64
        several.append(further)
    return several


def _to_request(request: vllm.GenerateRequest, params: vllm.SamplingParams, context_length: int) -> pb.GenerateRequest:
    found = pb.GenerateRequest(
        prompt=_prompt(request),
        sampling=_sampling(params),
        # vLLM's default is all tokens of the context that the prompt leaves free.
        max_tokens=params.max_tokens if params.HasField("max_tokens") else context_length,
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        include_stop=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        show_special_tokens=not params.skip_special_tokens,  # affects only stop strings, because answers are token ids
        request_id=request.request_id,
        grammar=_grammar(params),
    )
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            wanted: int = getattr(params, name)
            if wanted < 0:
                raise InvalidRequest(f"{name} is {wanted}; allowed are 0 to 20", param=name)
            setattr(found, name, wanted)
    if params.HasField("truncate_prompt_tokens"):
        found.truncate_prompt_tokens = _max_prompt_tokens(params, context_length)
    return found


def _prompt(request: vllm.GenerateRequest) -> pb.Prompt | None:
    kind = request.WhichOneof("input")
    if kind == "tokenized":
        return pb.Prompt(token_ids=pb.TokenIds(ids=request.tokenized.input_ids))
    return pb.Prompt(text=request.text) if kind == "text" else None


def _sampling(params: vllm.SamplingParams) -> pb.Sampling:
    """Translate the sampling parameters.

    A router gets the model's defaults from GetModelInfo and sends them explicitly. In a field where 0 is not a valid
    value, 0 means unset.
    """
    wrong = next((token for token in params.logit_bias if token < 0), None)
    if wrong is not None:
        raise InvalidRequest(f"logit_bias has token {wrong}; allowed are 0 and above", param="logit_bias")
    return pb.Sampling(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed % 2**64 if params.HasField("seed") else None,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        logit_bias=dict(params.logit_bias),
    )


def _grammar(params: vllm.SamplingParams) -> pb.Grammar | None:
    kind = params.WhichOneof("constraint")
    if kind == "structural_tag":
        raise UnsupportedOption("structural_tag is not supported by this server; leave it out", param=kind)
    if kind == "json_object":
        return pb.Grammar(json_schema=_ANY_OBJECT) if params.json_object else None
    if kind == "choice":
        return pb.Grammar(choice=pb.Choices(texts=params.choice.choices))
    return None if kind is None else pb.Grammar(**{kind: getattr(params, kind)})


def _max_prompt_tokens(params: vllm.SamplingParams, context_length: int) -> int:
    """Maximum prompt tokens for truncation; 0: as many as the context holds beside ``max_tokens``."""
    kept: int = params.truncate_prompt_tokens
    if kept == -1:  # as many tokens as the context holds beside the answer
        return 0 if params.HasField("max_tokens") else max(1, context_length - max(1, params.min_tokens))
    if kept < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {kept}; allowed are 1 and more, and -1 for as many as there is room for",
            param="truncate_prompt_tokens",
        )
    return kept
