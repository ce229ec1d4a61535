"""Our KV events against vLLM's own classes: the golden bytes are what it makes, and both sound alike on sockets."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from kvsidecar.events import event_publisher, vllm_events

from tests.kvsidecar.events.golden import BATCHES, FILE, TS, events, made_by_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # torch.jit, in vLLM


def test_the_golden_bytes_are_what_vllm_makes() -> None:
    assert made_by_vllm() == json.loads(FILE.read_text())


def frames_of(endpoint: str, replay: str, publish: Any) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """What a subscriber hears, and what it is sent when it asks for all."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber, context.socket(zmq.DEALER) as asking:
        subscriber.subscribe(b"kv@")
        subscriber.rcvtimeo = asking.rcvtimeo = 10_000
        subscriber.connect(endpoint)
        time.sleep(0.5)  # neither publisher says who has subscribed
        publish()
        heard = [subscriber.recv_multipart() for _ in BATCHES]
        asking.connect(replay)
        asking.send_multipart([b"", (1).to_bytes(8, "big")])
        return heard, [asking.recv_multipart() for _ in BATCHES]


def test_a_subscriber_cannot_tell_us_from_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import kv_events

    theirs_at = f"ipc://{tmp_path}/theirs", f"ipc://{tmp_path}/theirs-replay"
    ours_at = f"ipc://{tmp_path}/ours", f"ipc://{tmp_path}/ours-replay"
    monkeypatch.setattr(event_publisher.time, "time", lambda: TS)
    theirs = kv_events.ZmqEventPublisher(0, *theirs_at, topic="kv@a@m")
    ours = event_publisher.EventPublisher(event_publisher.PublisherEndpoints(*ours_at, topic="kv@a@m"), lambda: None)
    try:
        expected = frames_of(
            *theirs_at, lambda: [theirs.publish(kv_events.KVEventBatch(TS, events(kv_events, n))) for n in BATCHES]
        )
        assert frames_of(*ours_at, lambda: [ours.publish(events(vllm_events, name)) for name in BATCHES]) == expected
    finally:
        theirs.shutdown()
        ours.close()
