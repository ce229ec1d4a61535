"""N-gram proposer: drafts the tokens that followed earlier matches of the last tokens.

It searches the prompt, the answer, and the tenant's past answers (as suffix decoding, Oliaro et al., 2024, but with
chains of matches instead of suffix trees). The first path of a draft continues the longest match. Further branches
continue other matches. These match the sequence's last tokens, or the last tokens followed by one to three tokens of
the first path.
"""

from __future__ import annotations

import collections.abc as abc
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass

from inference_svc.kv_pool.prefix_cache import CacheScope
from inference_svc.sequence.sequence import Sequence
from inference_svc.spec_decode.ngram_index import MAX_MATCHED, SHORT_NGRAM, NgramIndex, NgramMatch
from inference_svc.spec_decode.proposer import ROOT, Draft, DraftRequest

# Minimum match length of each confidence bucket, and the bucket's prior. Tokens after longer matches are accepted more
# often.
_SIGNS = (SHORT_NGRAM, 3, 4, 6, 9, 13, 20, MAX_MATCHED)
_PRIORS = (0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.9)
# Priors of tokens that begin a further branch. They fall with the match length, because the first path is then
# likelier.
_OTHER_PRIORS = (0.3, 0.25, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05)
# Further branches are searched for after each of the first _MAX_BRANCH_POINTS draft tokens, with at most
# _MAX_BRANCH_TOKENS tokens each.
_MAX_BRANCH_POINTS, _MAX_BRANCH_TOKENS = 3, 8
# A tenant's past answers are in two generations of _GENERATION tokens each. When the younger generation is full, the
# older one is dropped. At most _TENANTS tenants have a history.
_GENERATION, _TENANTS = 1 << 14, 32
# Separates answers; no token has this id.
_END = -1
# The capacity of a sequence's own index is a multiple of this.
_ROOM = 1024
# Number of last prompt tokens that are stored before an answer, so that its beginning can match.
_CONTEXT = 4


class AnswerHistory:
    """Bounded history of answers per cache scope (tenant and adapter).

    The least recently used scope is dropped first. No scope ever reads the answers of another scope.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[CacheScope, list[NgramIndex]] = OrderedDict()

    def add(self, scope: CacheScope, tokens: abc.Sequence[int]) -> None:
        """Appends an answer's tokens, and drops the oldest generation or scope beyond the limits."""
        kept = [*tokens[-(_GENERATION - 1) :], _END]
        generations = self._tenants.setdefault(scope, [])
        self._tenants.move_to_end(scope)
        if not generations or generations[0].length + len(kept) > _GENERATION:
            generations.insert(0, NgramIndex(_GENERATION))
            del generations[2:]
        generations[0].add(kept)
        while len(self._tenants) > _TENANTS:
            self._tenants.popitem(last=False)

    def find(self, scope: CacheScope, tail: abc.Sequence[int], most: int) -> list[tuple[NgramIndex, NgramMatch]]:
        """Finds up to ``most`` matches per generation; matches of the younger generation come first."""
        return [(chains, match) for chains in self._tenants.get(scope, ()) for match in chains.find_many(tail, most)]


class NgramProposer:
    """``Proposer`` that looks up n-grams and runs no model.

    The confidence buckets are ranges of match lengths: first for matches in the sequence itself, then for matches in
    past answers, then for the first token of a further branch.
    """

    step_seconds = 0.0
    priors = (*_PRIORS, *_PRIORS, *_OTHER_PRIORS)

    def __init__(self) -> None:
        self._own: dict[Sequence, NgramIndex] = {}
        self._past = AnswerHistory()

    def propose(self, requests: abc.Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request.sequence, request.max_tokens, request.max_branches) for request in requests]

    def _draft(self, sequence: Sequence, most: int, width: int) -> Draft:
        own = self._own.get(sequence)
        tokens = len(sequence.tokens)
        if own is None or own.capacity < tokens:
            # Capacity for twice the present tokens, doubled when full: few answers get as long as their limit.
            longest = sequence.request.num_prompt_tokens + sequence.request.max_tokens
            own = self._own[sequence] = NgramIndex(max(tokens, min(longest, _ROOM * -(-2 * tokens // _ROOM))))
        own.add(sequence.tokens[own.length :])
        tail, tree = sequence.tokens[-MAX_MATCHED:], _DraftBuilder(most)
        found = self._find(sequence, own, tail, width)
        for continuation in found:
            tree.add(ROOT, continuation)
        chain = tree.tokens[: tree.first]
        for at in range(1, min(1 + _MAX_BRANCH_POINTS, len(chain)) if width > 1 else 0):
            for continuation in self._find(sequence, own, [*tail, *chain[:at]][-MAX_MATCHED:], width):
                if continuation.tokens(1) != [chain[at]]:
                    tree.add(at - 1, continuation)
        return tree.draft

    def _find(self, sequence: Sequence, own: NgramIndex, tail: list[int], most: int) -> list[_Continuation]:
        """Returns continuations with different first tokens, longest match first."""
        found = [_Continuation(own, match, 0) for match in own.find_many(tail, most)]
        if sequence.reads_cache and (not found or found[0].match.length < MAX_MATCHED):
            past = self._past.find(sequence.cache_scope, tail, most)
            found += [_Continuation(chains, match, len(_SIGNS)) for chains, match in past]
        if not found:
            return found
        found.sort(key=lambda one: -one.match.length)
        different = dict[int, _Continuation]()
        for one in found:
            for token in one.tokens(1):
                different.setdefault(token, one)
        return list(different.values())[:most]

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Does nothing: ``propose`` reads accepted tokens from the sequence itself."""

    def finish(self, sequence: Sequence) -> None:
        if sequence.request.cache.write and sequence.num_generated > SHORT_NGRAM:
            start = max(0, sequence.request.num_prompt_tokens - _CONTEXT)
            self._past.add(sequence.cache_scope, sequence.tokens[start:])

    def forget(self, sequence: Sequence) -> None:
        self._own.pop(sequence, None)


@dataclass(frozen=True)
class _Continuation:
    """Tokens after a match. ``first_sign`` is the first bucket of the index in which it was found."""

    chains: NgramIndex
    match: NgramMatch
    first_sign: int

    def tokens(self, most: int) -> list[int]:
        """Returns up to ``most`` tokens, up to the end of a past answer."""
        found = self.chains.follow(self.match.place, most)
        return found[: found.index(_END)] if _END in found else found

    def buckets(self, count: int) -> list[int]:
        """Returns the confidence buckets of the first ``count`` tokens, by match length.

        Each accepted token makes the match one token longer.
        """
        lengths = (min(self.match.length + i, MAX_MATCHED) for i in range(count))
        return [self.first_sign + bisect_right(_SIGNS, length) - 1 for length in lengths]


class _DraftBuilder:
    """Draft under construction, at most ``most`` tokens deep."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.tokens, self._parents, self._buckets = list[int](), list[int](), list[int]()
        self.first = 0  # tokens of the first path

    def add(self, parent: int, continuation: _Continuation) -> None:
        """Adds a path behind ``parent``, which is a place of the first path, or ROOT."""
        depth = self._most - 1 - parent
        found = continuation.tokens(min(depth, _MAX_BRANCH_TOKENS) if self.first else depth)
        if not found:
            return
        buckets, at = continuation.buckets(len(found)), len(self.tokens)
        if self.first:
            buckets[0] = 2 * len(_SIGNS) + buckets[0] % len(_SIGNS)
        else:
            self.first = len(found)
        self.tokens += found
        self._parents += [parent, *range(at, at + len(found) - 1)]
        self._buckets += buckets

    @property
    def draft(self) -> Draft:
        return Draft(tuple(self.tokens), tuple(self._parents), tuple(self._buckets))
