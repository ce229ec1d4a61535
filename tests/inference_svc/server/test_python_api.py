"""The in-process Engine and the asynchronous client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kvsidecar import AsyncClient
from kvsidecar.errors import ConfigurationError, InvalidRequest, ModelUnsupported

from benchmarks.node import Node, free_port
from benchmarks.two_hosts import TlsListener
from inference_svc import Engine
from inference_svc.context_reuse.question import BUILT_IN, read_questions
from inference_svc.context_reuse.verifier import Thresholds
from inference_svc.engine.engine_stats import EngineLimits

TEXT = "hello there, I would like to book a table for two people tonight. " * 20
# On a busy machine, the daemon's answer may take longer than a user's request would wait for it.
SETTINGS: dict[str, Any] = {"pool_bytes": "64MiB", "cache_timeout_ms": 10_000}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained("demo", storage_bits=16, arena_bytes="64MiB", **SETTINGS) as found:
        yield found


def test_warm_then_generate_reuses(engine: Engine) -> None:
    stored = engine.warm(TEXT)
    result = engine.generate(TEXT + " Really?", max_tokens=6, temperature=0, ignore_eos=True)
    assert result.cached_tokens >= stored - 1 > 0
    assert result.kv_reuse_ratio > 0.9
    assert len(result.token_ids) == 6
    assert 0 < result.ttft_ms <= result.total_ms
    assert result.tokens_per_sec > 0
    plain = engine.generate(TEXT + " Really?", max_tokens=6, temperature=0, ignore_eos=True, skip_cache=True)
    assert plain.token_ids == result.token_ids


def test_the_time_of_an_answer_is_its_own(engine: Engine) -> None:
    options = {"temperature": 0, "ignore_eos": True}
    long, short = engine.generate_many([("one", options | {"max_tokens": 400}), ("two", options | {"max_tokens": 2})])
    assert short.total_ms < long.total_ms / 2


def test_batches_answer_in_order_and_each_for_itself(engine: Engine) -> None:
    prompts = ["one two", "three four five", [10, 20, 30]]
    batch = engine.generate_batch(prompts, max_tokens=5, temperature=0, ignore_eos=True)
    alone = [engine.generate(p, max_tokens=5, temperature=0, ignore_eos=True) for p in prompts]
    assert [b.token_ids for b in batch] == [a.token_ids for a in alone]
    many = engine.generate_many([("one two", {"max_tokens": 2}), ("x", {"max_tokens": 7, "ignore_eos": True})])
    assert [len(m.token_ids) for m in many][1] == 7


def test_a_batch_may_have_any_number_of_prompts() -> None:
    settings: dict[str, Any] = {"cache": None, "threads": 1, "pool_bytes": 64 << 20, "max_waiting": 64}
    with Engine.from_pretrained("demo", **settings) as engine:
        prompts = [[5 + i % 3000, 6, 7] for i in range(3000)]
        found = engine.generate_batch(prompts, max_tokens=1, temperature=0)
        assert len(found) == 3000
        again = engine.generate_batch([prompts[i] for i in (0, 1500, 2999)], max_tokens=1, temperature=0)
        assert [found[i].token_ids for i in (0, 1500, 2999)] == [one.token_ids for one in again]
        many: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True}
        bad = [([5, 6, 7], many)] * 100 + [([5, 6, 7], {"temperature": 3.0})] + [([5, 6, 7], many)] * 100
        with pytest.raises(InvalidRequest, match="temperature is 3"):
            engine.generate_many(bad[60:])  # fewer than may wait
        inner, deadline = engine._runtime.engine, time.monotonic() + 60
        while inner.load != (0, 0, 0):
            assert time.monotonic() < deadline, f"others go on: {inner.load}"
            time.sleep(0.01)
        assert inner.stats.cancelled == 40


def test_an_answer_comes_in_pieces(engine: Engine) -> None:
    options = {"max_tokens": 200, "temperature": 0.8, "seed": 3, "ignore_eos": True, "logprobs": 1}
    chunks = list(engine.stream(TEXT, **options))  # type: ignore[arg-type]
    whole = engine.generate(TEXT, **options)  # type: ignore[arg-type]
    *pieces, last = chunks
    assert all(chunk.result is None for chunk in pieces)
    assert last.result is not None
    assert len(pieces) > 3
    assert "".join(chunk.text for chunk in chunks) == last.result.text == whole.text
    assert [i for chunk in chunks for i in chunk.token_ids] == last.result.token_ids == whole.token_ids
    assert [p.token_id for p in whole.logprobs] == whole.token_ids
    assert whole.logprobs == last.result.logprobs


def test_an_iterator_that_is_closed_cancels_its_answer(engine: Engine) -> None:
    before = engine.cache_stats()["cancelled"]
    with contextlib.closing(engine.stream("x", max_tokens=3000, ignore_eos=True)) as chunks:
        next(chunks)
    for _ in range(3000):
        if engine.cache_stats()["cancelled"] == before + 1:
            break
        time.sleep(0.01)
    else:
        pytest.fail("it goes on")
    with pytest.raises(InvalidRequest, match="temperature is 3"):
        next(engine.stream("x", temperature=3.0))


def test_stats_of_engine_and_daemon(engine: Engine) -> None:
    engine.warm(TEXT)
    engine.generate(TEXT, max_tokens=1)
    stats = engine.cache_stats()
    assert stats["requests"] > 0
    assert stats["daemon"]["chunks"] > 0
    engine.generate(TEXT, max_tokens=1, skip_cache=True)
    assert engine.cache_stats()["prompt_tokens"] > stats["prompt_tokens"]
    assert engine.cache_stats()["kv_reuse_ratio"] == stats["kv_reuse_ratio"]


def test_a_daemon_at_an_address_serves_answers_stats_and_verdicts(tmp_path: Path) -> None:
    door, tenants, limits = TlsListener(tmp_path, "127.0.0.1"), tmp_path / "tenants.toml", Thresholds(min_prompts=3)
    tenants.write_text('[tenant.chief]\noperator = true\ncertificates = ["worker"]\n')
    tenants.chmod(0o600)
    settings = SETTINGS | {name: value for name, value in door.worker_flags.items() if name != "cache_socket"}
    with Node("demo", workers=0, daemon_flags=door.daemon_flags | {"tenants": tenants}):
        for first in (True, False):
            with Engine.from_pretrained("demo", **settings) as engine:
                stored = engine.warm(TEXT)
                assert engine.generate(TEXT, max_tokens=1).cached_tokens >= stored - 1
                assert engine.cache_stats()["daemon"]["chunks"] > 0
                connector = engine._runtime.cache
                assert connector is not None
                assert (connector.verdict is None) == first, "the engine before stored one"
                if first:
                    engine.verify_correctness(
                        read_questions(BUILT_IN)[:3], repair="cacheblend", ratio=1.0, thresholds=limits
                    )


def test_a_verdict_that_the_daemon_refuses_costs_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    at = f"127.0.0.1:{free_port()}"
    with (
        Node("demo", workers=0, daemon_flags={"tcp": at, "tcp_insecure": True}),
        Engine.from_pretrained("demo", cache_address=at, **SETTINGS) as engine,
    ):
        report = engine.verify_correctness(read_questions(BUILT_IN)[:1], repair="cacheblend", ratio=1.0)
        assert "guest may not" in engine.cache_stats()["daemon"]["error"]
    assert report.findings
    assert "the verdict is not stored" in "".join(capsys.readouterr())


def test_bad_values_raise_by_name(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="temperature is 3"):
        engine.generate("x", temperature=3.0)
    with pytest.raises(ModelUnsupported, match="not known"):
        Engine.from_pretrained("shape:none", cache=None)
    with pytest.raises(ConfigurationError, match="only an embedded daemon has one"):
        Engine.from_pretrained("demo", cache=None, store="kept")


def test_the_embedded_daemons_store_outlives_the_engine(tmp_path: Path) -> None:
    for cached in (0, None):
        with Engine.from_pretrained("demo", store=tmp_path / "store", **SETTINGS) as engine:
            result = engine.generate(TEXT, max_tokens=1)
            assert result.cached_tokens == (result.prompt_tokens - 1 if cached is None else 0)


_PROGRAM = """
from inference_svc import Engine
engine = Engine.from_pretrained("demo", arena_bytes="64MiB", pool_bytes="64MiB", threads=1)
engine.generate("hello", max_tokens=2)
"""


def test_the_embedded_daemon_ends_with_a_program_that_closes_nothing() -> None:
    """The daemon also holds the program's output, so whoever reads that would wait for ever."""
    with tempfile.TemporaryDirectory() as folder:  # its path is short enough for a socket
        environment = {**os.environ, "TMPDIR": folder}
        done = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        assert list(Path(folder).glob("kvsidecar-*")) == []


def test_the_embedded_daemon_ends_with_a_program_that_is_killed() -> None:
    program = _PROGRAM + "print(engine._end.peek()[2][0].pid, flush=True)\nimport time; time.sleep(120)"
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TMPDIR": folder}
        running = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        assert running.stdout is not None
        daemon = psutil.Process(int(running.stdout.readline()))
        running.kill()
        running.communicate(timeout=60)  # the daemon holds the pipe, too
        daemon.wait(timeout=60)
        assert list(Path(folder).glob("kvsidecar-*/cache.sock")) == []


@pytest.mark.parametrize("chunk_tokens", [1025, 4096])
def test_chunks_may_be_long(tmp_path: Path, chunk_tokens: int) -> None:
    """Chunking may ask for longer chunks than the daemon takes: they are cut, and storing goes on."""
    prompt = [100 + i % 300 for i in range(3000)]
    for cached in (0, len(prompt) - 1):
        store = str(tmp_path / "store")
        with Engine.from_pretrained("demo", store=store, chunk_tokens=chunk_tokens, **SETTINGS) as engine:
            result = engine.generate(prompt, max_tokens=1)
            assert (result.cached_tokens, engine.cache_stats()["cache_failures"]) == (cached, 0)


async def test_the_async_client_streams_and_cancels(node: Node) -> None:
    async with AsyncClient(node.worker_socket(0)) as client:
        parts = [p async for p in client.stream(TEXT, max_tokens=5, temperature=0, ignore_eos=True)]
        whole = await client.generate(TEXT, max_tokens=5, temperature=0, ignore_eos=True)
        assert "".join(p.text for p in parts) == whole.text
        assert parts[-1].final is not None
        assert (await client.model()).model_id == "demo"
        assert (await client.warm(TEXT)).stored_tokens > 0
        assert TEXT in await client.detokenize(await client.tokenize(TEXT))
        before = (await client.stats()).cancelled
        task = asyncio.create_task(client.generate(TEXT, max_tokens=3000, ignore_eos=True))
        async with asyncio.timeout(60):
            while not (await client.stats()).running:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(60):
            while (await client.stats()).cancelled != before + 1:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def test_a_connection_takes_more_calls_than_requests_can_run_and_wait(node: Node) -> None:
    """The worker must refuse calls beyond its queue (429), but calls beyond a connection's limit wait at the client."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(node.worker_socket(0)))
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        with client.makefile("rb") as frames:
            head = frames.read(9)  # of the server's SETTINGS frame (RFC 9113, section 6.5)
            settings = dict(struct.iter_unpack(">HI", frames.read(int.from_bytes(head[:3]))))
    max_concurrent_streams = settings[3]
    assert max_concurrent_streams > EngineLimits().max_queue + 1024  # the most of --batch-sequences
