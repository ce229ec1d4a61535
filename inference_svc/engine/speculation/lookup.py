"""Guesses by looking up what followed the same tokens before: in the prompt and the answer so far, and in answers that
the same tenant got before (as in suffix decoding, Oliaro et al., 2024, with chains of matches for its trees).
"""

from __future__ import annotations

import collections.abc as abc
from bisect import bisect_right
from collections import OrderedDict

from inference_svc.engine.sequence import Realm, Sequence
from inference_svc.engine.speculation.chains import MOST_MATCHED, SHORT, Chains, Match
from inference_svc.engine.speculation.proposer import Draft, Wish

# The shortest match of each sign; a longer one is right more often.
_SIGNS = (SHORT, 3, 4, 6, 9, 13, 20, MOST_MATCHED)
_PRIORS = (0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.9)
# Of a tenant's past answers, tokens in each of two generations: when the younger one is full, the elder is dropped.
_GENERATION, _TENANTS = 1 << 14, 32
# Stands between answers, and is no token.
_END = -1
# So much of a prompt's end belongs to what an answer followed.
_CONTEXT = 4


class PastAnswers:
    """What a tenant was answered last by the model, or by an adapter, bounded; those that ask least recently are
    forgotten first. Nothing of one realm is ever found by another."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[Realm, list[Chains]] = OrderedDict()

    def add(self, realm: Realm, tokens: abc.Sequence[int]) -> None:
        """Remembers an answer's last tokens."""
        kept = [*tokens[-(_GENERATION - 1) :], _END]
        generations = self._tenants.setdefault(realm, [])
        self._tenants.move_to_end(realm)
        if not generations or generations[0].length + len(kept) > _GENERATION:
            generations.insert(0, Chains(_GENERATION))
            del generations[2:]
        generations[0].add(kept)
        while len(self._tenants) > _TENANTS:
            self._tenants.popitem(last=False)

    def find(self, realm: Realm, tail: abc.Sequence[int]) -> tuple[Chains, Match] | None:
        """The longest match, of the younger generation if both have one."""
        found: tuple[Chains, Match] | None = None
        for chains in self._tenants.get(realm, ()):
            match = chains.find(tail)
            if match is not None and (found is None or match.length > found[1].length):
                found = chains, match
        return found


class Lookup:
    """A ``Proposer`` that computes nothing: what followed the longest match is the guess. Its signs are the lengths of
    matches in the sequence itself, and behind them those in past answers."""

    step_seconds = 0.0
    priors = (*_PRIORS, *_PRIORS)

    def __init__(self) -> None:
        self._own: dict[Sequence, Chains] = {}
        self._past = PastAnswers()

    def propose(self, wishes: abc.Sequence[Wish]) -> list[Draft]:
        return [self._guess(wish.sequence, wish.most) for wish in wishes]

    def _guess(self, sequence: Sequence, most: int) -> Draft:
        own = self._own.get(sequence)
        if own is None:
            # An answer is never longer: what there is room for is all that will be added.
            own = self._own[sequence] = Chains(sequence.prompt_tokens + sequence.max_tokens)
        own.add(sequence.tokens[own.length :])
        tail = sequence.tokens[-MOST_MATCHED:]
        match, chains, first_sign = own.find(tail), own, 0
        if sequence.cache.read and (match is None or match.length < MOST_MATCHED):
            past = self._past.find(sequence.realm, tail)
            if past is not None and (match is None or past[1].length > match.length):
                (chains, match), first_sign = past, len(_SIGNS)
        if match is None:
            return Draft()
        tokens = chains.follow(match.place, most)
        if _END in tokens:
            del tokens[tokens.index(_END) :]
        # Once a token is right, the match is one longer.
        lengths = (min(match.length + i, MOST_MATCHED) for i in range(len(tokens)))
        return Draft.chain(tokens, [first_sign + bisect_right(_SIGNS, length) - 1 for length in lengths])

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """The sequence itself says it all."""

    def finish(self, sequence: Sequence) -> None:
        if sequence.cache.write and sequence.generated > SHORT:
            start = max(0, sequence.prompt_tokens - _CONTEXT)
            self._past.add(sequence.realm, sequence.tokens[start:])

    def forget(self, sequence: Sequence) -> None:
        self._own.pop(sequence, None)
