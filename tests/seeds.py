"""The seed of whatever tests draw at random: fixed, unless ``TEST_SEED`` names one or is ``random``.

Nightly runs draw one; pytest's header prints it, and the same number repeats the run.
"""

from __future__ import annotations

import os
import random

VARIABLE = "TEST_SEED"
FIXED = 33


def chosen() -> int:
    """The seed of this run; a drawn one is kept in the environment, so that processes started from here have it."""
    given = os.environ.get(VARIABLE, "")
    if given == "random":
        given = os.environ[VARIABLE] = str(random.SystemRandom().randrange(1, 1 << 30))
    return int(given) if given else FIXED
