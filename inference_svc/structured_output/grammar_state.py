"""Grammar state of one answer, and the mask of allowed next tokens.

Only accepted tokens advance the state, so a preemption or recomputation of the sequence does not affect the state. A
thread computes the mask of the next token during the forward, without the GIL; the sampler waits for the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Protocol, Self

import numpy as np
from kvsidecar.errors import GenerationFailed, GrammarFailed
from numpy.typing import NDArray


class Matcher(Protocol):
    """Position in a grammar: llguidance's ``LLMatcher``, or ``UnionMatcher``. For one thread at a time."""

    def deep_copy(self) -> Self: ...
    def is_stopped(self) -> bool: ...
    def is_error(self) -> bool: ...
    def stop_reason(self) -> str: ...
    def compute_bitmask(self) -> bytes: ...
    def consume_token(self, token: int, /) -> bool: ...


class UnionMatcher:
    """Union of grammars: a token is allowed if any grammar that matches so far allows it."""

    def __init__(self, matchers: Sequence[Matcher]) -> None:
        """Takes ownership of ``matchers``: at least one matcher, and all at the same position."""
        self._matchers = list(matchers)

    def deep_copy(self) -> UnionMatcher:
        """Return a copy at the same position."""
        return UnionMatcher([matcher.deep_copy() for matcher in self._matchers])

    def is_stopped(self) -> bool:
        return all(matcher.is_stopped() for matcher in self._matchers)

    def is_error(self) -> bool:
        return all(matcher.is_error() for matcher in self._matchers)

    def stop_reason(self) -> str:
        return self._matchers[0].stop_reason()

    def compute_bitmask(self) -> bytes:
        """Return one bit per token, set if the token is allowed."""
        masks = [np.frombuffer(matcher.compute_bitmask(), np.uint8) for matcher in self._matchers]
        able = [mask for mask, one in zip(masks, self._matchers, strict=True) if not one.is_error()]
        either: NDArray[np.uint8] = np.bitwise_or.reduce(able or masks)
        return either.tobytes()

    def consume_token(self, token: int) -> bool:
        """Advance the grammars that allow a token, and drop the others; False if no grammar allows the token."""
        went = [matcher for matcher in self._matchers if not matcher.is_error() and matcher.consume_token(token)]
        self._matchers = went or self._matchers[:1]
        return bool(went)


class GrammarState:
    """Position of one answer in its grammar.

    After submission of the sequence, only the engine's thread uses the state. Between ``start_mask`` and ``mask``, a
    thread of ``threads`` computes a mask.
    """

    def __init__(self, matcher: Matcher, threads: Executor) -> None:
        """Takes ownership of ``matcher``, which is at the start of the grammar."""
        self._matcher, self._threads = matcher, threads
        self._next: Future[bytes] | None = None

    def union(self, other: GrammarState) -> GrammarState:
        """Return a state that allows both grammars. Takes ownership of both states, which must be at the start."""
        return GrammarState(UnionMatcher((self._matcher, other._matcher)), self._threads)

    @property
    def complete(self) -> bool:
        """True if the answer completes the grammar and no token may follow."""
        return self._next is None and self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token: int) -> None:
        """Advance by a token that the mask allowed. Raises GrammarFailed."""
        self.mask()  # waits until the thread no longer uses the matcher
        self._next = None
        if not self._matcher.consume_token(token):
            raise self._failure()

    def start_mask(self) -> None:
        """Start the computation of the next token's mask."""
        if self._next is None:
            self._next = self._threads.submit(self._matcher.compute_bitmask)

    def mask(self) -> NDArray[np.uint8]:
        """Return the mask of the next token: one bit per token, from the lowest bit of the first byte on.

        The mask may be longer than the vocabulary. It does not change until ``accept``. Raises GrammarFailed if the
        grammar cannot continue, and its base class GenerationFailed if the grammar library fails.
        """
        self.start_mask()
        assert self._next is not None
        error = self._next.exception()  # a panic in Rust is no Exception: raised here, it would end the engine
        if error is not None:
            raise GenerationFailed(f"the grammar could not be kept to: {type(error).__name__}", param="grammar")
        if self._matcher.is_error():
            raise self._failure()
        return np.frombuffer(self._next.result(), np.uint8)

    def _failure(self) -> GrammarFailed:
        # One word, such as LexerTooComplex. The whole message would contain the answer's text.
        why = self._matcher.stop_reason()
        return GrammarFailed(f"the grammar could not be kept to: {why}; send a simpler one", param="grammar")
