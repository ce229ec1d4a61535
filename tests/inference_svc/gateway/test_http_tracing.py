"""A request's trace, from the HTTP client through gateway, worker and daemon to the disk, as a collector gets it."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from kvsidecar.errors import Cancelled, PromptTooLong, Unavailable

from benchmarks.node import Node, free_port
from tests.collector import Collector
from tests.inference_svc.gateway.conftest import Gateway, of_node

pytestmark = pytest.mark.alone
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
Kind = pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2").Span

PHASES = ("tokenize", "queue", "lookup", "restore", "prefill")
ROOT, MATCH = "POST /v1/completions", "kvsidecar.cache.v1.CacheService/Match"
SERVED, CALLED = (f"{kind} kvsidecar.inference.v1.InferenceService/GenerateStream" for kind in ("served", "called"))
CALLER = "ab" * 8  # the span that the HTTP client says it is in
SECRET = "the heron nests in the old willow"
PROMPT = SECRET + " and the clerk copies out the register of boats" * 250
TOLERANCE, TURNS = 0.05, 3


@dataclass(frozen=True)
class Traced:
    """A node and a gateway with tracing, and the collector that receives their spans."""

    node: Node
    gateway: Gateway
    collector: Collector
    spans: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)

    def ask(self, trace: str, timeout: float = 60, **options: Any) -> httpx.Response:
        """Ask a question as a part of a trace that the client began."""
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, **options}
        headers = {"traceparent": f"00-{trace}-{CALLER}-01"}
        return httpx.post(f"{self.gateway.url}/v1/completions", json=body, headers=headers, timeout=timeout)

    def trace(self, trace: str, *names: str) -> dict[str, Any]:
        """Wait until a trace has spans of these names; return its spans by name."""
        deadline = time.monotonic() + 20
        while True:
            for span in self.collector.sent():
                of_trace, name = self.spans.setdefault(span.trace_id.hex(), {}), named(span)
                of_trace[f"{name} again" if name in of_trace else name] = span
            found = self.spans.get(trace, {})
            if found.keys() >= set(names):
                return found
            assert time.monotonic() < deadline, (sorted(found), self.node.read_log())
            time.sleep(0.05)


def named(span: Any) -> str:
    """Its name; that of a call is the same at both ends."""
    at = {Kind.SPAN_KIND_CLIENT: "called ", Kind.SPAN_KIND_SERVER: "served "} if "Inference" in span.name else {}
    return at.get(span.kind, "") + str(span.name)


def milliseconds(span: Any) -> float:
    return float(span.end_time_unix_nano - span.start_time_unix_nano) / 1e6


def to_first_token(found: dict[str, Any]) -> float:
    """Milliseconds until the gateway had the first token."""
    (event,) = found[ROOT].events
    assert event.name == "first token"
    return float(event.time_unix_nano - found[ROOT].start_time_unix_nano) / 1e6


def before_first_token(found: dict[str, Any]) -> float:
    """Milliseconds that the spans say went by until then."""
    return sum(milliseconds(found[name]) for name in ("prepare", *PHASES) if name in found)


def adds_up(spans_ms: float, found: dict[str, Any]) -> bool:
    """Whether these milliseconds are the time to the first token, within five of a hundred.

    A machine that stops for a few milliseconds between two spans is asked again; a span that is missing never adds up.
    """
    return bool(spans_ms == pytest.approx(to_first_token(found), rel=TOLERANCE))


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    port = free_port()
    collector, endpoint = Collector(port), f"http://127.0.0.1:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
        with Node(
            "demo",
            workers=2,
            arena_bytes="64MiB",
            pool_bytes="64MiB",
            daemon_flags={"otlp_endpoint": endpoint},
            worker_flags={"otlp_endpoint": endpoint, "resident_sequences": 0},
        ) as node:
            gateway = of_node(node, "--otlp-endpoint", endpoint)
            yield Traced(node, gateway, collector)
            gateway.close()
    collector.close()


def test_the_spans_of_a_request_add_up_to_its_first_token(traced: Traced) -> None:
    warm = "2" * 32
    for turn in range(TURNS):
        cold, prompt = f"1{turn}" * 16, f"{turn} {PROMPT}"
        first = traced.ask(cold, prompt=prompt).json()
        found = traced.trace(cold, ROOT, SERVED, "decode")
        if adds_up(before_first_token(found), found):
            break
    else:
        pytest.fail(f"{before_first_token(found)} ms of {to_first_token(found)} have spans")
    assert "lookup" not in found, "nothing is stored yet, and the worker knows it"

    traced.node.settle()
    traced.node.restart_daemon()  # now the disk alone has it
    second = traced.ask(warm, prompt=prompt).json()
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000
    found = traced.trace(warm, ROOT, CALLED, SERVED, MATCH, "durable read", "decode", "prepare", *PHASES)
    parents = [found[inner].parent_span_id for inner in (ROOT, CALLED, SERVED, *PHASES, MATCH, "durable read")]
    outer = [found[name].span_id for name in (ROOT, CALLED, *[SERVED] * len(PHASES), "lookup", MATCH)]
    assert parents == [bytes.fromhex(CALLER), *outer]
    # What the worker calls its time to the first token begins when it has the request.
    worker_ms = sum(milliseconds(found[name]) for name in PHASES)
    assert worker_ms == pytest.approx(second["timings"]["ttft_ms"], rel=TOLERANCE)
    told = attributes(found[SERVED])
    assert told["gen_ai.usage.cache_read.input_tokens"] == second["usage"]["prompt_tokens_details"]["cached_tokens"]
    first_ms = told["gen_ai.latency.time_to_first_token"] * 1e3
    assert first_ms == pytest.approx(second["timings"]["ttft_ms"], abs=0.01)
    assert not [span for span in found.values() if SECRET[:9] in str(span)]


def test_those_of_a_stream_do_too(traced: Traced) -> None:
    for turn in range(TURNS):
        asked = f"6{turn}" * 16
        answer = traced.ask(asked, prompt=f"Another one, {turn}. {PROMPT}", stream=True)
        assert answer.text.endswith("data: [DONE]\n\n")
        found = traced.trace(asked, ROOT, SERVED, "prepare", "prefill", "decode")
        if adds_up(before_first_token(found), found):
            return
    pytest.fail(f"{before_first_token(found)} ms of {to_first_token(found)} have spans")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/invocations"])
def test_a_chat_is_one_trace_at_each_of_its_paths(traced: Traced, path: str) -> None:
    trace, body = uuid.uuid4().hex, {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}
    headers = {"traceparent": f"00-{trace}-{CALLER}-01"}
    answer = httpx.post(f"{traced.gateway.url}{path}", json=body | {"max_tokens": 2}, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    found = traced.trace(trace, f"POST {path}", CALLED, SERVED)
    assert found[CALLED].parent_span_id == found[f"POST {path}"].span_id
    assert found[f"POST {path}"].parent_span_id.hex() == CALLER


def test_a_refused_request_is_an_error_by_its_name(traced: Traced) -> None:
    assert traced.ask("3" * 32, prompt=[7] * 5000).status_code == 400
    found = traced.trace("3" * 32, ROOT, SERVED, CALLED)
    assert attributes(found[ROOT])["http.response.status_code"] == 400
    assert {attributes(found[name])["error.type"] for name in (SERVED, CALLED)} == {PromptTooLong.reason}


def test_a_client_that_leaves_ends_its_spans(traced: Traced) -> None:
    with pytest.raises(httpx.ReadTimeout):
        traced.ask("4" * 32, timeout=1, prompt="On and on", max_tokens=3000, ignore_eos=True, n=8)
    found = traced.trace("4" * 32, ROOT, SERVED, CALLED)
    assert {attributes(found[name])["error.type"] for name in (SERVED, CALLED)} == {Cancelled.reason}


def test_a_python_client_names_its_active_span(traced: Traced) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    with TracerProvider(shutdown_on_exit=False).get_tracer("t").start_as_current_span("program") as span:
        list(traced.node.client().stream("Hello", max_tokens=2))
        of = span.get_span_context()
    found = traced.trace(f"{of.trace_id:032x}", SERVED, "tokenize", "prefill", "decode")
    assert found[SERVED].parent_span_id.hex() == f"{of.span_id:016x}"


def test_a_model_servers_metrics_have_opentelemetrys_names(traced: Traced) -> None:
    traced.ask("5" * 32)
    deadline, found = time.monotonic() + 20, {}
    while "gen_ai.server.time_to_first_token" not in found:
        request = traced.collector.metrics.get(timeout=max(0.1, deadline - time.monotonic()))
        found |= {m.name: m for r in request.resource_metrics for scope in r.scope_metrics for m in scope.metrics}
    names = ("request.duration", "time_to_first_token", "time_per_output_token")
    for name in names:
        metric = found[f"gen_ai.server.{name}"]
        assert metric.unit == "s"
        points = [attributes(point) for point in metric.histogram.data_points]
        expected = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "kvsidecar",
            "gen_ai.response.model": "demo",
        }
        assert expected in points


def test_what_a_worker_took_that_went_away_is_part_of_the_sum(traced: Traced) -> None:
    """The last test here: a worker less is left."""
    asked, node = "7" * 32, traced.node
    before = [node.client(i).stats().prompt_tokens for i in range(2)]
    traced.ask("8" * 32)
    (owner,) = (i for i in range(2) if node.client(i).stats().prompt_tokens > before[i])
    node.kill(f"worker-{owner}", signal.SIGSTOP)  # it has read the prompt, so it is asked first, and says nothing
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(traced.ask, asked, stream=True)
        while not httpx.get(f"{traced.gateway.url}/kvsidecar/v1/serving").json()["busy"]:
            time.sleep(0.01)
        time.sleep(1.0)  # much more than goes by between two spans
        node.kill(f"worker-{owner}")
        assert answer.result().status_code == 200
    found = traced.trace(asked, ROOT, CALLED, f"{CALLED} again", SERVED, "prepare", "prefill")
    failed, again = found[CALLED], found[f"{CALLED} again"]
    assert attributes(failed)["error.type"] == Unavailable.reason
    assert found[SERVED].parent_span_id == again.span_id
    assert milliseconds(failed) > 1000
    spent = before_first_token(found) + milliseconds(failed)
    assert adds_up(spent, found), (spent, to_first_token(found))
