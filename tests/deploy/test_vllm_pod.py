"""Pod of vLLM and the daemon, as its native sidecar: a daemon's death, a rolled pod."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from inference_svc.models.model_resolver import DEMO_MODEL
from tests.deploy.playing import wait_for
from tests.deploy.running_pod import START_SECONDS, Pod, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1300),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; make test-vllm runs it"
    ),
]
NAME = "demo"
SETTINGS = {"MODEL": str(DEMO_MODEL), "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor"}
FLAGS = (
    f"--served-model-name={NAME}", "--dtype=bfloat16", "--max-model-len=2048", "--enforce-eager",
    "--no-enable-prefix-caching", "--enable-prompt-tokens-details",
)  # fmt: skip


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    with running(tmp_path_factory.mktemp("pod"), NAME, SETTINGS, "overlays/vllm", FLAGS) as found:
        yield found


def cached(answer: dict[str, Any]) -> int:
    details = answer["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0)


def test_both_containers_are_one_user(pod: Pod) -> None:
    assert {user for name in ("cache", "worker") for user in pod.user(name)} == {"10001"}


def test_a_daemons_death_fails_nothing_and_the_next_request_is_warm(pod: Pod) -> None:
    before = wait_for(lambda: (found := pod.ask()) and cached(found) and found, START_SECONDS)
    daemon, _ = pod.state("cache")
    os.kill(daemon, signal.SIGKILL)
    assert pod.ask()["choices"][0]["text"] == before["choices"][0]["text"]
    wait_for(lambda: pod.state("cache")[1] and pod.state("cache")[0] != daemon, START_SECONDS)
    after = wait_for(lambda: (found := pod.ask()) and cached(found) and found, START_SECONDS)
    assert after["choices"][0]["text"] == before["choices"][0]["text"]


def test_a_rolled_pod_is_warm_from_its_volume(pod: Pod) -> None:
    wait_for(lambda: cached(pod.ask()), START_SECONDS)
    pod.roll()
    assert cached(pod.ask()) > 200
