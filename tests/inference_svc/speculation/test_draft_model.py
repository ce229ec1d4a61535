"""A draft model by itself: what it does not know, and what it may take."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from kvsidecar.errors import ConfigurationError

from inference_svc.config import WorkerConfig
from inference_svc.engine.pool import PAGE_TOKENS, KVPool
from inference_svc.engine.speculation.draft_model import DraftModel
from inference_svc.engine.speculation.mode import Speculation
from inference_svc.engine.speculation.proposer import Wish
from inference_svc.runtime import build
from tests.inference_svc.speculation.chance import VOCABULARY, Table, sequence

MOST = 8


def pool(pages: int) -> KVPool:
    return KVPool(1, 1, 16, pages * PAGE_TOKENS, torch.float32, torch.device("cpu"))


class Narrow(Table):
    """Knows the token ids below ``rows``; as an embedding, it raises IndexError for others."""

    def __init__(self, rows: int) -> None:
        super().__init__(torch.zeros(rows, rows))


def test_text_with_tokens_that_the_draft_does_not_have_is_not_guessed_and_breaks_nothing() -> None:
    """Models of one family share a tokenizer, and pad their embeddings to other sizes."""
    draft = DraftModel(cast(Any, Narrow(4)), pool(8), VOCABULARY, 256, 512, known=4)
    strange = sequence([1, 2, 5], 64, Speculation.DRAFT)
    for _ in range(2):
        plain = sequence([1, 2, 3], 64, Speculation.DRAFT)
        found = draft.propose([Wish(strange, MOST), Wish(plain, MOST)])
        assert found[0].tokens == ()
        assert len(found[1].tokens) == MOST
        strange.tokens.append(1)
        draft.forget(plain)
    later = sequence([1, 2, 3], 64, Speculation.DRAFT)
    assert draft.propose([Wish(later, MOST)])[0].tokens
    later.tokens.append(4)  # the model may say it
    draft.observe(later, MOST, 0)
    assert not draft.propose([Wish(later, MOST)])[0].tokens


def test_a_copy_guesses_in_the_pages_that_the_sequence_has() -> None:
    """Growing would take a page that another sequence needs for its next token."""
    own = pool(2)
    one = sequence([1] * (PAGE_TOKENS - 3), 64, Speculation.DRAFT)
    one.table, one.computed = own.allocate(PAGE_TOKENS), PAGE_TOKENS - 4
    before = own.free_pages
    draft = DraftModel(cast(Any, Table(torch.zeros(VOCABULARY, VOCABULARY))), own, VOCABULARY, 256, 512, copy=True)
    assert len(draft.propose([Wish(one, MOST)])[0].tokens) == 3
    assert own.free_pages == before
    one.tokens += [1, 1, 1]
    one.computed = len(one.tokens) - 1
    assert draft.propose([Wish(one, MOST)])[0].tokens == ()


def test_a_draft_beside_a_streamed_model_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    config = WorkerConfig(
        model="demo", dtype="float32", stream="full_stream", speculate="draft", draft_model="self", pool_bytes="64MiB"
    )
    with pytest.raises(ConfigurationError, match="draft_model is self, and demo is streamed"):
        build(config)
