"""Fixtures that drive real processes over real sockets."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Generator, Iterator

import httpx
import hypothesis
import pytest
import structlog
from kvkernels.cpu import cpu_build
from kvsidecar.process.fast_import import gc_paused

from benchmarks.node import Node, Process
from inference_svc.models.mkl_determinism import make_mkl_deterministic
from tests import busy_machine, rerun_policy, seeds, time_limit
from tests.nursery import Nursery
from tests.skip_policy import SkipPolicy, allowed_skips

# hypothesis sets no deadline for an example, because other work may slow the machine. Tests marked `alone` check times.
hypothesis.settings.register_profile("kvsidecar", deadline=None)
hypothesis.settings.load_profile("kvsidecar")
make_mkl_deterministic()  # before the first matrix product of a test
# The default timeout of httpx is 5 s, which is too short on a busy machine.
_TIMEOUT: httpx.Timeout = inspect.signature(httpx.Client).parameters["timeout"].default
_TIMEOUT.connect = _TIMEOUT.read = _TIMEOUT.write = _TIMEOUT.pool = 60.0


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # the parent process has built them
    try:
        cpu_build.build()  # does nothing if the kernels are up to date
    except RuntimeError as error:
        print(f"torch serves instead of the CPU kernels: {error}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-long", action="store_true", help="run the tests that take minutes")
    parser.addoption(
        "--strict-skips",
        nargs="?",
        const="allowed",
        choices=("allowed", "none"),
        help="fail for skips that tests/allowed_skips.toml does not allow, or for any",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(seeds.chosen())
    config.pluginmanager.register(rerun_policy)
    config.pluginmanager.register(time_limit)
    strict = config.getoption("--strict-skips")
    if strict is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipPolicy(allowed_skips() if strict == "allowed" else []))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collection, and exclude the collected objects from later ones.

    There are a million of them, all of which stay alive.
    """
    with gc_paused():
        collected = yield
    gc.freeze()
    return collected


def pytest_report_header() -> str:
    return f"seed: {seeds.chosen()} ({seeds.VARIABLE} sets it)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if item.get_closest_marker("long") is not None and not config.getoption("--run-long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; pytest --run-long runs it"))
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none here"))


@pytest.fixture(scope="session", autouse=True)
def quick_starts() -> Iterator[None]:
    """Fork the processes of nodes from processes that have already imported their modules."""
    nurseries: dict[str, Nursery] = {}

    def launch(command: list[str], environment: dict[str, str], log: int) -> Process:
        package, *arguments = command
        if package not in nurseries:
            nurseries[package] = Nursery(package)
        return nurseries[package].start(arguments, environment, log)

    busy_machine.prefer_loads()
    before, Node.launch = Node.launch, staticmethod(launch)
    yield
    Node.launch = staticmethod(before)
    for nursery in nurseries.values():
        nursery.close()


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Restore logging after each test: a command that a test runs in this process configures it."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """A daemon and one worker with the built-in model and 16-bit storage. All tests of a module share them.

    The worker's pool has no prefix cache, so all reuse comes from the daemon. Its lookup timeout is long, so that a
    busy machine causes no misses.
    """
    flags = {"resident_sequences": 0, "cache_timeout_ms": 20_000}
    with Node("demo", arena_bytes="128MiB", pool_bytes="64MiB", worker_flags=flags) as running:
        yield running
