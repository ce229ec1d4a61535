import json
import shutil
from pathlib import Path

import pytest
import torch
from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1.inference_pb2 import Sampling

from inference_svc.engine.sampling import Sampler, SamplingParams
from inference_svc.model.loader import DEMO_MODEL, load
from inference_svc.prompts import Prompter

LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0])


def draws(n: int = 400, **params: object) -> list[int]:
    sampler = Sampler(SamplingParams(seed=1, **params), None)  # type: ignore[arg-type]
    return [sampler.draw(LOGITS).token for _ in range(n)]


def test_temperature_zero_is_greedy() -> None:
    assert set(draws(temperature=0.0)) == {3}


def test_a_seed_repeats_and_another_differs() -> None:
    one, other = (Sampler(SamplingParams(seed=s), None) for s in (5, 6))
    again = Sampler(SamplingParams(seed=5), None)
    first = [one.draw(LOGITS).token for _ in range(50)]
    assert first == [again.draw(LOGITS).token for _ in range(50)]
    assert first != [other.draw(LOGITS).token for _ in range(50)]


def test_frequencies_follow_the_softmax() -> None:
    found = draws(4000)
    want = torch.softmax(LOGITS, -1)
    for token in range(5):
        assert abs(found.count(token) / 4000 - float(want[token])) < 0.03


def test_top_k_and_top_p_cut_the_tail() -> None:
    assert set(draws(top_k=2)) == {2, 3}
    assert set(draws(top_p=0.6)) == {3}
    assert set(draws(top_p=0.7)) == {2, 3}


def test_penalties_make_repetition_unlikely() -> None:
    sampler = Sampler(SamplingParams(temperature=0.0, presence_penalty=1.5), None)
    assert [sampler.draw(LOGITS).token for _ in range(3)] == [3, 2, 3]
    sampler = Sampler(SamplingParams(temperature=0.0, frequency_penalty=2.0), None)
    assert [sampler.draw(LOGITS).token for _ in range(4)] == [3, 2, 1, 3]


def test_logprobs_are_those_of_temperature_one() -> None:
    drawn = Sampler(SamplingParams(temperature=0.0), 2).draw(LOGITS)
    want = torch.log_softmax(LOGITS, -1)
    assert drawn.logprob == pytest.approx(float(want[3]))
    assert [t for t, _ in drawn.top] == [3, 2]


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("temperature", 2.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.5),
     ("top_k", -1), ("presence_penalty", 3.0), ("frequency_penalty", -2.5)],
)  # fmt: skip
def test_values_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} is"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_what_a_request_leaves_open_is_as_the_models_makers_recommend(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    stated = json.loads((folder / "generation_config.json").read_text())
    recommended = {"do_sample": True, "temperature": 0.25, "top_k": 7}
    (folder / "generation_config.json").write_text(json.dumps(stated | recommended))
    prompter = Prompter(load(str(folder)), 100)
    assert prompter.sampling(Sampling()) == SamplingParams(temperature=0.25, top_k=7)
    assert prompter.sampling(Sampling(temperature=0.0, top_p=0.5)) == SamplingParams(0.0, 0.5, top_k=7)
    (folder / "generation_config.json").write_text(json.dumps(stated | {"do_sample": False}))
    greedy = Prompter(load(str(folder)), 100)
    assert greedy.sampling(Sampling()) == SamplingParams(temperature=0.0)
    assert greedy.sampling(Sampling(temperature=0.5)) == SamplingParams(temperature=0.5)
