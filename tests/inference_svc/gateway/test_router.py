"""Which worker a request goes to."""

from __future__ import annotations

import pytest
from kvsidecar.errors import Unavailable
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.gateway.router import Router


def asking(model: str, text: str = "Whose turn is it?") -> pb.GenerateRequest:
    return pb.GenerateRequest(model=model, prompt=pb.Prompt(text=text))


async def test_a_request_goes_to_who_serves_its_model() -> None:
    """Also where another model's worker has read the prompt, or has less to do."""
    router = Router(["127.0.0.1:1", "127.0.0.1:2"])
    try:
        for worker, name in zip(router.workers, ("small", "large"), strict=True):
            worker.alive, worker.model = True, pb.GetModelResponse(model_id=name)
        small, large = router.workers
        assert router.pick(asking("small"), set()) is small
        assert router.pick(asking("large"), set()) is large
        large.in_flight = 50
        assert router.pick(asking("large"), set()) is large
        assert router.pick(asking(""), set()) is small
        with pytest.raises(Unavailable):
            router.pick(asking("large"), {large.target})
    finally:
        await router.close()
