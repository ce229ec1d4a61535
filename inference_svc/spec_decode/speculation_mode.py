"""Who guesses for a request."""

from __future__ import annotations

import enum

# Of one sequence's guesses in a pass.
MAX_BRANCHES = 4


class SpeculationMode(enum.Enum):
    """Which proposer a request's tokens are guessed by."""

    OFF = "off"
    NGRAM = "ngram"  # what followed the same tokens before, in the prompt, the answer and the tenant's past answers
    DRAFT = "draft"  # a smaller model
    AUTO = "auto"  # whichever promises more
