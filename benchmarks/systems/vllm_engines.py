"""vLLM engines, tuned to the machine: with compiler, preloaded libraries and prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvsidecar.integrations.vllm.vllm_install import CONNECTOR, MODULE

from benchmarks.systems.engine import Engine
from benchmarks.systems.environments import Environment, find, preloads

_SETTINGS = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}


def environment() -> Environment:
    """Return vLLM's environment. Raises EngineNotInstalled."""
    found = find("vllm")
    return replace(found, preloaded=preloads(found.python), settings=_SETTINGS)


@dataclass(frozen=True)
class EngineSettings:
    """Settings that all vLLM engines of a benchmark have in common.

    ``context`` is the maximum number of tokens in a prompt with its answer. ``kv_bytes`` is the size of vLLM's own KV
    cache. ``eager`` disables vLLM's compiler.
    """

    environment: Environment
    folder: Path
    model: Path
    dtype: str
    context: int
    kv_bytes: int
    sequences: int = 8
    eager: bool = False

    def plain(self, *, prefix_caching: bool = True, **more: Any) -> Engine:
        """Create vLLM without a connector."""
        return self._engine(None, enable_prefix_caching=prefix_caching, **more)

    def connected(self, socket: Path, **more: Any) -> Engine:
        """Create vLLM with our connector, which uses the daemon at ``socket``."""
        extra = {"socket": str(socket)}
        return self._engine(_transfer(CONNECTOR, extra, kv_connector_module_path=MODULE), **more)

    def example(self, storage: Path) -> Engine:
        """Create vLLM with its example connector, which stores files in a folder.

        This connector supports only prompts that vLLM computes in one step. It stores only the last part of any other
        prompt.
        """
        transfer = _transfer("ExampleConnector", {"shared_storage_path": str(storage)})
        return self._engine(transfer, max_num_batched_tokens=self.context)

    def _engine(self, transfer: dict[str, Any] | None, **more: Any) -> Engine:
        arguments = {
            "model": str(self.model),
            "dtype": self.dtype,
            "max_model_len": self.context,
            "max_num_seqs": self.sequences,
            "kv_cache_memory_bytes": self.kv_bytes,
            "enforce_eager": self.eager,
            **more,
        }
        return Engine(self.environment, "vllm", self.folder, {"engine": arguments, "transfer": transfer})


def _transfer(connector: str, extra: dict[str, Any], **more: str) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra, **more}
