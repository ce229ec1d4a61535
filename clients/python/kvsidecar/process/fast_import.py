"""Starting a process of ours without what its libraries import only because it happens to be installed.

A cache daemon that was killed serves again when its modules are imported, so what nobody uses there is time without a
cache. Imports nothing that takes time: it comes before what does.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvsidecar.process.sigint import ending_quietly


def import_lean() -> None:
    """Imports structlog without rich, which it would draw tracebacks with: ours are plain. Keeps Pydantic from reading
    the metadata of all installed packages for plugins, which ``PYDANTIC_DISABLE_PLUGINS=`` in the environment permits.

    For processes of ours, on their main thread, before any other import. A program that has this package as a library
    decides for itself.
    """
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if "rich" in sys.modules:  # then there is nothing to be saved
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # importing it is an ImportError
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]


@contextmanager
def collecting_later() -> Iterator[None]:
    """No collector looks for garbage while the body imports: what modules make stays, and to look through all of it
    again and again is an eighth of a worker's imports, or more."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Around imports before anything runs: nothing is collected, and Ctrl-C ends the process quietly."""
    with ending_quietly(), collecting_later():
        yield
