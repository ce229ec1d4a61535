"""A preempted sequence waits in host memory behind the pool, and its tokens are not computed again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kvsidecar.errors import OverflowFailed
from torch import Tensor

from inference_svc.engine.engine import Engine
from inference_svc.engine.engine_stats import EngineLimits
from inference_svc.kv_pool.host_overflow import HostOverflow
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.forward_batch import SequenceSlice
from inference_svc.sequence.generation_request import CacheParams
from inference_svc.sequence.kv_connector import NullKVConnector
from tests.inference_svc.models.test_architectures import build
from tests.inference_svc.server.test_load import Request, idle, submit_together
from tests.inference_svc.windowed import SlowCache, prompt

PROMPTS = [prompt(100 + i, 300) for i in range(4)]
ANSWER = 200
# Four prompts fit, and three answers beside them do not.
POOL = 1504
COMPUTED = len(PROMPTS) * (300 + ANSWER)


def memory(strips: int, device_bytes: int, host_bytes: int) -> Tensor:
    """Replace a device's memory: NaN, as float32, until it is written."""
    return torch.full((strips, device_bytes + host_bytes), 0xFF, dtype=torch.uint8)


class Counted(Engine):
    """Engine that counts the computed rows."""

    rows = 0

    def count_rows(self) -> None:
        compute = self.decoder.compute

        def counting(slices: list[SequenceSlice], pool: KVPool) -> Tensor:
            self.rows += sum(len(piece.tokens) for piece in slices)
            return compute(slices, pool)

        vars(self.decoder)["compute"] = counting


def engine(tokens: int, beyond: int, connector: NullKVConnector | None = None, cached: int = 64) -> Counted:
    loaded, _, _ = build("LlamaForCausalLM", torch.float32)
    shape = loaded.layers, loaded.kv_heads, loaded.head_dim
    overflow = HostOverflow(memory, *shape, tokens, beyond, loaded.dtype) if beyond else None
    pool = KVPool(*shape, tokens, loaded.dtype, loaded.device, (), overflow)
    limits = EngineLimits(max_num_batched_tokens=128, prefix_cache_sequences=cached)
    made = Counted(loaded, pool, connector or NullKVConnector(), limits)
    made.count_rows()
    return made


def answers(
    one: Engine, use: CacheParams | None = None, prompts: list[list[int]] = PROMPTS, length: int = ANSWER
) -> list[list[int]]:
    """Return the answers to prompts, which run together."""
    requests = [Request(ids, length) for ids in prompts]
    for request in requests:
        request.sequence.request = replace(request.sequence.request, cache=use or CacheParams())
    submit_together(one, requests)
    found = [request.tokens() for request in requests]
    idle(one)
    one.check_integrity()
    one.stop()
    return found


@pytest.fixture(scope="module")
def want() -> list[list[int]]:
    return answers(engine(4096, 0))


def test_nothing_is_computed_again(want: list[list[int]]) -> None:
    one = engine(POOL, 2048)
    assert answers(one) == want
    assert one.stats.preemptions > 0
    assert one.rows <= COMPUTED
    assert one.free_pages == one.pool.pages


def test_without_such_memory_it_is(want: list[list[int]]) -> None:
    one = engine(POOL, 0)
    assert answers(one) == want
    assert one.rows > COMPUTED + 100


def test_the_daemon_is_not_asked(want: list[list[int]]) -> None:
    slow = SlowCache()  # it never answers
    assert answers(engine(POOL, 2048, slow)) == want
    assert not slow._parts


@pytest.mark.parametrize("use", [CacheParams(read=False), CacheParams(write=False)])
def test_what_may_not_be_cached_is_computed_again(want: list[list[int]], use: CacheParams) -> None:
    one = engine(POOL, 2048)
    assert answers(one, use) == want
    assert one.rows > COMPUTED + 100
    assert one.free_overflow_pages == one.pool.overflow_pages


def test_without_room_it_goes_to_the_daemon_or_is_computed_again(
    want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OverflowFailed("the host is full")

    monkeypatch.setattr(HostOverflow, "reserve", full)
    slow = SlowCache()
    slow.go_on()
    one = engine(POOL, 2048, slow)
    assert answers(one) == want
    assert slow._asked.is_set()
    assert one.pool.free_overflow_pages == one.pool.overflow_pages, "a failed copy has no blocks"


def test_without_a_prefix_cache_it_goes_to_the_daemon(want: list[list[int]]) -> None:
    slow = SlowCache()
    slow.go_on()
    one = engine(POOL, 2048, slow, cached=0)
    assert answers(one) == want
    assert slow._asked.is_set()
    assert one.free_overflow_pages == one.pool.overflow_pages


def test_an_answer_that_outgrows_the_pool_continues_in_its_copy() -> None:
    long = [prompt(9, 200)]
    want = answers(engine(4096, 0), prompts=long, length=500)
    one = engine(576, 2048)
    assert answers(one, prompts=long, length=500) == want
    assert one.stats.overflow_admissions == 1
    assert one.rows <= 200 + 500
