"""vLLM engine in a child process, which a test controls through a pipe.

The child is a fork of a process that has imported vLLM, because this import takes longer than the start of an engine.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Answer = dict[str, Any]


class Engine:
    """vLLM with a model. ``socket`` is the daemon's; without one, vLLM has no connector.

    ``extra`` are settings of the connector, and ``options`` are settings of vLLM.
    """

    def __init__(
        self, model: Path, log: Path, socket: Path | None, extra: dict[str, Any] | None = None, **options: Any
    ) -> None:
        transfer = None
        if socket is not None:
            transfer = {
                "kv_connector": "KVSidecarConnector",
                "kv_connector_module_path": "kvsidecar.integrations.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"socket": str(socket), **(extra or {})},
            }
        self.log = log
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["vllm.entrypoints.llm", __name__])
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, str(log), str(model), transfer, options))
        self.process.start()
        other.close()
        assert self._receive() == "ready"

    def ask(self, prompts: list[list[int]], tokens: int = 8, salt: str = "") -> list[Answer]:
        """Ask all prompts concurrently; return the greedy answers."""
        self._pipe.send(("generate", prompts, tokens, salt))
        found: list[Answer] = self._receive()
        assert all(one["why"] == "length" for one in found), "a request failed"
        return found

    def break_loads(self) -> None:
        """Let every later load fail in the middle, when its blocks are half filled."""
        self._pipe.send(("break_loads",))
        assert self._receive() == "broken"

    def kill(self) -> None:
        self.process.kill()
        self.process.join(30)

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise AssertionError(f"the engine ended:\n{self.log.read_text()[-3000:]}") from None


def _serve(pipe: Connection, log: str, model: str, transfer: dict[str, Any] | None, options: dict[str, Any]) -> None:
    told = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(told, 1)
    os.dup2(told, 2)
    try:
        llm = _engine(model, transfer, options)
        pipe.send("ready")
        while True:
            what, *given = pipe.recv()
            pipe.send(_generate(llm, *given) if what == "generate" else _break_loads())
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _engine(model: str, transfer: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model,
        dtype="float32",  # a seed with which no two tokens are equally likely
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        block_size=32,
        disable_log_stats=False,
        kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
        **options,
    )


def _generate(llm: Any, prompts: list[list[int]], tokens: int, salt: str) -> list[Answer]:
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": ids, **({"cache_salt": salt} if salt else {})} for ids in prompts]
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return [
        {"ids": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens or 0, "why": o.outputs[0].finish_reason}
        for o in llm.generate(asked, greedy, use_tqdm=False)
    ]


def _break_loads() -> str:
    from kvsidecar.kv_transfer.chunk_reader import ChunkReader, LoadedPrefix

    whole = ChunkReader.load

    def half(
        self: ChunkReader, session: Any, tokens: list[int], salt: bytes, slots: Any, first: int, **how: Any
    ) -> LoadedPrefix:
        middle = max(first, len(tokens) // 2)
        whole(self, session, tokens[:middle], salt, slots[:middle], first, **how)
        raise ConnectionError("planted: the session ended while chunks were copied")

    ChunkReader.load = half  # type: ignore[method-assign]
    return "broken"
