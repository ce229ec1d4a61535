"""Sampling defaults that a router learns from the model are those that requests may have."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from inference_svc.models.loader import load

pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2", reason="needs kvsidecar[vllm-grpc]")


def test_a_router_learns_no_default_that_it_must_not_send() -> None:
    from inference_svc.server.vllm_grpc.vllm_engine_service import VllmEngine

    loaded: Any = load("demo", device="cpu")
    loaded.model.generation_config = GenerationConfig(
        do_sample=True, temperature=3.0, min_p=0.25, repetition_penalty=1.5
    )
    runtime: Any = SimpleNamespace(engine=SimpleNamespace(loaded=loaded, context_length=100))
    unused: Any = None
    servicer = VllmEngine(unused, runtime, unused, asyncio.Event())
    info = asyncio.run(servicer.GetModelInfo(unused, unused))
    assert json.loads(info.default_sampling_params_json) == {"min_p": 0.25, "repetition_penalty": 1.5}
