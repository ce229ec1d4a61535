"""Request options: checks of limits, stops, logprobs and cache use."""

from __future__ import annotations

from typing import Literal

from kvsidecar import keys
from kvsidecar.chunk_layout import MAX_TTL_SECONDS
from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.kv_transfer.cache_hints import CacheHints
from kvsidecar.request_limits import MAX_PROMPT_LOGPROBS, check_num_stops
from kvsidecar.retained_prefixes import RetainedPrefixes

from inference_svc.context_reuse.chunking import DocumentMarks
from inference_svc.kv_pool import MAX_BRANCHES
from inference_svc.sequence.generation_request import CacheParams

DEFAULT_MAX_TOKENS = 256
_MAX_SESSION_BYTES = 128
_MAX_STOP_CHARACTERS, _MAX_STOP_TOKENS, _MAX_LOGPROBS = 1024, 128, 20
_MAX_LOGPROB_TOKENS = 128


def max_new_tokens(request: pb.GenerateRequest, limit: int) -> int:
    """Return the maximum number of new tokens, at most ``limit``. Raises InvalidRequest."""
    wanted = max(DEFAULT_MAX_TOKENS, request.min_tokens)
    if request.HasField("max_tokens"):
        wanted = request.max_tokens
    if wanted < 1:
        raise InvalidRequest(f"max_tokens is {wanted}; at least 1 is needed", param="max_tokens")
    most = min(wanted, limit)
    if request.min_tokens > most:
        raise InvalidRequest(
            f"min_tokens is {request.min_tokens}, and the answer can have at most {most}", param="min_tokens"
        )
    return most


def request_stop_ids(request: pb.GenerateRequest, vocabulary: int) -> frozenset[int]:
    """Return the stop token ids of a request. Raises InvalidRequest."""
    if len(request.stop_token_ids) > _MAX_STOP_TOKENS:
        raise InvalidRequest(
            f"stop_token_ids has {len(request.stop_token_ids)} tokens; at most {_MAX_STOP_TOKENS} are allowed",
            param="stop_token_ids",
        )
    wrong = next((i for i in request.stop_token_ids if i >= vocabulary), None)
    if wrong is not None:
        raise InvalidRequest(
            f"stop_token_ids has token {wrong}, outside the vocabulary of {vocabulary}",
            param="stop_token_ids",
        )
    return frozenset(request.stop_token_ids)


def stop_strings(request: pb.GenerateRequest) -> tuple[str, ...]:
    """Return the stop strings of a request. Raises InvalidRequest."""
    check_num_stops(len(request.stop))
    if any(not s for s in request.stop):
        raise InvalidRequest("stop has an empty string; each must have at least one character", param="stop")
    longest = max(map(len, request.stop), default=0)
    if longest > _MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"stop has a string of {longest} characters; at most {_MAX_STOP_CHARACTERS} are allowed", param="stop"
        )
    return tuple(request.stop)


def check_salt(salt: bytes) -> None:
    """Raise InvalidRequest for a salt that is too long. The message does not show the salt, which is a secret."""
    if len(salt) > keys.MAX_SALT_BYTES:
        raise InvalidRequest(f"tenant_salt has {len(salt)} bytes; at most {keys.MAX_SALT_BYTES} are allowed")


def check_session(name: str) -> str:
    """Raise InvalidRequest for the name of a session that is too long."""
    if len(name.encode()) > _MAX_SESSION_BYTES:
        raise InvalidRequest(
            f"cache_session has {len(name.encode())} bytes; at most {_MAX_SESSION_BYTES} are allowed",
            param="cache_session",
        )
    return name


def check_seconds(name: str, seconds: int, param: str = "") -> int:
    """Raise InvalidRequest for a time outside the limits of TTLs and retentions."""
    if not 1 <= seconds <= MAX_TTL_SECONDS:
        raise InvalidRequest(
            f"{name} is {seconds}; allowed are 1 to {MAX_TTL_SECONDS} (30 days), or none", param=param or name
        )
    return seconds


def cache_use(
    given: pb.CacheOptions, marks: DocumentMarks, reuse_anywhere: bool, retained: RetainedPrefixes = ()
) -> CacheParams:
    """Return the cache options and hints of a request. Raises InvalidRequest.

    ``reuse_anywhere`` is the worker's setting, for a request that does not choose. ``retained`` are the prefixes to
    retain.
    """
    check_salt(given.tenant_salt)
    if given.HasField("ttl_seconds"):
        check_seconds("cache_ttl_seconds", given.ttl_seconds)
    if given.HasField("reuse_anywhere"):
        if given.reuse_anywhere and given.exact_only:
            raise InvalidRequest(
                "reuse_anywhere is true beside exact_only, which forbids it; send one of them", param="reuse_anywhere"
            )
        reuse_anywhere = given.reuse_anywhere
    return CacheParams(
        read=not given.skip_read,
        write=not given.skip_write,
        tenant_salt=given.tenant_salt,
        reuse_anywhere=reuse_anywhere and not given.exact_only,
        marks=marks,
        hints=CacheHints(
            given.ttl_seconds,
            retained,
            check_session(given.session),
            given.priority == pb.CACHE_PRIORITY_LOW,
            given.fetch,
        ),
    )


def logprobs(name: Literal["logprobs", "prompt_logprobs"], request: pb.GenerateRequest) -> int | None:
    """Return the number of alternatives per token; None for no log probabilities. Raises InvalidRequest."""
    if not request.HasField(name):
        return None
    most: int = getattr(request, name)
    if most > _MAX_LOGPROBS:
        raise InvalidRequest(f"{name} is {most}; allowed are 0 to {_MAX_LOGPROBS}", param=name)
    return most


def logprob_tokens(request: pb.GenerateRequest, vocabulary: int) -> tuple[int, ...]:
    """Return the tokens whose log probabilities are reported. Raises InvalidRequest."""
    found = tuple(dict.fromkeys(request.logprob_tokens))
    if len(found) > _MAX_LOGPROB_TOKENS:
        raise InvalidRequest(
            f"logprob_token_ids has {len(found)} tokens; at most {_MAX_LOGPROB_TOKENS} are allowed",
            param="logprob_token_ids",
        )
    wrong = next((token for token in found if token >= vocabulary), None)
    if wrong is not None:
        raise InvalidRequest(
            f"logprob_token_ids has {wrong}, which is outside the vocabulary of {vocabulary}", param="logprob_token_ids"
        )
    if found and not request.HasField("logprobs"):
        raise InvalidRequest("logprob_token_ids is set without logprobs; set logprobs, too", param="logprob_token_ids")
    return found


def check_prompt_logprobs(scored: int | None, tokens: int) -> None:
    """Raise InvalidRequest if a prompt of ``tokens`` tokens would have too many log probabilities."""
    if scored is not None and tokens * (scored + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs is {scored} for a prompt of {tokens} tokens; tokens times (prompt_logprobs + 1) may be "
            f"{MAX_PROMPT_LOGPROBS} at most",
            param="prompt_logprobs",
        )


def max_branches(given: int) -> int | None:
    """Return the maximum draft branches of a request; None for the worker's setting. Raises InvalidRequest."""
    if given > MAX_BRANCHES:
        raise InvalidRequest(
            f"speculation_branches is {given}; allowed are 1 to {MAX_BRANCHES}", param="speculation_branches"
        )
    return given or None
