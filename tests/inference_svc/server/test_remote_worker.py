"""A worker on another host (a network namespace), attached to this one's daemon over mTLS."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from kvsidecar import Completion
from kvsidecar.cli.service_settings import read_settings
from kvsidecar.errors import ConfigurationError

from benchmarks.network_links import link, why_none
from benchmarks.node import Node
from benchmarks.two_hosts import two_hosts
from inference_svc.node import supervisor
from inference_svc.node.supervisor import ServeConfig, Supervisor, _worker_settings
from inference_svc.server.daemon_address import daemon_address
from inference_svc.server.worker_config import WorkerConfig

ANSWER_TOKENS = 8


def ask(node: Node, prompt: list[int], **options: object) -> Completion:
    found = node.client().generate(prompt, max_tokens=ANSWER_TOKENS, temperature=0, logprobs=2, **options)
    node.settle()
    return found


def bits(answer: Completion) -> list[tuple[int, float]]:
    return [(token.token_id, token.logprob) for token in answer.logprobs]


@pytest.mark.skipif(bool(why_none()), reason=why_none())
def test_a_worker_on_another_host_answers_with_the_same_bits_as_one_of_this() -> None:
    rng = random.Random(3)

    def new(tokens: int) -> list[int]:
        return [rng.randrange(16, 4000) for _ in range(tokens)]

    try:
        with link(1.0):
            pass
    except RuntimeError as error:
        pytest.skip(str(error))
    with link(1.0) as wire, two_hosts(wire, resident_sequences=0) as (here, there):
        document, question = new(900), new(40)
        ask(here, document)
        found = ask(there, document + question)
        assert found.cached_tokens > 890, "what was read here"
        assert bits(found) == bits(ask(there, document + question, skip_cache=True))
        assert bits(found) == bits(ask(here, document + question))

        other = new(900)
        ask(there, other)
        again = ask(here, other + question)
        assert again.cached_tokens > 890, "what was read there"
        assert bits(again) == bits(ask(here, other + question, skip_cache=True))

        here.kill("daemon")
        assert bits(ask(there, document + question)) == bits(found), "computed"
        here.start_daemon()
        there.wait_attached(0)
        warm = ask(there, document + question)
        assert warm.cached_tokens > 890
        assert bits(warm) == bits(found)
        stats = here.cache_stats()
        assert (stats.leases, stats.reservations) == (0, 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cache_address": "10.0.0.1:7401"}, "without TLS everybody in between reads along"),
        ({"cache_address": "nowhere"}, "'nowhere' is not an address"),
        ({"cache_ca": "ca.pem"}, "cache_ca is for a daemon at cache_address"),
        ({"cache_address": "10.0.0.1:7401", "cache_socket": "x.sock"}, "a worker has one daemon"),
        ({"cache_address": "10.0.0.1:7401", "cache_ca": "no.pem"}, "cannot read the CA file no.pem"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        daemon_address(read_settings(WorkerConfig, given, None))


def test_a_daemon_elsewhere_takes_no_memory_here_and_has_an_unknown_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "free_bytes", lambda: 5 << 30)
    config = read_settings(ServeConfig, {"model": "demo", "cache_address": "127.0.0.1:7401"}, None)

    def told(name: str) -> list[str]:
        command = Supervisor(config, _worker_settings(config))._worker_command(0, tmp_path / "w.sock")
        return [flag for flag in command if flag.startswith(name)]

    assert told("--memory-bytes") == [f"--memory-bytes={5 << 30}"]
    monkeypatch.setenv("KVSIDECAR_CACHE_STORE", "none")
    assert told("--overflow-bytes") == [], "the variable is for a daemon of this node"
    monkeypatch.setenv("KVSIDECAR_CACHE_STORE_KEY", "x" * 64)
    assert told("--overflow-bytes") == ["--overflow-bytes=0"]


def test_a_node_with_a_daemon_elsewhere_has_none_of_its_own(tmp_path: Path) -> None:
    config = read_settings(ServeConfig, {"model": "demo", "cache_address": "127.0.0.1:7401"}, None)
    node = Supervisor(config, _worker_settings(config))
    assert "--cache-address=127.0.0.1:7401" in node._worker_command(0, tmp_path / "w.sock")
    assert not any(flag.startswith("--cache-socket") for flag in node._worker_command(0, tmp_path / "w.sock"))
    assert "--cache-socket=none" in node._gateway_command()
    with pytest.raises(ConfigurationError, match="store is for a daemon of this node"):
        _worker_settings(read_settings(ServeConfig, {"cache_address": "127.0.0.1:7401", "store": "x"}, None))
