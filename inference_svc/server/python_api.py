"""Python API: an in-process engine, ``Engine.from_pretrained(...)``.

It has the same engine and daemon as a worker, but the client calls it without gRPC.
"""

from __future__ import annotations

import queue
import shutil
import subprocess
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import grpc
import structlog
from kvsidecar.cache.v1.cache_pb2 import StatsRequest
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.cli.service_settings import configure_logging
from kvsidecar.errors import ConfigurationError, KVSidecarError, ModelUnsupported, Overloaded, from_rpc
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.process.interpreter import python_command
from kvsidecar.requests import Options, Prompt, add_calls, to_prompt, to_request

from inference_svc.context_reuse.question import BUILT_IN, Question, read_questions
from inference_svc.context_reuse.reuse_lab import ReuseLab
from inference_svc.context_reuse.verifier import Report, Thresholds, Verifier, candidates, longest_prompt
from inference_svc.kv_client.verdict_store import store_verdict
from inference_svc.models.loader import quiet_transformers
from inference_svc.request.prompt_provenance import prompt_parts
from inference_svc.request.prompt_tokenizer import PromptTokenizer
from inference_svc.request.response_fields import generated_logprobs, prompt_logprobs, set_stop_reason
from inference_svc.sequence.sequence import FinishReason, SequenceOutput
from inference_svc.sequence.sequence import Sequence as EngineSequence
from inference_svc.server.daemon_address import daemon_address
from inference_svc.server.runtime import Runtime, build_runtime
from inference_svc.server.worker_config import WorkerConfig
from inference_svc.server.worker_model import why_not_movable
from inference_svc.tool_calls.call_response import FINISH, read_calls
from inference_svc.tool_calls.tool_call_parser import ToolCallParser

_DAEMON_START_SECONDS = 30.0
# Interval between attempts to submit to a full queue.
_FULL_SECONDS = 0.01

log = structlog.get_logger()


@dataclass(frozen=True)
class Result:
    """A generated answer. Times are in milliseconds from the call."""

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int
    ttft_ms: float
    total_ms: float
    tokens_per_sec: float
    timings: dict[str, float]
    tool_calls: list[pb.ToolCall] = field(default_factory=list)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list, repr=False)
    prompt_parts: list[pb.PromptPart] = field(default_factory=list, repr=False)
    prompt_logprobs: list[pb.TokenLogprob] = field(default_factory=list, repr=False)
    stopped_by: str | int | None = None

    @property
    def kv_reuse_ratio(self) -> float:
        """Share of prompt tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens


@dataclass(frozen=True)
class Chunk:
    """A part of a streamed answer; ``result`` is set in the last one."""

    text: str
    token_ids: list[int]
    tool_calls: list[pb.ToolCallDelta] = field(default_factory=list)
    result: Result | None = None


class Engine:
    """A model with its cache. Close it, or use it as a context manager."""

    def __init__(self, runtime: Runtime, daemon: subprocess.Popen[bytes] | None, folder: Path | None) -> None:
        self._runtime = runtime
        self._end = weakref.finalize(self, _end_daemon, daemon, folder)  # also at the end of a program without close()
        self._requests = runtime.request_builder()

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        cache: str | Path | None = "embedded",
        store: str | Path | None = None,
        storage_bits: int = 16,
        arena_bytes: str = "512MiB",
        **settings: Any,
    ) -> Engine:
        """Load a model and start its engine.

        ``cache`` is "embedded" (a private daemon that ends with this engine), the socket of a running daemon, or None.
        With ``cache_address``, the daemon there replaces an embedded one. ``store`` is the folder of an embedded
        daemon's durable store. Further settings are those of the worker (``device``, ``dtype``, ``pool_bytes``, ...),
        except that the disk overflow is off by default: prompts beyond the pool are refused without ``overflow_bytes``.
        Raises ModelUnsupported, ConfigurationError.
        """
        quiet_transformers()
        if not structlog.is_configured():
            configure_logging("warning")
        embedded = cache == "embedded" and not settings.get("cache_address")
        if store is not None and not embedded:
            raise ConfigurationError(f"store is {store}, and only an embedded daemon has one; leave store out")
        daemon, folder, socket = None, None, Path(cache) if cache not in (None, "embedded") else None
        try:
            if embedded:
                folder = Path(tempfile.mkdtemp(prefix="kvsidecar-"))
                socket = folder / "cache.sock"
                daemon = _start_daemon(socket, store, arena_bytes)
            config = WorkerConfig(
                model=model,
                cache_socket=socket,
                storage_bits=storage_bits,  # type: ignore[arg-type]
                name="in-process",
                **{"overflow_bytes": 0} | settings,
            )
            return cls(build_runtime(config), daemon, folder)
        except BaseException:
            _end_daemon(daemon, folder)
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish queued saves, then end the engine and an embedded daemon."""
        self._runtime.close()
        self._end()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """Generate one answer. ``prompt`` is text, token ids or chat messages; options are ``kvsidecar.Client``'s."""
        return self.generate_many([(prompt, options)])[0]

    def generate_batch(self, prompts: Iterable[Prompt], **options: Unpack[Options]) -> list[Result]:
        """Generate answers for any number of prompts with the same options, batched. One error ends all requests."""
        return self.generate_many([(p, options) for p in prompts])

    def generate_many(self, requests: Sequence[tuple[Prompt, Mapping[str, Any]]]) -> list[Result]:
        """Generate answers for any number of ``(prompt, options)``, batched, and return them in this order.

        An error ends all requests; the first error is raised.
        """
        results, running = list[Result](), deque[_Call]()
        try:
            for prompt, options in requests:
                call = self._build(prompt, options)
                while not self._try_submit(call):  # the queue is full until a request of this or another thread ends
                    if running:
                        results.append(_result(running[0]))
                        running.popleft()
                    else:
                        time.sleep(_FULL_SECONDS)
                running.append(call)
            while running:
                results.append(_result(running[0]))
                running.popleft()
        except BaseException:
            for call in running:
                self._runtime.engine.cancel(call.sequence)
            raise
        return results

    def _try_submit(self, call: _Call) -> bool:
        """Submit a request; False if the queue is full."""
        try:
            self._runtime.engine.submit(call.sequence)
        except Overloaded:
            return False
        return True

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Generator[Chunk, None, None]:
        """Stream one answer. Closing the iterator cancels the request."""
        call = self._submit(prompt, options)
        ended = False
        try:
            for chunk in _chunks(call):
                ended = chunk.result is not None
                yield chunk
        finally:
            if not ended:
                self._runtime.engine.cancel(call.sequence)

    def warm(self, prompt: Prompt, model: str = "") -> int:
        """Prefill a prompt into the cache, for the adapter ``model`` if given. Returns the number of stored tokens."""
        tokens, marks = self._requests.tokenizer.checked_tokens(to_prompt(prompt), generation_prompt=False)
        call = self._submit(tokens, {"max_tokens": 1, "segment_ends": marks.segment_ends, "model": model})
        _result(call)
        while True:
            output = call.outputs.get()
            if output.error is not None:
                raise output.error
            if output.stored_tokens is not None:
                return output.stored_tokens

    def verify_correctness(
        self,
        prompts: Sequence[Question] | None = None,
        *,
        repair: str | None = None,
        ratio: float | None = None,
        thresholds: Thresholds | None = None,
        store: bool = True,
    ) -> Report:
        """Verify approximate reuse: measure how answers change when documents were cached in another order.

        It verifies the selector ``repair``, by default the engine's setting; for ``auto`` it chooses the cheapest
        selector that passes. With ``store``, the daemon stores the verdict with the namespace, and workers of the
        namespace use approximate reuse only if it passed; a verdict that cannot be stored is logged. No other request
        may run during the verification. Raises InvalidRequest, ModelUnsupported.
        """
        engine, config = self._runtime.engine, self._runtime.config
        if engine.loaded.shard is not None:
            raise ModelUnsupported(f"approximate reuse cannot be verified: {why_not_movable(engine.loaded)}")
        questions = prompts or read_questions(BUILT_IN)
        lab = ReuseLab(engine.loaded, longest_prompt(engine.loaded, questions), engine.decoder)
        verifier = Verifier(lab, config.storage_bits, thresholds)
        tried = candidates(repair or config.repair, config.repair_ratio if ratio is None else ratio)
        report = verifier.run(questions, tried)
        daemon = daemon_address(config)
        if store and daemon is not None:
            try:
                store_verdict(daemon, engine.loaded.descriptor(config.storage_bits), report.verdict())
            except KVSidecarError as error:  # the report is worth more than its storage
                log.warning("the verdict is not stored", error=str(error))
        return report

    def cache_stats(self) -> dict[str, Any]:
        """Return the counters of this engine and, as ``daemon``, of its cache daemon."""
        engine, cache = self._runtime.engine, self._runtime.cache
        found: dict[str, Any] = dict(vars(engine.stats))
        found["speculation"] = dict(vars(engine.speculator.stats))
        found["kv_reuse_ratio"] = engine.stats.cached_tokens / max(1, engine.stats.cacheable_tokens)
        if cache is not None:
            found |= {"attached": cache.attached, "cache_failures": cache.stats.failures}
            found["daemon"] = self._daemon_stats()
        return found

    def _daemon_stats(self) -> dict[str, Any]:
        address = daemon_address(self._runtime.config)
        assert address is not None, "there is a connector"
        with address.channel() as channel:
            try:
                stats = CacheServiceStub(channel).Stats(StatsRequest(), timeout=5)
            except grpc.RpcError as error:
                return {"error": str(from_rpc(error))}
        return {f.name: getattr(stats, f.name) for f in stats.DESCRIPTOR.fields}

    def _submit(self, prompt: Prompt, options: Mapping[str, Any]) -> _Call:
        call = self._build(prompt, options)
        self._runtime.engine.submit(call.sequence)
        return call

    def _build(self, prompt: Prompt, options: Mapping[str, Any]) -> _Call:
        began = time.perf_counter()
        outputs: queue.SimpleQueue[SequenceOutput] = queue.SimpleQueue()
        request = to_request(prompt, **options)
        sequence = self._requests.build(request, outputs.put, began)
        sequence.timings.tokenize_ms = (time.perf_counter() - began) * 1e3
        return _Call(sequence, outputs, self._requests.call_parser(request), self._requests.tokenizer)


@dataclass(frozen=True)
class _Call:
    sequence: EngineSequence
    outputs: queue.SimpleQueue[SequenceOutput]
    parser: ToolCallParser | None
    tokenizer: PromptTokenizer


def _result(call: _Call) -> Result:
    """Wait for the complete answer. Raises the request's error."""
    (found,) = (chunk.result for chunk in _chunks(call) if chunk.result is not None)
    return found


def _chunks(call: _Call) -> Iterator[Chunk]:
    """Yield parts of the answer as they arrive. Raises the request's error."""
    s = call.sequence
    text, calls, logprobs, finish = list[str](), list[pb.ToolCall](), list[pb.TokenLogprob](), None
    while finish is None:
        output = call.outputs.get()
        if output.error is not None:
            raise output.error
        finish = output.finish
        part = pb.GenerateStreamResponse(text=output.text)
        if output.token is not None:
            part.token_ids.append(output.token.token)
            logprobs += generated_logprobs(output, call.tokenizer.text_and_bytes)
        if finish is not None:
            part.finish_reason = FINISH[finish]
            set_stop_reason(s, finish, part)
        for one in [part] if call.parser is None else read_calls(call.parser, part):
            add_calls(calls, one.tool_calls)
            text.append(one.text)
            result = _ended(call, one, "".join(text), calls, logprobs, finish) if finish and one.finish_reason else None
            yield Chunk(one.text, list(one.token_ids), list(one.tool_calls), result)


def _ended(
    call: _Call,
    last: pb.GenerateStreamResponse,
    text: str,
    calls: list[pb.ToolCall],
    logprobs: list[pb.TokenLogprob],
    finish: FinishReason,
) -> Result:
    s, ended_by = call.sequence, last.WhichOneof("stopped_by")
    called = last.finish_reason == pb.FINISH_REASON_TOOL_CALLS
    total_ms = s.timings.ttft_ms + s.timings.decode_ms  # excludes the time until the caller reads the result
    return Result(
        text=text,
        token_ids=s.tokens[s.request.num_prompt_tokens :],
        finish_reason="tool_calls" if called else finish.value,
        prompt_tokens=s.request.num_prompt_tokens,
        cached_tokens=s.usage.num_cached,
        draft_tokens=s.speculation.num_draft_tokens,
        accepted_tokens=s.speculation.num_accepted_tokens,
        ttft_ms=s.timings.ttft_ms,
        total_ms=total_ms,
        tokens_per_sec=s.num_generated / (total_ms / 1e3),
        timings=dict(vars(s.timings)),
        tool_calls=calls,
        logprobs=logprobs,
        prompt_parts=prompt_parts(s, call.tokenizer.text) if s.usage.provenance else [],
        prompt_logprobs=prompt_logprobs(s, call.tokenizer.text_and_bytes),
        stopped_by=None if ended_by is None else getattr(last, ended_by),
    )


def _start_daemon(socket: Path, store: str | Path | None, arena_bytes: str) -> subprocess.Popen[bytes]:
    command = python_command("-m", "cache_daemon", "--socket", str(socket), "--arena-bytes", arena_bytes)
    command += ["--store", str(store or "none"), "--log-level", "warning", "--end-with-stdin"]
    daemon = subprocess.Popen(command, stdin=subprocess.PIPE)  # which ends also if this program is killed
    deadline = time.monotonic() + _DAEMON_START_SECONDS
    try:
        while not socket.exists():
            if daemon.poll() is not None:
                raise ConfigurationError("the embedded cache daemon could not start; its message is above")
            if time.monotonic() > deadline:
                seconds = f"{_DAEMON_START_SECONDS:.0f} s"
                raise ConfigurationError(f"the embedded cache daemon did not start within {seconds}")
            time.sleep(0.01)
    except BaseException:
        daemon.kill()
        raise
    return daemon


def _end_daemon(daemon: subprocess.Popen[bytes] | None, folder: Path | None) -> None:
    if daemon is not None:
        daemon.terminate()
        try:
            daemon.wait(timeout=10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        if daemon.stdin is not None:
            daemon.stdin.close()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
