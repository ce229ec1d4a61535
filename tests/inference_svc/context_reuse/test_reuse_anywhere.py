"""Reuse anywhere with one flag: what is found, what is verified, and what a node says about it."""

from __future__ import annotations

import random
import re
import time
from statistics import fmean
from typing import Any

import pytest
from kvsidecar.cache.v1.cache_pb2 import ReuseVerdict
from kvsidecar.cli import doctor
from kvsidecar.cli.node_commands import parts_in
from kvsidecar.errors import InvalidRequest

from benchmarks.node import Node
from benchmarks.retrieval import agreements, messages, retrieved
from inference_svc.context_reuse.chunking import new_chunker
from inference_svc.context_reuse.reuse_policy import ReusePolicy
from inference_svc.context_reuse.reuse_state import ReuseState
from inference_svc.context_reuse.selectors import SELECTORS
from inference_svc.models.loader import load
from tests.inference_svc.context_reuse.test_approximate import documents, joined
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.models.test_real_models import smollm2  # noqa: F401

PASSED = ReuseVerdict(
    strategy="salient", ratio=0.3, passed=True, kl_mean=0.0227, top1_agreement=0.9639, prompts=12, cost=0.53
)
FAILED = ReuseVerdict(strategy="salient", ratio=0.3, reason="KL 0.2 is more than 0.05")
ROTATION: Any = object()


def policy(on: bool, repair: str = "auto", unverified: bool = False) -> ReusePolicy:
    return ReusePolicy(new_chunker("fixed", 64), ROTATION, SELECTORS.get(repair), None, on, unverified)


@pytest.mark.parametrize(
    ("state", "verified", "said"),
    [
        (ReuseState(policy(True), PASSED), True, "is on, because its verification passed: repair salient computes 30%"),
        (ReuseState(policy(False), PASSED), True, "96.4% of the next tokens agree .* turn it on with --reuse-anywhere"),
        (ReuseState(policy(True), None, "", "3 of 12 prompts"), False, "waits for its verification .3 of 12 prompts."),
        (ReuseState(policy(True), FAILED), False, "is off, because .* did not pass .KL 0.2 is more than 0.05.*verify"),
        (ReuseState(policy(False)), False, "is off, because this model has no verification; .*--reuse-anywhere turns"),
        (ReuseState(policy(True, "guided"), PASSED), False, "passed for salient at 30% and this worker has another"),
        (ReuseState(policy(True), PASSED, "no cache daemon is attached"), False, "is off, because no cache daemon"),
        (ReuseState(policy(True, unverified=True)), True, "without a verification"),
    ],
)
def test_a_sentence_says_whether_and_why(state: ReuseState, verified: bool, said: str) -> None:
    assert state.verified is verified
    assert re.search(said, state.sentence), state.sentence


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("tokens", [60, *(pytest.param(n, marks=pytest.mark.long) for n in (130, 400))])
def test_documents_are_found_in_ten_orders_with_one_flag(tokens: int) -> None:
    """With the default model, whose verdict is shipped, and no other option."""
    rng = random.Random(tokens)
    texts = retrieved(load("smollm2").tokenizer, tokens, rng)
    with Node("smollm2", worker_flags={"reuse_anywhere": True}) as node:
        client = node.client()
        assert client.model().reuse_anywhere.verified
        client.generate(messages(texts, 0), max_tokens=1)
        kept = cached = equal = 0
        same: list[bool] = []
        for order in range(1, 10):
            node.settle()
            rng.shuffle(texts)
            asked = messages(texts, order)
            found = client.generate(asked, max_tokens=1, temperature=0)
            kept += found.cached_tokens - found.recomputed_tokens
            cached += found.prompt_tokens - found.recomputed_tokens
            full = client.generate(asked, max_tokens=8, temperature=0, skip_cache=True)
            equal += found.token_ids == full.token_ids[:1]
            same += agreements(client, asked, found, full.token_ids)
        assert kept >= 0.95 * cached
        assert equal >= 7, "the verdict claims 96 % of the next tokens"
        assert len(same) >= 70
        # The verdicts claim .970 and .962; a share of so few tokens may be off by three standard errors.
        assert fmean(same) >= 0.964 - 3 * (0.964 * 0.036 / len(same)) ** 0.5, f"{fmean(same):.3f} of {len(same)}"


@pytest.mark.usefixtures("smollm2")
def test_a_short_document_before_a_long_question_is_computed() -> None:
    """The pass of the question that measures attention would cost more than the document."""
    texts = retrieved(load("smollm2").tokenizer, 60, random.Random(60))
    with Node("smollm2", worker_flags={"reuse_anywhere": True}) as node:
        client = node.client()
        client.generate(messages(texts, 0), max_tokens=1)
        node.settle()
        short = client.generate([{"role": "user", "content": f"{texts[3]}\n\nWhy?"}], max_tokens=1)
        assert short.approximate_tokens > 40
        question = "Which of the things that this text says would be the first that you doubt, and for what reason? "
        long = client.generate(
            [{"role": "user", "content": f"{texts[3]}\n\n{question * 4}"}], max_tokens=1, explain=True
        )
        assert long.approximate_tokens == 0
        assert long.miss.kind == "repair_slower"
        assert "its repair takes longer" in long.miss.sentence
        assert long.prompt_tokens < 2 * len(question)


@pytest.mark.timeout(400)
def test_an_unverified_model_is_verified_while_idle_and_requests_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in model fails: reuse stays exact, and the node says why."""
    flags = {"reuse_anywhere": True, "dtype": "float32", "document_separator": "<|doc|>"}
    with Node("demo", arena_bytes="64MiB", pool_bytes="64MiB", worker_flags={**flags, "log_level": "info"}) as node:
        client = node.client()
        a, b, c, d = documents(5)
        client.warm(joined([a, b, c, d]))
        node.settle()
        ids = joined([b, a, prompt(9, 20)])
        first = client.model().reuse_anywhere
        assert first.on
        assert client.generate(ids, max_tokens=1).approximate_tokens == 0, "exact until it has passed"
        deadline = time.monotonic() + 240
        while "waits for its verification" in (state := client.model().reuse_anywhere).sentence:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert "did not pass" in state.sentence or state.verified
        assert (client.generate(ids, max_tokens=1).approximate_tokens > 0) is state.verified
        assert client.generate(ids, max_tokens=1, reuse_anywhere=False).approximate_tokens == 0
        with pytest.raises(InvalidRequest, match="reuse_anywhere is true beside exact_only"):
            client.generate(ids, max_tokens=1, reuse_anywhere=True, exact_only=True)
        assert any(state.sentence in part.detail for part in parts_in(node.folder)), "kvsidecar status"
        monkeypatch.setattr(doctor, "own_runtime_dir", lambda: node.folder)
        monkeypatch.setenv("KVSIDECAR_CACHE_SOCKET", str(node.cache_socket))
        assert state.sentence in [finding.detail for finding in doctor._services()]
        assert node.wait_for_log("verifies approximate reuse while the node is idle")
        assert node.wait_for_log(state.sentence)
        node.restart_worker(0)
        after = node.client().model().reuse_anywhere
        assert after.sentence == state.sentence, f"the daemon has stored the verdict: {node.read_log()}"
