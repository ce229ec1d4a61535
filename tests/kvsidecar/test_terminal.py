"""Text of a model or of another user on a terminal: no character of it steers the terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import subprocess
import sys

import structlog
from kvsidecar.cli.printable import for_stream
from kvsidecar.cli.service_settings import configure_logging
from kvsidecar.cli.terminal import TerminalConsole
from rich.table import Table

EVIL = "hi\x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J\x9b31m\r\x08\ttab\nline"
CONTROL = [chr(n) for n in (*range(0x20), *range(0x7F, 0xA0)) if chr(n) not in "\n\t"]


def printed(terminal: bool) -> str:
    file = io.StringIO()
    console = TerminalConsole(file=file, force_terminal=terminal, color_system=None, width=200)
    console.print(EVIL, end="", markup=False, highlight=False, soft_wrap=True)
    table = Table("whose")
    table.add_row(EVIL.partition("\n")[0])
    console.print(table)
    return file.getvalue()


def test_a_terminal_gets_no_control_characters_of_what_is_shown() -> None:
    shown = printed(terminal=True)
    assert not [char for char in CONTROL if char in shown]
    assert "hi]52;c;" in shown
    assert "line" in shown


def test_a_file_gets_the_text_as_it_is() -> None:
    assert "\x1b]52;c;" in printed(terminal=False)


def on_a_terminal(*arguments: str) -> str:
    """Run kvsidecar with a terminal as its output; return what the terminal got."""
    reading, terminal = pty.openpty()
    command = [sys.executable, "-m", "kvsidecar.cli.root_command", *arguments]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, check=False, timeout=60)
    os.close(terminal)
    got = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(reading, 65536):
            got += part
    os.close(reading)
    return got.decode()


def test_an_error_on_a_terminal_has_no_control_characters() -> None:
    shown = on_a_terminal("cache", "list", "--namespace", "00" * 32, "--salt", "@/x\x1b]52;c;cm0gLXJmIH4=\x07")
    assert "kvsidecar: cannot read the salt from /x]52;c;" in shown
    assert "\x1b" not in shown


def test_a_stored_text_on_a_terminal_has_no_control_characters() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert for_stream(EVIL, io.StringIO()) == EVIL
    assert not set(CONTROL) & set(for_stream(EVIL, Terminal()))


def test_a_text_keeps_its_tabs_and_colons() -> None:
    for terminal, shown in ((True, "hi]52;c;cm0gLXJmIH4=[2J31m\ttab\nline 3c:ab:12"), (False, f"{EVIL} 3c:ab:12")):
        file = io.StringIO()
        TerminalConsole(file=file, force_terminal=terminal).write_text(f"{EVIL} 3c:ab:12")
        assert file.getvalue() == shown


def test_a_log_on_a_terminal_has_none_of_a_guests_name() -> None:
    ours, theirs = pty.openpty()
    kept, sys.stderr = sys.stderr, os.fdopen(theirs, "w")
    try:
        configure_logging("info")
        structlog.get_logger().info("attached", client_name=EVIL)
        sys.stderr.flush()
        said = os.read(ours, 4096).decode()
    finally:
        sys.stderr.close()
        sys.stderr = kept
        os.close(ours)
        structlog.reset_defaults()
    assert "attached" in said
    assert "\x1b]52" not in said
    assert "\x1b[2J" not in said
    assert "\x9b" not in said
