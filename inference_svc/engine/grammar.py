"""What keeps one answer to a grammar: where it stands, and which tokens may follow there.

The state moves on by accepted tokens alone, so a sequence that is preempted and computed again finds it as it was. The
mask of the next token is computed on a thread beside the forward, without the GIL, and waited for when that token is
drawn.
"""

from __future__ import annotations

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


class Steering:
    """One answer's place in its grammar. Belongs to the engine's thread once its sequence is submitted; between
    ``look_ahead`` and ``mask`` a thread of ``threads`` works on it."""

    def __init__(self, matcher: Matcher, threads: Executor) -> None:
        """Takes over ``matcher``, which stands at the grammar's beginning."""
        self._matcher, self._threads = matcher, threads
        self._next: Future[bytes] | None = None

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

    def look_ahead(self) -> None:
        """Begins to compute the mask of the next token."""
        if self._next is None:
            self._next = self._threads.submit(self._matcher.compute_bitmask)

    def mask(self) -> NDArray[np.uint8]:
        """A bit for each token that may come next, from the lowest bit of the first byte on; beyond the vocabulary
        there may be more. The same until a token is accepted. Raises GrammarFailed when the grammar cannot go on."""
        self.look_ahead()
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
