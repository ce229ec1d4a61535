"""Model that is a table of probabilities, in the real engine loop, so that tests know the right distribution."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from inference_svc.engine.engine_core import EngineCore, EngineServices
from inference_svc.engine.engine_events import RequestSubmitted
from inference_svc.engine.engine_stats import EngineLimits, EngineStats
from inference_svc.engine.speculative_sampler import SpeculativeSampler
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.forward_batch import ForwardBatch, SequenceSlice, build_batch
from inference_svc.sampling.sampling_params import SamplingParams
from inference_svc.sequence.detokenizer import IncrementalDetokenizer
from inference_svc.sequence.generation_request import GenerationRequest, SpeculationMode
from inference_svc.sequence.kv_connector import NullKVConnector
from inference_svc.sequence.sequence import FinishReason, Sequence, SequenceOutput
from inference_svc.spec_decode.ngram_proposer import NgramProposer
from inference_svc.spec_decode.proposer import Proposer
from inference_svc.spec_decode.speculator import Speculator
from inference_svc.spec_decode.step_cost_model import StepCostModel
from tests.inference_svc.sequence.test_detokenizer import TOKENIZER

VOCABULARY = 6


class Table:
    """Model whose logits depend only on a row's token, ``[VOCABULARY, VOCABULARY]``. It counts rows and steps."""

    layers = 1

    def __init__(self, logits: Tensor) -> None:
        self.logits, self.rows, self.passes = logits, 0, 0

    def compute(self, slices: list[SequenceSlice], pool: KVPool) -> Tensor:
        return self(build_batch(slices, pool, torch.device("cpu")))

    def likeliest(self, logits: Tensor) -> None:
        """As of a decoder whose kernels do not find it."""

    def __call__(self, batch: ForwardBatch) -> Tensor:
        self.rows, self.passes = self.rows + batch.real, self.passes + 1
        return self.logits[batch.tokens[batch.logit_rows[: batch.wanted]]]


def table(seed: int = 0) -> Table:
    return Table(0.8 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)))


def free_rows() -> StepCostModel:
    """Let the cost model believe that a step takes as long with many rows as with few."""
    costs = StepCostModel(recorded=False)
    costs.calibrate({4: 1.0, 512: 1.0}, 1.0)
    costs.learn = lambda *_: None  # type: ignore[method-assign]
    costs.learn_branches = lambda *_: None  # type: ignore[method-assign]
    return costs


def loop_of(
    model: Any,
    proposers: Mapping[SpeculationMode, Proposer] | None = None,
    costs: StepCostModel | None = None,
    kind: type[SpeculativeSampler] = SpeculativeSampler,
    branches: int = 1,
) -> EngineCore:
    """Return the engine's loop over a table; the test calls its steps."""
    pool = KVPool(1, 1, 16, 8192, torch.float32, torch.device("cpu"))
    guessing = Speculator(proposers or {SpeculationMode.NGRAM: NgramProposer()}, costs or free_rows(), 8, branches)
    services = EngineServices(model, pool, NullKVConnector(), None, guessing, EngineStats())
    loop = EngineCore(services, EngineLimits(), 4096, lambda event: None)
    loop._sampler = kind(guessing, loop._builder.branch_tables, 4096, loop._finish, loop._sampling_failed)
    return loop


def sequence(
    prompt: list[int], length: int, speculation: SpeculationMode = SpeculationMode.NGRAM, **params: Any
) -> Sequence:
    def sink(output: SequenceOutput) -> None:
        assert output.finish is not FinishReason.FAILED, output.error

    text = IncrementalDetokenizer(TOKENIZER, (), frozenset(range(VOCABULARY)))  # no token has a text
    chosen = SamplingParams(**params)
    request = GenerationRequest("r", len(prompt), length, chosen, frozenset(), speculation=speculation)
    return Sequence(request, list(prompt), text, sink)


def answers(loop: EngineCore, sequences: Iterable[Sequence]) -> list[list[int]]:
    """Run sequences to their ends in one batch; return their tokens."""
    asked = list(sequences)
    for one in asked:
        loop.handle(RequestSubmitted(one))
    while loop.busy:
        loop.step()
    return [one.tokens[one.request.num_prompt_tokens :] for one in asked]


def prompt(seed: int, tokens: int = 40) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(tokens)]
