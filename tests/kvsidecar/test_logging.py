"""Logs of the services: structured, and never what a request fails over."""

from __future__ import annotations

import contextlib
import io
import os
import sys

import pytest
import structlog
from kvsidecar.cli.service_settings import configure_logging


class Full(io.TextIOBase):
    """A log file on a full disk."""

    def write(self, _: str) -> int:
        raise OSError(28, "No space left on device")


def closed() -> io.TextIOBase:
    file = io.StringIO()
    file.close()
    return file


def without_reader() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True)


@pytest.mark.parametrize("where", [Full, closed, without_reader, type(None)])
def test_a_line_that_cannot_be_written_fails_nobody(where: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", file := where())
    configure_logging("info")
    log = structlog.get_logger()
    log.info("a line")
    try:
        raise RuntimeError("planted")
    except RuntimeError:
        log.exception("step failed")
    if isinstance(file, io.TextIOWrapper):
        with contextlib.suppress(BrokenPipeError):  # what was not written is tried once more
            file.close()


def test_lines_go_where_standard_error_leads_now(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging("info")
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    structlog.get_logger().info("first")
    assert '"event": "first"' in file.getvalue()


class Recorded(io.TextIOBase):
    """Standard error that records each write."""

    def __init__(self) -> None:
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return len(text)


def test_a_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a node share their standard error: lines in two writes ran into each other."""
    configure_logging("info")
    monkeypatch.setattr(sys, "stderr", file := Recorded())
    structlog.get_logger().info("first")
    structlog.get_logger().info("second")
    assert len(file.writes) == 2
    assert all(line.endswith("}\n") for line in file.writes)
