"""Faster imports at process start: skips optional dependencies, pauses the GC.

A restarted cache daemon serves only after it has imported its modules, so unused imports prolong an outage. This module
itself imports no slow module, because it runs before all other imports.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvsidecar.process.sigint import quiet_sigint


def skip_optional_imports() -> None:
    """Import structlog without rich, and disable Pydantic's plugin search.

    structlog would import rich for tracebacks, but our tracebacks are plain. Pydantic would read the metadata of all
    installed packages to find plugins; ``PYDANTIC_DISABLE_PLUGINS=`` in the environment enables the search again. Call
    it on the main thread of a KVSidecar process, before any other import. A program that uses this package as a library
    decides for itself.
    """
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if "rich" in sys.modules:  # too late to save time
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # importing it is an ImportError
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection while the ``with`` block imports.

    The objects of modules stay alive, and repeated scans of these objects take at least an eighth of a worker's import
    time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def fast_imports() -> Iterator[None]:
    """Pause garbage collection, and let Ctrl-C end the process quietly, while the ``with`` block imports."""
    with quiet_sigint(), gc_paused():
        yield
