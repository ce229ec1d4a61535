"""Program that runs vLLM in one process.

``options`` are ``engine`` (vLLM's EngineArgs) and ``transfer`` (the connector's settings, or null). The serving thread
steps the scheduler, as vLLM's own busy loop does; it takes new requests between steps. The program answers sooner than
``vllm serve``, because it needs neither HTTP nor a second process.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.systems import wire

_IDLE_SECONDS = 0.001


def build(engine: dict[str, Any], transfer: dict[str, Any] | None) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    given = None if transfer is None else KVTransferConfig(**transfer)
    # vLLM reports cached tokens only with statistics.
    arguments = EngineArgs(skip_tokenizer_init=True, disable_log_stats=False, kv_transfer_config=given, **engine)
    return LLMEngine.from_engine_args(arguments)


class ServingLoop:
    """Steps the engine, with requests that a reader thread receives."""

    def __init__(self, link: socket.socket, engine: Any) -> None:
        self._link, self._engine = link, engine
        self._core = engine.engine_core.engine_core
        self._came: queue.SimpleQueue[tuple[float, dict[str, Any]] | None] = queue.SimpleQueue()
        self._running: dict[str, dict[str, Any]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with self._link.makefile("rb") as asked:
            for text in asked:
                self._came.put((time.perf_counter(), json.loads(text)))
        self._came.put(None)

    def run(self) -> None:
        """Serve until the parent closes the connection."""
        while True:
            # The loop also steps without requests, because the scheduler must process finished stores.
            busy, missing = self._core.scheduler.has_requests(), 0
            while True:
                try:
                    item = self._came.get(block=not busy or missing > 0)
                except queue.Empty:
                    break
                if item is None:
                    return
                # Wait for all requests of a batch, so that every engine has the same batches. Otherwise the throughput
                # would depend on the order of arrival.
                missing = (missing or item[1].get("together", 1)) - 1
                self._take(*item)
                busy = True
            if not self._step():
                time.sleep(_IDLE_SECONDS)

    def _take(self, began: float, request: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        name = str(request["id"])
        try:
            if "do" in request:
                done = self._do(request["do"])
                self._tell(name, {"done": done})
                return
            prompt: dict[str, Any] = {"prompt_token_ids": request["tokens"]}
            if request["salt"]:
                prompt["cache_salt"] = request["salt"]
            greedy = SamplingParams(
                temperature=0,
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self._running[name] = {"began": began, "ids": []}
            self._engine.add_request(name, prompt, greedy)
        except Exception as error:
            self._running.pop(name, None)
            self._tell(name, {"error": f"{type(error).__name__}: {error}"})

    def _do(self, what: str) -> Any:
        if what == "reset":  # empties vLLM's own cache, but not the connector's
            return bool(self._engine.reset_prefix_cache())
        raise ValueError(f"{what!r} is not known; known is reset")

    def _step(self) -> int:
        outputs = self._engine.step()
        now = time.perf_counter()
        for out in outputs:
            name, made = out.request_id.split("-")[0], out.outputs[0]
            of = self._running[name]
            of["ids"] += made.token_ids
            of.setdefault("first", now)
            if not out.finished:
                continue
            del self._running[name]
            if made.finish_reason != "length":
                self._tell(name, {"error": f"it ended for {made.finish_reason}"})
                continue
            times = {"ttft_ms": (of["first"] - of["began"]) * 1e3, "total_ms": (now - of["began"]) * 1e3}
            self._tell(name, {"ids": of["ids"], "cached": out.num_cached_tokens or 0, **times})
        return len(outputs)

    def _tell(self, name: str, found: dict[str, Any]) -> None:
        self._link.sendall(wire.line({"id": int(name), **found}))


def main() -> None:
    link, options = wire.connect()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = build(options["engine"], options["transfer"])
    import torch
    import vllm

    about = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "block_tokens": engine.vllm_config.cache_config.block_size,
        "preloaded": [Path(p).name for p in os.environ.get("LD_PRELOAD", "").split(os.pathsep) if p],
    }
    link.sendall(wire.line({"ready": about}))
    ServingLoop(link, engine).run()
    os._exit(0)  # without waiting for vLLM's threads, which may never end


if __name__ == "__main__":
    main()
