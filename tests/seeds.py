"""The seed of all random tests: fixed, unless ``TEST_SEED`` is a number or ``random``.

Nightly runs use a random seed. pytest's header prints the seed; the same number repeats the run.
"""

from __future__ import annotations

import os
import random

VARIABLE = "TEST_SEED"
FIXED = 33


def chosen() -> int:
    """Return the seed of this run. A random seed is stored in the environment, so that child processes use it, too."""
    given = os.environ.get(VARIABLE, "")
    if given == "random":
        given = os.environ[VARIABLE] = str(random.SystemRandom().randrange(1, 1 << 30))
    return int(given) if given else FIXED
