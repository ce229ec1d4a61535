"""How likely a prompt's tokens are: as its eager model has it, whatever is computed beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from inference_svc.engine.engine import Engine
from inference_svc.models.loader import DEMO_MODEL
from inference_svc.sampling.logprobs import PromptLogprob
from inference_svc.sampling.sampling_params import SamplingParams
from inference_svc.sequence.detokenizer import IncrementalDetokenizer
from inference_svc.sequence.generation_request import CacheParams, GenerationRequest
from inference_svc.sequence.prompt_logprobs import MAX_SCORED_ROWS, row_budget
from inference_svc.sequence.sequence import Sequence
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.sequence.test_detokenizer import TOKENIZER
from tests.inference_svc.server.test_load import Request, idle, small_engine, submit_together

LONG = prompt(7, 2 * MAX_SCORED_ROWS + 60)


class Asked(Request):
    """A request for the likelihood of its prompt."""

    def __init__(self, ids: list[int], length: int = 3, most: int = 2) -> None:
        super().__init__(ids, length)
        text = IncrementalDetokenizer(TOKENIZER, (), frozenset())
        asked = GenerationRequest(
            "r",
            len(ids),
            length,
            SamplingParams(temperature=0.0),
            frozenset(),
            cache=CacheParams(read=False),
            num_prompt_logprobs=most,
        )
        self.sequence = Sequence(asked, list(ids), text, self._sink)

    def scores(self) -> list[PromptLogprob]:
        self.tokens()
        return self.sequence.prompt_logprobs


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    running = small_engine(4096)
    yield running
    idle(running)
    running.check_integrity()
    running.stop()


def asked(engine: Engine, ids: list[int]) -> list[PromptLogprob]:
    request = Asked(ids)
    engine.submit(request.sequence)
    return request.scores()


def test_it_is_the_eager_models(engine: Engine) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    with torch.inference_mode():
        lines = torch.log_softmax(model(torch.tensor([LONG])).logits[0].double(), -1)[:-1]
    own = lines.gather(1, torch.tensor(LONG[1:])[:, None])
    found = asked(engine, LONG)
    assert [one.token for one in found] == LONG[1:]
    assert torch.tensor([one.logprob for one in found]) == pytest.approx(own[:, 0].float(), abs=1e-3)
    # Of two tokens as likely to six digits, either may be the likelier one.
    assert [one.rank for one in found] == pytest.approx(((lines > own).sum(-1) + 1).tolist(), abs=2)
    assert [[token for token, _ in one.top] for one in found] == lines.topk(2).indices.tolist()


@pytest.mark.parametrize("tokens", [1, 2, MAX_SCORED_ROWS, MAX_SCORED_ROWS + 1])
def test_prompts_of_any_length_have_a_score_for_all_but_the_first_token(engine: Engine, tokens: int) -> None:
    assert asked(engine, LONG[:tokens]) == asked(engine, LONG)[: tokens - 1]


def test_it_is_the_same_beside_others_and_disturbs_none(engine: Engine) -> None:
    want = asked(engine, LONG)
    plain = Request(prompt(3, 40), 30)
    engine.submit(plain.sequence)
    answer = plain.tokens()
    scored, others = [Asked(LONG) for _ in range(3)], [Request(prompt(3, 40), 30) for _ in range(3)]
    for one, other in zip(scored, others, strict=True):
        engine.submit(one.sequence)
        engine.submit(other.sequence)
    assert [one.scores() for one in scored] == [want] * 3
    assert [other.tokens() for other in others] == [answer] * 3


def test_it_is_the_same_in_smaller_pieces_and_where_pages_were_given_back(engine: Engine) -> None:
    prompts = [prompt(i, 60) for i in range(6)]
    want = [asked(engine, ids) for ids in prompts]
    small = small_engine(448, max_num_batched_tokens=48)
    requests = [Asked(ids, 120) for ids in prompts]
    submit_together(small, requests)
    assert [request.scores() for request in requests] == want
    assert small.stats.preemptions > 0
    idle(small)
    small.check_integrity()
    small.stop()


def test_what_was_read_before_is_read_again(engine: Engine) -> None:
    want = asked(engine, LONG)
    request = Request(LONG, 1)
    engine.submit(request.sequence)
    request.tokens()
    assert asked(engine, LONG) == want


def test_a_pass_has_so_many_rows_for_all_that_are_scored() -> None:
    scored = [Asked(LONG).sequence for _ in range(3)]
    for i, sequence in enumerate(scored):
        sequence.request = replace(sequence.request, arrived_at=float(i))
    other = Request(LONG, 3).sequence
    scored[0].kv.num_computed = len(LONG) - 50  # of which the last one is not scored, but computed
    scored[0].prompt_logprobs = [PromptLogprob(0, 0.0, (), 1)] * (len(LONG) - 50)
    found = row_budget([other, *scored])
    assert [found.get(s) for s in (other, *scored)] == [None, 50, MAX_SCORED_ROWS - 50, 0]
