"""Speculator: chooses the draft tokens that each step verifies.

Verification must not cost more than it saves. The speculator measures the acceptance probability of draft tokens and
the cost of a further row, and verifies the draft tokens that give the most expected tokens per second (goodput, Liu et
al., 2024, arXiv:2406.14066). So speculation stops by itself when a batch keeps the device busy, or when drafts are
rejected. N-gram drafts cost almost nothing, so they are looked up for every decoding sequence. They are compared with
the sampled tokens even if they were not verified, so the speculator notices without extra rows when drafts would be
accepted again. Drafts of a draft model are tried again after growing pauses.

A second branch is looked up and verified only if it gives more than the best chain and saves more time than its lookup
takes. The gain of a branch is measured even if the branch was not verified.
"""

from __future__ import annotations

import collections.abc as abc
import time
from dataclasses import dataclass, field, replace

import structlog

from inference_svc.sequence.generation_request import SpeculationMode
from inference_svc.sequence.sequence import Sequence
from inference_svc.spec_decode.acceptance_stats import (
    AcceptanceCounts,
    AcceptanceStats,
    SpeculationStats,
    VerificationResult,
)
from inference_svc.spec_decode.draft_budget import DraftNode, StepCosts, select_drafts
from inference_svc.spec_decode.proposer import ROOT, Draft, DraftRequest, Proposer
from inference_svc.spec_decode.step_cost_model import StepCostModel

log = structlog.get_logger("engine")

# Draft tokens are verified only if the expected tokens per second exceed those of plain decoding by this factor.
_MARGIN = 1.02
# After this number of steps, drafts that seemed too expensive are verified once more: initial value, and maximum.
_PAUSE, _MOST_PAUSE = 64, 1024
# The same numbers for drafts of a draft model, and the maximum depth of these drafts.
_MODEL_PAUSE, _MOST_MODEL_PAUSE, _MOST_COMPUTED = 16, 1 << 14, 8
# If the n-gram lookups of a sequence cost more than they save, only one step in _RARELY does a lookup for it.
_RARELY = 16
_FADE = 0.9
# Draft tokens below this acceptance probability are never verified, even if rows cost nothing.
_LEAST_CHANCE = 0.02


@dataclass
class _ProposedDraft:
    """Draft of a sequence; the tokens at the places ``drafted`` are verified in this step."""

    proposer: Proposer
    draft: Draft
    width: int  # maximum number of paths
    drafted: list[int] = field(default_factory=list)


@dataclass
class _SequenceState:
    """Acceptance history of one sequence."""

    tallies: dict[Proposer, AcceptanceCounts] = field(default_factory=dict)
    gain: float = 1.0  # moving mean of accepted draft tokens per lookup
    branched: float = 1.0  # moving mean of tokens per lookup that only a further branch had, verified or not
    passes: int = 0


class Speculator:
    """Plans the speculation of each step. Only the engine's thread uses it.

    A proposer that fails is turned off; its requests continue without drafts.
    """

    def __init__(
        self, proposers: abc.Mapping[SpeculationMode, Proposer], costs: StepCostModel, most: int, branches: int = 1
    ) -> None:
        """``proposers`` maps a mode to the only proposer that the mode uses.

        ``most`` is the maximum depth of a draft, ``branches`` its maximum number of paths.
        """
        self.stats, self.costs = SpeculationStats(), costs
        self._proposers, self._most, self._branches = dict(proposers), most, branches
        self._acceptance = {p: AcceptanceStats(p.priors) for p in proposers.values()}
        self._own: dict[Sequence, _SequenceState] = {}
        self._drafts: dict[Sequence, _ProposedDraft] = {}
        # Mean time of a sequence's n-gram lookup: without and with a search for further branches.
        self._asking_seconds = {False: 0.0, True: 0.0}
        self._pause, self._left = _PAUSE, _PAUSE
        self._model_pause, self._model_left = _MODEL_PAUSE, 1

    @property
    def has_drafts(self) -> bool:
        """True if ``prepare`` has found a draft whose result is not recorded yet, verified or not."""
        return bool(self._drafts)

    def prepare(self, decoding: abc.Sequence[Sequence], rows: int, longest: int) -> dict[Sequence, Draft]:
        """Chooses the drafts to verify for ``decoding`` sequences.

        ``rows``: rows of the step without drafts. ``longest``: maximum tokens of prompt and answer.
        """
        self._drafts.clear()
        self._prepare(decoding, rows, longest)
        return {s: proposed.draft.select(proposed.drafted) for s, proposed in self._drafts.items() if proposed.drafted}

    def record_step(self, rows: int, drafted: int, seconds: float) -> None:
        """Records the seconds of a decode-only step of ``rows`` rows, ``drafted`` of them draft tokens."""
        self.costs.learn(rows, drafted > 0, seconds)
        self.stats.rows[rows] += 1
        if drafted:
            self.stats.verify_seconds += seconds

    def record_branching(self, branches: int, seconds: float) -> None:
        """Records the seconds to allocate the blocks of branches."""
        if branches:
            self.costs.learn_branches(branches, seconds)

    def record_result(self, sequence: Sequence, verified: VerificationResult, drawn: abc.Sequence[int]) -> None:
        """Records the verification of a sequence's draft; ``drawn`` are the sampled tokens."""
        proposed = self._drafts.pop(sequence, None)
        if proposed is None:
            return
        own, draft = self._own.setdefault(sequence, _SequenceState()), proposed.draft
        tally, acceptance = self._tally(own, proposed.proposer), self._acceptance[proposed.proposer]
        way = draft.accepted_path(drawn)
        for at, true in zip([ROOT, *way], drawn, strict=False):
            for i in draft.children(at):
                acceptance.learn(tally, draft.buckets[i], draft.tokens[i] == true)
        first = draft.paths()[0]
        along = next((i for i, (a, b) in enumerate(zip(way, first, strict=False)) if a != b), min(len(way), len(first)))
        own.gain += verified.accepted * (1 - _FADE)
        if len(first) < len(draft):
            own.branched += (len(way) - along) * (1 - _FADE)
        if verified.drafted:
            self.stats.count(verified)
        drafted = sum(at in first for at in proposed.drafted[: verified.drafted])
        proposed.proposer.observe(sequence, drafted, min(along, verified.accepted))

    def finish(self, sequence: Sequence) -> None:
        """Lets proposers learn from a complete answer. The caller may call ``record_result`` and ``forget`` next."""
        if sequence.speculation.mode is SpeculationMode.OFF:
            return
        for proposer in self._proposers.values():
            try:
                proposer.finish(sequence)
            except Exception:
                log.exception("learning from an answer failed")

    def forget(self, sequence: Sequence) -> None:
        """Drops the state of a sequence that left the batch."""
        self._own.pop(sequence, None)
        self._drafts.pop(sequence, None)
        for proposer in self._proposers.values():
            proposer.forget(sequence)

    # ---- choice of drafts -----------------------------------------------------------------------------------

    def _prepare(self, decoding: abc.Sequence[Sequence], rows: int, longest: int) -> None:
        requests = [request for s in decoding if (request := self._make_request(s, longest)) is not None]
        if not requests or not self._may_pay(len(decoding), rows):
            return
        began = time.perf_counter()
        self._ask(requests, len(decoding), rows)
        self.stats.draft_seconds += time.perf_counter() - began
        self._choose(len(decoding), rows)

    def _make_request(self, sequence: Sequence, longest: int) -> DraftRequest | None:
        """Requests a draft of limited depth: if all of the draft is accepted, the step samples one more token."""
        if sequence.speculation.mode is SpeculationMode.OFF:
            return None
        room = min(sequence.request.max_tokens - sequence.num_generated, longest - len(sequence.tokens)) - 1
        width = (
            self._branches
            if sequence.request.max_branches is None
            else min(sequence.request.max_branches, self._branches)
        )
        return DraftRequest(sequence, min(room, self._most), width) if room > 0 else None

    def _may_pay(self, sequences: int, rows: int) -> bool:
        """True if draft tokens can increase tokens per second, assuming that all are accepted."""
        now = sequences / self.costs.seconds(rows, False)
        more = sequences * self._most
        while more:
            if (sequences + more) / self.costs.seconds(rows + more, True) > now * _MARGIN:
                return True
            more //= 2
        return False

    def _ask(self, requests: list[DraftRequest], sequences: int, rows: int) -> None:
        lookup, model = (self._proposers.get(mode) for mode in (SpeculationMode.NGRAM, SpeculationMode.DRAFT))
        if lookup is not None:
            asked = [w for w in requests if w.sequence.speculation.mode is not SpeculationMode.DRAFT]
            asked = [self._fitted(w, sequences, rows) for w in asked if self._pays(w.sequence, sequences, rows)]
            known = [w for w in asked if self._own[w.sequence].passes > 1]
            # The first lookup of a sequence indexes its whole prompt: its time must not enter the mean.
            self._take(SpeculationMode.NGRAM, [w for w in asked if w not in known])
            for wide in (False, True):
                self._look_up([w for w in known if (w.max_branches > 1) is wide], wide)
        if model is not None:
            self._ask_model(model, requests, sequences, rows)

    def _ask_model(self, model: Proposer, requests: list[DraftRequest], sequences: int, rows: int) -> None:
        """Lets the draft model propose, for sequences without a better n-gram draft.

        The depth of the drafts is the one with the most expected tokens per second.
        """
        group = list[tuple[DraftRequest, float]]()
        for request in requests:
            own, proposed = self._own.setdefault(request.sequence, _SequenceState()), self._drafts.get(request.sequence)
            chance = self._acceptance[model].chance(self._tally(own, model), 0)
            if request.sequence.speculation.mode is SpeculationMode.DRAFT or (
                request.sequence.speculation.mode is SpeculationMode.AUTO
                and (proposed is None or self._first_chance(own, proposed) < chance)
            ):
                group.append((request, chance))
        if not group:
            return
        best, depth = sequences / self.costs.seconds(rows, False) * _MARGIN, 0
        expected = float(sequences)
        for k in range(1, min(self._most, _MOST_COMPUTED) + 1):
            expected += sum(chance**k for _, chance in group)
            rate = expected / (self.costs.seconds(rows + k * len(group), True) + k * model.step_seconds)
            if rate > best:
                best, depth = rate, k
        if depth:
            self._model_pause = self._model_left = _MODEL_PAUSE
        else:
            self._model_left -= 1
            if self._model_left:
                return
            self._model_pause = min(2 * self._model_pause, _MOST_MODEL_PAUSE)
            self._model_left, depth = self._model_pause, 1
        self._take(
            SpeculationMode.DRAFT, [replace(request, max_tokens=min(request.max_tokens, depth)) for request, _ in group]
        )

    def _look_up(self, requests: list[DraftRequest], wide: bool) -> None:
        """Looks up drafts of indexed sequences, and measures the time."""
        if requests:
            began = time.perf_counter()
            self._take(SpeculationMode.NGRAM, requests)
            each, before = (time.perf_counter() - began) / len(requests), self._asking_seconds[wide]
            self._asking_seconds[wide] = before + 0.05 * (each - before) if before else each

    def _pays(self, sequence: Sequence, sequences: int, rows: int) -> bool:
        """True if a lookup saves more time than it takes, or is due again."""
        own = self._own.setdefault(sequence, _SequenceState())
        own.passes += 1
        saved = own.gain * self.costs.seconds(rows, False) / sequences
        asking = min((seconds for seconds in self._asking_seconds.values() if seconds), default=0.0)
        pays = saved > asking or own.passes % _RARELY == 0
        if pays:
            own.gain *= _FADE
        return pays

    def _fitted(self, request: DraftRequest, sequences: int, rows: int) -> DraftRequest:
        """Limits a request to one path if a search for further paths does not pay.

        One lookup in ``_RARELY`` searches for further branches anyway.
        """
        own = self._own[request.sequence]
        saved = own.branched * self.costs.seconds(rows, False) / sequences
        more = self._asking_seconds[True] - self._asking_seconds[False]
        if request.max_branches == 1 or (saved < more and own.passes % _RARELY):
            return replace(request, max_branches=1)
        own.branched *= _FADE
        return request

    def _take(self, mode: SpeculationMode, requests: list[DraftRequest]) -> None:
        proposer = self._proposers.get(mode)
        if proposer is None or not requests:
            return
        try:
            drafts = proposer.propose(requests)
        except Exception:
            log.exception("guessing failed, and is off from now on; answers go on without", by=mode.value)
            for sequence in self._own:
                proposer.forget(sequence)
            del self._proposers[mode]
            return
        for request, draft in zip(requests, drafts, strict=True):
            if draft:
                self._drafts[request.sequence] = _ProposedDraft(
                    proposer, draft, min(request.max_branches, len(draft.paths()))
                )

    def _first_chance(self, own: _SequenceState, proposed: _ProposedDraft) -> float:
        return self._acceptance[proposed.proposer].chance(
            self._tally(own, proposed.proposer), proposed.draft.buckets[0]
        )

    def _choose(self, sequences: int, rows: int) -> None:
        """Selects the draft tokens that give the most expected tokens per second."""
        nodes, asked = list[DraftNode](), list(self._drafts.items())
        for number, (sequence, proposed) in enumerate(asked):
            nodes += self._nodes(number, sequence, proposed)
        if not nodes:
            return
        plain = sequences / self.costs.seconds(rows, False)
        prices = StepCosts(lambda more: self.costs.seconds(rows + more, True), self.costs.branch_seconds, sequences)
        choice = select_drafts(nodes, [proposed.width for _, proposed in asked], prices)
        chosen = choice.nodes if choice.rate > plain * _MARGIN else ()
        if chosen:
            self._pause = self._left = _PAUSE
        elif choice.rate > plain * 0.5:
            # Costs may have fallen: one step in many verifies anyway, to measure them.
            self._left -= 1
            if not self._left:
                self._pause = min(2 * self._pause, _MOST_PAUSE)
                self._left, chosen = self._pause, choice.nodes
        for node in chosen:
            asked[node.sequence][1].drafted.append(node.place)

    def _nodes(self, number: int, sequence: Sequence, proposed: _ProposedDraft) -> list[DraftNode]:
        """Returns the draft tokens of a sequence, except tokens that are too unlikely."""
        tally = self._tally(self._own.setdefault(sequence, _SequenceState()), proposed.proposer)
        acceptance, draft = self._acceptance[proposed.proposer], proposed.draft
        chances, nodes = {ROOT: 1.0}, list[DraftNode]()
        for place, (parent, bucket) in enumerate(zip(draft.parents, draft.buckets, strict=True)):
            before = chances.get(parent, 0.0)
            chance = before * acceptance.chance(tally, bucket) if before else 0.0
            if chance >= _LEAST_CHANCE:
                chances[place] = chance
                nodes.append(DraftNode(chance, number, place, parent))
        return nodes

    def _tally(self, own: _SequenceState, proposer: Proposer) -> AcceptanceCounts:
        found = own.tallies.get(proposer)
        if found is None:
            found = own.tallies[proposer] = self._acceptance[proposer].new_counts()
        return found
