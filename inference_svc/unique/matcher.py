"""A grammar's matcher that knows what the grammar cannot say: arrays without duplicates.

What is drawn is drawn from the tokens that the grammar allows and a ``Watch`` over the text leaves.
"""

from __future__ import annotations

from llguidance import LLMatcher

from inference_svc.unique.masking import MaskingMatcher
from inference_svc.unique.watch import Allowed, Watch


class UniqueMatcher(MaskingMatcher):
    """Of a JSON schema."""

    def __init__(self, tokens: LLMatcher, watch: Watch, texts: list[bytes]) -> None:
        """Takes over ``tokens`` and ``watch``, which stand at the beginning of the same grammar without
        ``uniqueItems``; ``texts`` are those of the tokens."""
        super().__init__(tokens, texts)
        self._watch = watch

    def deep_copy(self) -> UniqueMatcher:
        """Another one at the same place."""
        return UniqueMatcher(self._tokens.deep_copy(), self._watch.another(), self._texts)

    def is_error(self) -> bool:
        return super().is_error() or self._watch.failed

    def _denied(self, allowed: Allowed) -> set[int]:
        return self._watch.denied(allowed)

    def consume_token(self, token: int) -> bool:
        """Goes on with a token; False when that is not allowed, and nothing is from then on."""
        text = self._texts[token]
        if not self._watch.goes(text) or not self._tokens.consume_token(token):
            self._stuck = True
            return False
        return self._watch.take(text)
