"""Traces of what a daemon is asked: whole, anonymous, and of use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvsidecar import keys
from kvsidecar.cli.cache.trace import summarize
from kvsidecar.cli.root_command import app
from kvsidecar.errors import InvalidRequest
from typer.testing import CliRunner

from benchmarks import eviction_traces
from benchmarks.node import Node
from cache_daemon.observability.traffic_trace import BLOCK_TOKENS, TrafficTrace, block_ids
from tests.cache_daemon.conftest import Peer
from tests.cache_daemon.operators import daemon_that_ends


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_blocks_have_the_same_id_as_long_as_prompts_are_the_same() -> None:
    root, prompt = bytes(32), list(range(3 * BLOCK_TOKENS))
    whole = list(block_ids(b"k", root, keys.token_bytes(prompt)))
    longer = list(block_ids(b"k", root, keys.token_bytes([*prompt, 5])))
    other = list(block_ids(b"k", root, keys.token_bytes([*prompt[: 2 * BLOCK_TOKENS], *prompt[:BLOCK_TOKENS]])))
    assert longer[:3] == whole
    assert len(longer) == 4
    assert other[:2] == whole[:2]
    assert other[2] not in whole, "a block is one in its context"
    assert not set(whole) & set(block_ids(b"k", b"\1" * 32, keys.token_bytes(prompt))), "tenants share nothing"
    assert not set(whole) & set(block_ids(b"l", root, keys.token_bytes(prompt))), "another key, other ids"
    assert max(*whole, *longer, *other) < 1 << 53, "every reader of JSON keeps them exact"


def test_a_daemon_records_all_that_is_asked_for_and_no_tokens(start: Callable[..., Node], tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    node = start(trace=file)
    peer = Peer(node)
    assert not peer.welcome.HasField("summary"), "workers ask for prompts of which nothing is stored, too"
    secret = [123456789, 987654321]
    prompt = secret * BLOCK_TOKENS
    for ids in (prompt, prompt, [*prompt, 7], secret):
        peer.match(ids)
    peer.match(prompt, salt=b"another")
    peer.close()
    node.kill("daemon", 15)
    found = lines_of(file)
    assert [line["input_length"] for line in found] == [1024, 1024, 1025, 2, 1024]
    first, again, longer, short, another = (line["hash_ids"] for line in found)
    assert first == again == longer[:2]
    assert len(longer) == 3
    assert not {*short, *another} & set(first)
    assert all(line.keys() == {"timestamp", "input_length", "output_length", "hash_ids"} for line in found)
    assert [line["timestamp"] for line in found] == sorted(line["timestamp"] for line in found)
    text = file.read_text()
    assert not any(str(token) in text for token in secret)
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_trace_ends_at_its_size_and_says_so(tmp_path: Path) -> None:
    trace = TrafficTrace(tmp_path / "trace", 1000)
    for i in range(100):
        trace.record_prompt(bytes(32), keys.token_bytes([i] * 100))
    trace.close()
    assert (tmp_path / "trace").stat().st_size <= 1000
    assert 5 < len(lines_of(tmp_path / "trace")) < 20, "whole lines"
    assert not trace.complete
    assert trace.num_dropped > 0


def test_an_earlier_trace_is_kept(tmp_path: Path) -> None:
    for i in range(3):
        trace = TrafficTrace(tmp_path / "trace", 1 << 20)
        trace.record_prompt(bytes(32), keys.token_bytes([0] * (i + 1)))
        trace.close()
    assert [line["input_length"] for line in lines_of(tmp_path / "trace")] == [3]
    assert [line["input_length"] for line in lines_of(tmp_path / "trace.1")] == [2]


def test_a_trace_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    result = daemon_that_ends(tmp_path, "--trace", tmp_path / "missing" / "trace")
    assert result.returncode == 2
    assert "No such file or directory; choose another --trace" in result.stderr


def test_a_summary_says_what_a_cache_without_limit_would_have(tmp_path: Path) -> None:
    trace = TrafficTrace(tmp_path / "trace", 1 << 20)
    system = list(range(BLOCK_TOKENS))
    for prompt in (system + [1] * 512, system + [2] * 512, system + [1] * 512):
        trace.record_prompt(bytes(32), keys.token_bytes(prompt))
    trace.close()
    found = summarize(tmp_path / "trace")
    assert (found.prompts, found.tokens, found.blocks, found.working_set_tokens) == (3, 3072, 3, 1536)
    assert found.most_hit_ratio == 0.5
    assert found.repeated_prompts == 1


def test_a_summary_refuses_what_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"timestamp": 1, "input_length": 2, "hash_ids": []}\nnonsense\n')
    with pytest.raises(InvalidRequest, match="line 2 of"):
        summarize(tmp_path / "x")


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": Infinity, "input_length": 2, "hash_ids": []}',
        '{"timestamp": 1, "input_length": 1e999, "hash_ids": []}',
        '{"timestamp": 1, "input_length": NaN, "hash_ids": []}',
        '{"timestamp": 1, "input_length": 2, "hash_ids": [-Infinity]}',
        f'{{"timestamp": 1{"0" * 400}, "input_length": 2, "hash_ids": []}}',
        f'{{"timestamp": 1, "input_length": 1{"0" * 400}, "hash_ids": []}}',
        '{"timestamp": 1, "input_length": -2, "hash_ids": []}',
        "[" * 100_000,
    ],
    ids=["infinite", "too_large", "nan", "infinite_block", "long_time", "long_length", "negative", "nested"],
)
def test_a_summary_refuses_numbers_that_no_daemon_records(tmp_path: Path, line: str) -> None:
    (tmp_path / "x").write_text(f"{line}\n")
    done = CliRunner().invoke(app, ["cache", "trace", "summary", str(tmp_path / "x")])
    assert isinstance(done.exception, InvalidRequest), done.exception
    assert str(done.exception).startswith(f"line 1 of {tmp_path / 'x'} is not one of a trace")


def test_policies_are_judged_on_a_recorded_trace(tmp_path: Path) -> None:
    trace = TrafficTrace(tmp_path / "trace", 1 << 20)
    for prompt in ([1] * 600, [1] * 600, [1] * 512 + [2] * 100):
        trace.record_prompt(bytes(32), keys.token_bytes(prompt))
    trace.close()
    found = eviction_traces.read(str(tmp_path / "trace"))
    assert [(r.tokens, len(r.path)) for r in found] == [(600, 2), (600, 2), (612, 2)]
    assert found[0].path == found[1].path
    assert found[0].path[0] is found[2].path[0]


def test_a_full_disk_makes_a_trace_incomplete_and_its_end_raises_nothing(tmp_path: Path) -> None:
    trace = TrafficTrace(tmp_path / "trace.jsonl", 1 << 20)
    trace._file.close()
    with Path("/dev/full").open("wb", buffering=1 << 16) as full:
        trace._file = full
        trace.record_prompt(bytes(32), keys.token_bytes([1, 2, 3]))
        trace.close()
    assert not trace.complete
