"""What keeps one answer to a grammar: where it stands, and which tokens may follow there.

The state moves on by accepted tokens alone, so a sequence that is preempted and computed again finds it as it was. The
mask of the next token is computed on a thread beside the forward, without the GIL, and waited for when that token is
drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Protocol, Self

import numpy as np
from kvsidecar.errors import GenerationFailed, GrammarFailed
from numpy.typing import NDArray


class Matcher(Protocol):
    """A place in a grammar: llguidance's ``LLMatcher``, or what stands for one. Used by one thread at a time."""

    def deep_copy(self) -> Self: ...
    def is_stopped(self) -> bool: ...
    def is_error(self) -> bool: ...
    def stop_reason(self) -> str: ...
    def compute_bitmask(self) -> bytes: ...
    def consume_token(self, token: int, /) -> bool: ...


class UnionMatcher:
    """A place in a text that some of several grammars describe: as long as it may be of more than one, what any of them
    allows may follow. There is one at least."""

    def __init__(self, matchers: Sequence[Matcher]) -> None:
        """Takes over ``matchers``, which stand at the same place."""
        self._matchers = list(matchers)

    def deep_copy(self) -> UnionMatcher:
        """Another one at the same place."""
        return UnionMatcher([matcher.deep_copy() for matcher in self._matchers])

    def is_stopped(self) -> bool:
        return all(matcher.is_stopped() for matcher in self._matchers)

    def is_error(self) -> bool:
        return all(matcher.is_error() for matcher in self._matchers)

    def stop_reason(self) -> str:
        return self._matchers[0].stop_reason()

    def compute_bitmask(self) -> bytes:
        """A bit for each token that may come next."""
        masks = [np.frombuffer(matcher.compute_bitmask(), np.uint8) for matcher in self._matchers]
        able = [mask for mask, one in zip(masks, self._matchers, strict=True) if not one.is_error()]
        either: NDArray[np.uint8] = np.bitwise_or.reduce(able or masks)
        return either.tobytes()

    def consume_token(self, token: int) -> bool:
        """Goes on with a token in those grammars that allow it; False when none does."""
        went = [matcher for matcher in self._matchers if not matcher.is_error() and matcher.consume_token(token)]
        self._matchers = went or self._matchers[:1]
        return bool(went)


class GrammarState:
    """One answer's place in its grammar. Belongs to the engine's thread once its sequence is submitted; between
    ``look_ahead`` and ``mask`` a thread of ``threads`` works on it."""

    def __init__(self, matcher: Matcher, threads: Executor) -> None:
        """Takes over ``matcher``, which stands at the grammar's beginning."""
        self._matcher, self._threads = matcher, threads
        self._next: Future[bytes] | None = None

    def union(self, other: GrammarState) -> GrammarState:
        """An answer that is as this one or the other would have it. Takes over both, which stand at the beginning."""
        return GrammarState(UnionMatcher((self._matcher, other._matcher)), self._threads)

    @property
    def complete(self) -> bool:
        """The text is what it must be, and nothing may follow."""
        return self._next is None and self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token: int) -> None:
        """The answer goes on with a token that the mask allowed. Raises GrammarFailed."""
        self.mask()  # the thread is done with the matcher
        self._next = None
        if not self._matcher.consume_token(token):
            raise self._failure()

    def start_mask(self) -> None:
        """Begins to compute the mask of the next token."""
        if self._next is None:
            self._next = self._threads.submit(self._matcher.compute_bitmask)

    def mask(self) -> NDArray[np.uint8]:
        """A bit for each token that may come next, from the lowest bit of the first byte on; beyond the vocabulary
        there may be more. The same until a token is accepted. Raises GrammarFailed when the grammar cannot go on."""
        self.start_mask()
        assert self._next is not None
        error = self._next.exception()  # a panic in the compiled code is no Exception, and would end the engine
        if error is not None:
            raise GenerationFailed(f"the grammar could not be kept to: {type(error).__name__}", param="grammar")
        if self._matcher.is_error():
            raise self._failure()
        return np.frombuffer(self._next.result(), np.uint8)

    def _failure(self) -> GrammarFailed:
        # A word such as LexerTooComplex; the whole message would show what was written.
        why = self._matcher.stop_reason()
        return GrammarFailed(f"the grammar could not be kept to: {why}; send a simpler one", param="grammar")
