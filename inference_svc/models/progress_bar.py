"""Progress of long work: a bar on a terminal, else log lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
import transformers
from rich.console import Console
from rich.progress import Progress as Bar

log = structlog.get_logger("model")

_LOG_INTERVAL_SECONDS = 5.0
# Called with the work done and the total.
ProgressCallback = Callable[[int, int], None]


@contextmanager
def progress_bar(what: str) -> Iterator[ProgressCallback]:
    """Show progress while the ``with`` block runs."""
    if not sys.stderr.isatty():
        yield _LogProgress(what)
        return
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def disable_bars_off_terminal() -> None:
    """Disable transformers' own bars unless stderr is a terminal: they would mix with log lines."""
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()


class _LogProgress:
    """Progress as log lines."""

    def __init__(self, what: str) -> None:
        self._what, self._said = what, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._said > _LOG_INTERVAL_SECONDS:
            self._said = time.monotonic()
            log.info(self._what, percent=100 * done // total)
