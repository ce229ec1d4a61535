"""A guess from which the model computes NaN costs no answer, and leaves nothing that others would read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from inference_svc.engine.engine import Engine
from inference_svc.engine.engine_stats import EngineLimits
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.sequence.generation_request import SpeculationMode
from inference_svc.sequence.kv_connector import NullKVConnector
from inference_svc.spec_decode.proposer import ROOT, Draft, DraftRequest
from inference_svc.spec_decode.speculator import Speculator
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.engine.test_isolation import POISON, poisoned
from tests.inference_svc.server.test_load import idle
from tests.inference_svc.spec_decode.chance import free_rows
from tests.inference_svc.spec_decode.test_engine import Asked
from tests.inference_svc.spec_decode.test_tree_verifier import Misled

LENGTH = 40


class Poisoning(Misled):
    """Proposer of right tokens and then the token ``POISON``, on the first path or in a branch."""

    def __init__(self, answer: list[int], branch: bool) -> None:
        super().__init__()
        self._answer, self._branch = answer, branch

    def _guess(self, request: DraftRequest) -> Draft:
        done = request.sequence.num_generated
        right = self._answer[done : done + min(request.max_tokens, 1 + done % 3)]
        if self._branch and request.max_branches > 1:
            tokens, parents = [*right, POISON], [*range(ROOT, len(right) - 1), len(right) - 2]
        else:
            tokens = [*right, POISON][: request.max_tokens]
            parents = [*range(ROOT, len(tokens) - 1)]
        return Draft(tuple(tokens), tuple(parents), (0,) * len(tokens))


@pytest.fixture(params=["ours", "torch's"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """By either attention."""
    loaded = poisoned()
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 1024, loaded.dtype, loaded.device)
    if request.param != "ours":
        pool.attends_by_pages = False
    found = Engine(loaded, pool, NullKVConnector(), EngineLimits(num_speculative_branches=3))
    yield found
    idle(found)
    found.check_integrity()
    found.stop()


def guessing(engine: Engine, proposer: Any) -> Speculator:
    found = Speculator({SpeculationMode.NGRAM: proposer}, free_rows(), 8, 3)
    engine.speculator = engine._core._speculator = engine._core._builder._speculator = found
    return found


@pytest.mark.parametrize("branch", [False, True], ids=["chain", "branch"])
def test_answers_are_those_without_and_the_pool_is_finite(engine: Engine, branch: bool) -> None:
    def answer(speculation: SpeculationMode) -> list[int]:
        request = Asked(prompt(1, 50), LENGTH, speculation)
        engine.submit(request.sequence)
        return request.tokens()

    want = answer(SpeculationMode.OFF)
    speculator = guessing(engine, Poisoning(want, branch))
    assert answer(SpeculationMode.NGRAM) == want
    assert speculator.stats.draft_tokens == 0, "nothing of a pass that is not finite counts"
    idle(engine)
    assert torch.isfinite(engine.pool.keys).all()
    assert torch.isfinite(engine.pool.values).all(), "the next owner of these pages would read NaN"


def test_others_in_the_batch_notice_nothing(engine: Engine) -> None:
    def ask(speculation: SpeculationMode) -> list[list[int]]:
        requests = [Asked(prompt(1, 50), LENGTH, speculation)]
        requests += [
            Asked(prompt(i, 20 + i), LENGTH, SpeculationMode.OFF, seed=i, temperature=i % 2) for i in range(2, 8)
        ]
        for request in requests:
            engine.submit(request.sequence)
        return [request.tokens() for request in requests]

    want = ask(SpeculationMode.OFF)
    guessing(engine, Poisoning(want[0], False))
    assert ask(SpeculationMode.NGRAM) == want


def test_a_request_that_is_not_finite_itself_still_fails_alone(engine: Engine) -> None:
    guessing(engine, Poisoning([], False))
    bad = Asked([*prompt(1, 10), POISON, *prompt(2, 10)], LENGTH, SpeculationMode.NGRAM)
    good = Asked(prompt(3, 20), LENGTH, SpeculationMode.OFF)
    for request in (bad, good):
        engine.submit(request.sequence)
    with pytest.raises(AssertionError, match="NaN"):
        bad.tokens()
    assert len(good.tokens()) == LENGTH
