"""A draft model by itself: what it does not know, and what it may take."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from kvsidecar.errors import ConfigurationError
from torch import Tensor

from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.forward_batch import ForwardBatch
from inference_svc.sequence.generation_request import SpeculationMode
from inference_svc.server.runtime import build_runtime
from inference_svc.server.worker_config import WorkerConfig
from inference_svc.spec_decode.draft_model_proposer import DraftModelProposer
from inference_svc.spec_decode.proposer import ROOT, Draft, DraftRequest
from tests.inference_svc.spec_decode.chance import VOCABULARY, Table, answers, loop_of, sequence

MOST = 8


def pool(pages: int) -> KVPool:
    return KVPool(1, 1, 16, pages * PAGE_TOKENS, torch.float32, torch.device("cpu"))


class Narrow(Table):
    """Model with token ids below ``rows``. Like an embedding, it raises IndexError for other ids."""

    def __init__(self, rows: int) -> None:
        super().__init__(torch.zeros(rows, rows))


def test_text_with_tokens_that_the_draft_does_not_have_is_not_guessed_and_breaks_nothing() -> None:
    """Models of one family share a tokenizer, and pad their embeddings to other sizes."""
    draft = DraftModelProposer(cast(Any, Narrow(4)), pool(8), VOCABULARY, 256, 512, known=4)
    strange = sequence([1, 2, 5], 64, SpeculationMode.DRAFT)
    for _ in range(2):
        plain = sequence([1, 2, 3], 64, SpeculationMode.DRAFT)
        found = draft.propose([DraftRequest(strange, MOST), DraftRequest(plain, MOST)])
        assert found[0].tokens == ()
        assert len(found[1].tokens) == MOST
        strange.tokens.append(1)
        draft.forget(plain)
    later = sequence([1, 2, 3], 64, SpeculationMode.DRAFT)
    assert draft.propose([DraftRequest(later, MOST)])[0].tokens
    later.tokens.append(4)  # the model may say it
    draft.observe(later, MOST, 0)
    assert not draft.propose([DraftRequest(later, MOST)])[0].tokens


def test_a_copy_guesses_in_the_pages_that_the_sequence_has() -> None:
    """Growing would take a page that another sequence needs for its next token."""
    own = pool(2)
    one = sequence([1] * (PAGE_TOKENS - 3), 64, SpeculationMode.DRAFT)
    one.kv.table, one.kv.num_computed = own.allocate(PAGE_TOKENS), PAGE_TOKENS - 4
    before = own.free_pages
    draft = DraftModelProposer(
        cast(Any, Table(torch.zeros(VOCABULARY, VOCABULARY))), own, VOCABULARY, 256, 512, copy=True
    )
    assert len(draft.propose([DraftRequest(one, MOST)])[0].tokens) == 3
    assert own.free_pages == before
    one.tokens += [1, 1, 1]
    one.kv.num_computed = len(one.tokens) - 1
    assert draft.propose([DraftRequest(one, MOST)])[0].tokens == ()


def test_a_copy_that_computes_nan_leaves_none_in_the_models_pages() -> None:
    class Spoiling(Table):
        def __call__(self, batch: ForwardBatch) -> Tensor:
            for tensor in (batch.pool.keys, batch.pool.values):
                tensor[:, :, batch.slots[: batch.real]] = float("nan")
            found = super().__call__(batch)
            return found if self.passes < 3 else torch.full_like(found, float("nan"))

    own = pool(2)
    one = sequence([1] * 10, 64, SpeculationMode.DRAFT)
    one.kv.table, one.kv.num_computed = own.allocate(PAGE_TOKENS), 9
    model = Spoiling(torch.zeros(VOCABULARY, VOCABULARY))
    draft = DraftModelProposer(cast(Any, model), own, VOCABULARY, 256, 512, copy=True)
    assert len(draft.propose([DraftRequest(one, MOST)])[0].tokens) == 2
    assert own.keys.isfinite().all()
    assert own.values.isfinite().all()


def test_a_draft_beside_a_streamed_model_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    config = WorkerConfig(
        model="demo", dtype="float32", stream="full_stream", speculate="draft", draft_model="demo", pool_bytes="64MiB"
    )
    with pytest.raises(ConfigurationError, match="draft_model is demo, and demo is streamed"):
        build_runtime(config)
    config = config.model_copy(update={"draft_model": "self", "weights": 4})
    with pytest.raises(ConfigurationError, match="draft_model is self, and demo is streamed at 4 bits"):
        build_runtime(config)


def test_beside_each_guess_stands_the_second_likeliest() -> None:
    """The draft takes the model's second choice for its first, after every other token: the model's is in the tree."""
    chosen = torch.full((VOCABULARY, VOCABULARY), -20.0)
    for token in range(VOCABULARY):
        chosen[token, (token + 1) % VOCABULARY], chosen[token, (token + 3) % VOCABULARY] = 20.0, 19.0
    mistaken = chosen.clone()
    for token in range(0, VOCABULARY, 2):
        mistaken[token, (token + 3) % VOCABULARY] = 21.0
    draft = DraftModelProposer(cast(Any, Table(mistaken)), pool(8), VOCABULARY, 256, 512)
    one = sequence([1, 2, 3], 64, SpeculationMode.DRAFT, temperature=0.0)
    (tree,) = draft.propose([DraftRequest(one, 3, 2)])
    assert tree == Draft((4, 1, 2, 0, 5, 4), (ROOT, 0, 1, ROOT, 0, 1), (0, 0, 0, 1, 1, 1))
    draft.forget(one)
    for branches in (1, 2):
        guessing = DraftModelProposer(cast(Any, Table(mistaken)), pool(8), VOCABULARY, 256, 512)
        loop = loop_of(Table(chosen), {SpeculationMode.DRAFT: guessing}, branches=branches)
        (answer,) = answers(loop, [sequence([1, 2, 3], 60, SpeculationMode.DRAFT, temperature=0.0)])
        assert answer == [(4 + i) % VOCABULARY for i in range(60)]
        assert (loop._speculator.stats.branches > 5) is (branches == 2)
