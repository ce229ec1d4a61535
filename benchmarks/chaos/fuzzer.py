"""Fuzzer of the daemon's gRPC calls, with several threads.

``python -m benchmarks.chaos.fuzzer --socket PATH --seconds 60`` prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.process.runtime_dir import socket_target

from benchmarks.chaos.malformed_messages import KnownValues, MessageGenerator

SERVICE = pb.DESCRIPTOR.services_by_name["CacheService"]
# Statuses that gRPC creates in this process. All other statuses come from the daemon.
_NOT_THE_DAEMONS = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
_NEVER = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
_STREAMS_IN, _STREAMS_OUT = ("Attach", "Store"), ("Attach", "Fetch", "Watch")
_WEIGHTS = {"Match": 6, "Reserve": 5, "Commit": 4, "Attach": 3, "Store": 3, "Delete": 0.3}


class Fuzzer:
    """One fuzzing thread.

    ``statuses`` counts the answers by method and status. ``wrong`` lists the answers that must never occur.
    """

    def __init__(self, socket: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.known = KnownValues(self.rng)
        self.messages = MessageGenerator(self.rng, self.known)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20)]
        self.channel = grpc.insecure_channel(socket_target(socket), options=options)
        self.statuses: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.requests = 0
        self._attached: list[Any] = []
        self._methods = list(SERVICE.methods)
        self._weights = [_WEIGHTS.get(m.name, 1) for m in self._methods]

    def run(self, until: Callable[[], bool]) -> None:
        """Send requests until ``until`` returns True, then release all resources."""
        while not until():
            method = self.rng.choices(self._methods, self._weights)[0]
            self.requests += 1
            try:
                self._call(method)
                self.statuses[f"{method.name} OK"] += 1
            except grpc.RpcError as error:
                self._note(method.name, error)
        for stream in self._attached:
            stream.cancel()
        self.channel.close()

    # ---- one request ----------------------------------------------------------------------------------------

    def _call(self, method: Any) -> None:
        rng = self.rng
        path = f"/{SERVICE.full_name}/{method.name if rng.random() > 0.002 else 'Nothing'}"
        timeout = rng.choice((5.0, 5.0, 5.0, 0.001, 0.02))
        streams_in, streams_out = method.name in _STREAMS_IN, method.name in _STREAMS_OUT
        if method.name == "Attach":
            self._attach(path)
        elif streams_in:
            sent = self.messages.store() if rng.random() < 0.6 else [self._request(method) for _ in range(3)]
            rng.shuffle(sent) if rng.random() < 0.1 else None
            self._read(method, [self.channel.stream_unary(path)(self._slowly(sent), timeout=timeout)])
        elif streams_out:
            call = self.channel.unary_stream(path)(self._request(method), timeout=min(timeout, 0.1))
            self._read(method, self._some(call))
        elif rng.random() < 0.1:
            future = self.channel.unary_unary(path).future(self._request(method), timeout=timeout)
            time.sleep(rng.choice((0, 0, 0.001)))
            future.cancel()
        else:
            self._read(method, [self.channel.unary_unary(path)(self._request(method), timeout=timeout)])

    def _attach(self, path: str) -> None:
        """Open a session with a valid or a random request; keep some sessions open for a while."""
        rng, kind = self.rng, SERVICE.methods_by_name["Attach"]
        if len(self._attached) > 6:
            self._attached.pop(rng.randrange(len(self._attached))).cancel()
        first = self.messages.hello().SerializeToString() if rng.random() < 0.6 else self._request(kind)
        beats = [pb.AttachRequest(heartbeat=pb.Heartbeat()).SerializeToString()] * rng.randint(0, 3)
        if rng.random() < 0.2:
            beats.append(self._request(kind))
        hold = rng.random() < 0.5
        stop = threading.Event()

        def sent() -> Iterator[bytes]:
            yield first
            yield from beats
            if hold:  # the stream stays open without further messages
                stop.wait(rng.choice((0.2, 2.0)))

        call = self.channel.stream_stream(path)(sent(), timeout=10.0)
        call.add_callback(stop.set)
        self._attached.append(call)
        self._read(kind, [next(call)])

    def _request(self, method: Any) -> bytes:
        return self.messages.request(method.input_type)

    def _slowly(self, messages: Iterable[bytes]) -> Iterator[bytes]:
        for message in messages:
            yield message
            if self.rng.random() < 0.02:
                time.sleep(0.05)

    def _some(self, call: Any) -> Iterator[bytes]:
        """Read all messages of a stream, or the first ones and then cancel it."""
        most = self.rng.choice((1, 3, 1000))
        for n, answer in enumerate(call):
            yield answer
            if n >= most:
                call.cancel()
                return

    def _read(self, method: Any, answers: Iterable[bytes]) -> None:
        made = getattr(pb, method.output_type.name)
        for data in answers:
            try:
                self.known.learn(made.FromString(data))
            except DecodeError:
                self.wrong.append(f"{method.name}: an answer that cannot be decoded")

    def _note(self, name: str, error: Any) -> None:
        code = error.code()
        self.statuses[f"{name} {code.name}"] += 1
        text = f"{name} {code.name}: {error.details()!r}"
        if code in _NEVER or (code not in _NOT_THE_DAEMONS and not _is_classified(error)):
            self.wrong.append(text)


def _is_classified(error: Any) -> bool:
    """Return True if an error has the daemon's machine-readable reason, or if gRPC itself refused the call."""
    if error.code() in (grpc.StatusCode.UNIMPLEMENTED,) or "larger than max" in (error.details() or ""):
        return True
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status, info = status_pb2.Status.FromString(value), error_details_pb2.ErrorInfo()
            return any(detail.Unpack(info) and bool(info.reason) for detail in status.details)
    return False


def fuzz(socket: Path, seconds: float, threads: int, seed: int, requests: int = 0) -> dict[str, Any]:
    """Fuzz for ``seconds``; if ``requests`` is not 0, until the threads have sent that many requests."""
    began = time.monotonic()
    fuzzers = [Fuzzer(socket, seed + i) for i in range(threads)]

    def over() -> bool:
        sent = sum(f.requests for f in fuzzers)
        return sent >= requests if requests else time.monotonic() - began >= seconds

    running = [threading.Thread(target=f.run, args=(over,)) for f in fuzzers]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    statuses: Counter[str] = Counter()
    for f in fuzzers:
        statuses.update(f.statuses)
    wrong = Counter(text for f in fuzzers for text in f.wrong)
    return {
        "seed": seed,
        "requests": sum(f.requests for f in fuzzers),
        "statuses": dict(sorted(statuses.items())),
        "wrong": dict(wrong.most_common(20)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos.fuzzer", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=0, help="stop after this many requests instead")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(fuzz(options.socket, options.seconds, options.threads, options.seed, options.requests)))


if __name__ == "__main__":
    main()
