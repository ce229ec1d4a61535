"""What processes do not import on their way to serving, however much of it is installed. No times: lists of modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_NEVER = {"torch", "transformers", "opentelemetry.sdk", "kvkernels"}
# Drawn by structlog and httpx where it is installed, and used by neither in a service.
_RICH = {"rich", "pygments"}
_REMOTE = {"glide", "obstore", "blosc2", "cryptography"}
_DAEMON = "cache_daemon.config, cache_daemon.prefork_supervisor, cache_daemon.server"
_SERVICE = (
    "from kvsidecar.process.fast_import import skip_optional_imports; skip_optional_imports(); "
    "import kvsidecar.cli.service_settings, "
)


def imported(code: str) -> set[str]:
    """The modules that a new interpreter has after some code."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print(*sys.modules, file=sys.stderr)"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("code", "left_out"),
    [
        pytest.param(
            _SERVICE + _DAEMON,
            {*_NEVER, *_RICH, *_REMOTE, "httpx", "typer", "prometheus_client", "opentelemetry"},
            id="daemon",
        ),
        pytest.param(
            _SERVICE + "inference_svc.gateway.gateway_server",
            {*_NEVER, *_RICH, *_REMOTE, "httpx", "typer", "numpy", "inference_svc.gateway.fleet.fleet_app"},
            id="gateway",
        ),
        pytest.param(
            _SERVICE + "inference_svc.node.supervisor", {*_NEVER, *_RICH, "httpx", "typer", "numpy"}, id="serve"
        ),
        # kvsidecar --help, and every command until it runs.
        pytest.param(
            "import kvsidecar.cli.root_command",
            {*_NEVER, "pygments", "numpy", "httpx", "pydantic", "importlib.metadata", "structlog"},
            id="commands",
        ),
        pytest.param("import kvsidecar.cli.entry", {"typer", "rich", "grpc", "pydantic"}, id="entry"),
    ],
)
def test_a_start_leaves_out_what_it_does_not_use(code: str, left_out: set[str]) -> None:
    assert imported(code) & left_out == set()


@pytest.mark.parametrize("program", ["cache_daemon", "inference_svc worker", "inference_svc gateway"])
def test_a_program_starts_so(program: str) -> None:
    """``--help`` comes when everything has been imported but the model's side of a worker."""
    module, *command = program.split()
    ended = (
        f"import {module}.__main__ as program\ntry: program.main({[*command, '--help']})\nexcept SystemExit: pass\n"
        "import sys"
    )
    found = imported(f"sys.argv = ['x']\n{ended}")
    assert found & {*_RICH, "torch"} == set()
    assert {"structlog", "pydantic_settings"} <= found


@pytest.mark.parametrize("given", [["--help"], ["--modle", "x"]])
def test_a_command_line_is_read_before_what_computes_is_imported(given: list[str]) -> None:
    ended = (
        f"import inference_svc.__main__ as program\ntry: program.main({['verify', *given]})\nexcept SystemExit: pass\n"
    )
    assert imported(f"sys.argv = ['x']\n{ended}import sys") & {"torch", "transformers", "kvkernels"} == set()


def test_rich_can_be_imported_afterwards() -> None:
    assert "rich.console" in imported(
        "from kvsidecar.process.fast_import import skip_optional_imports; skip_optional_imports(); import rich.console"
    )


def test_the_package_as_a_library_decides_nothing_for_its_program() -> None:
    pytest.importorskip("rich")
    assert "rich" in imported("import kvsidecar.client, kvsidecar.cli.service_settings, structlog")
    code = "import os, kvsidecar.client; assert 'PYDANTIC_DISABLE_PLUGINS' not in os.environ"
    environment = {k: v for k, v in os.environ.items() if k != "PYDANTIC_DISABLE_PLUGINS"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)


def test_a_traceback_on_a_terminal_is_plain() -> None:
    """Without rich, and without local variables: those hold prompts."""
    code = (
        "from kvsidecar.process.fast_import import skip_optional_imports; skip_optional_imports()\n"
        "import io, sys, structlog\n"
        "from kvsidecar.cli.service_settings import configure_logging\n"
        "sys.stderr = file = io.StringIO(); file.isatty = lambda: True\n"
        "configure_logging('info')\n"
        "try:\n    prompt = 'secret'; raise RuntimeError('planted')\n"
        "except RuntimeError: structlog.get_logger().exception('step failed')\n"
        "print(file.getvalue())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "RuntimeError: planted" in done.stdout, done.stderr
    assert "Traceback (most recent call last)" in done.stdout
    assert "= 'secret'" not in done.stdout.replace("prompt = 'secret'; raise", "")


@pytest.mark.parametrize("command", ["serve", "daemon", "worker", "gateway", "verify", "quantize"])
def test_the_console_script_becomes_a_service_without_the_command_line(command: str) -> None:
    code = (
        "import os, sys, kvsidecar.cli.entry as entry\n"
        "def execv(path, command): print(*command[1:]); raise SystemExit('typer' in sys.modules)\n"
        f"os.execv = execv; sys.argv = ['kvsidecar', {command!r}, '--flag=1', 'more', '--', '-h']\n"
        "entry.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    program = "cache_daemon" if command == "daemon" else f"inference_svc {command}"
    assert (done.returncode, done.stdout) == (0, f"-P -m {program} --flag=1 more -- -h\n"), done.stderr


@pytest.mark.parametrize(
    ("program", "given", "first", "last"),
    [
        ("cache_daemon", ["--help"], "uvloop", "cache_daemon.server"),
        ("inference_svc", ["gateway", "--help"], "fastapi", "inference_svc.gateway.gateway_server"),
        # It ends as soon as it would take memory.
        (
            "inference_svc",
            ["worker", "--model=demo", "--pool-bytes=1", "--cache-socket=none"],
            "torch",
            "inference_svc.server.runtime",
        ),
    ],
)
def test_nobody_looks_for_garbage_among_what_is_imported(
    program: str, given: list[str], first: str, last: str, tmp_path: Path
) -> None:
    given = [*given, f"--socket={tmp_path / 'w.sock'}"] if given[0] == "worker" else given
    code = (
        f"import gc, sys, {program}.__main__ as program\n"
        f"begun, done = (lambda: {first!r} in sys.modules), (lambda: hasattr(sys.modules.get({last!r}), 'log'))\n"
        "seen = []\n"
        "gc.callbacks.append(lambda phase, _: seen.append(phase) if begun() and not done() else None)\n"
        f"try: program.main({given!r})\n"
        "except SystemExit: pass\n"
        "print('imported', done(), 'collections', len(seen), 'enabled', gc.isenabled())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout.splitlines()[-1] == "imported True collections 0 enabled True", found.stderr


def test_the_interpreter_ends_without_a_look_at_what_was_imported() -> None:
    """It looks once more after the exit handlers, which takes 2 s after torch and transformers."""
    code = (
        "import atexit, gc, runpy, sys\n"
        "atexit.register(lambda: print('left', len(gc.get_objects()) // 1000, 'thousand'))\n"
        "sys.argv = ['inference_svc', 'worker', '--help']\n"
        "runpy.run_module('inference_svc', run_name='__main__')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout.splitlines()[-1] == "left 0 thousand", found.stderr


def test_a_collector_that_is_off_stays_off() -> None:
    code = (
        "import gc; from kvsidecar.process.fast_import import gc_paused; gc.disable()\n"
        "with gc_paused(): pass\n"
        "assert not gc.isenabled()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
