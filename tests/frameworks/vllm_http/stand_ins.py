"""Substitutes of the vLLM modules that vLLM's HTTP tests import."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import anthropic
import openai
from served_node import Server

MODELS = (
    "HuggingFaceH4/zephyr-7b-beta",
    "zephyr-lora",
    "facebook/opt-125m",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-8B",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "claude-3-7-sonnet-latest",
)
"""Model names in vLLM's tests. Our server serves one model under all of these names."""


class RemoteServer:
    """Substitute of ``RemoteOpenAIServer``: it starts no server and returns our server's URL."""

    server: Server
    started = 0

    def __init__(self, model: str, *flags: Any, **more: Any) -> None:
        type(self).started += 1
        self._model = model

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(self, *why: object) -> None:
        pass

    @property
    def url_root(self) -> str:
        return self.server.url

    def url_for(self, *parts: str) -> str:
        return f"{self.server.url}/{'/'.join(parts)}"

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.server.url, api_key="none", max_retries=0, **options)

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": f"{self.server.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 300, **options}


class _Missing(MetaPathFinder, Loader):
    """Import hook that creates a module for each name below ``vllm``. Any name in it is a class without effect."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "vllm" else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _placeholder  # type: ignore[method-assign]


def _placeholder(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Anything,), {})


class _Anything:
    """Class that accepts all arguments. Its methods, such as those that fetch adapters, return an empty text."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: ""


def install(server: Server) -> None:
    """Install the substitutes; ``server`` then answers the tests' requests."""
    RemoteServer.server = server
    utils = ModuleType("tests.utils")
    utils.RemoteOpenAIServer = RemoteServer  # type: ignore[attr-defined]
    sys.modules["tests.utils"] = utils
    sys.meta_path.append(_Missing())
    tokenizers: Any = import_module("vllm.tokenizers")
    config: Any = import_module("vllm.config")

    def get_tokenizer(*_: Any, **__: Any) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(server.tokenizer)

    class ModelConfig(_Anything):
        def get_vocab_size(self) -> int:
            return len(get_tokenizer())

    tokenizers.get_tokenizer = get_tokenizer
    config.ModelConfig = ModelConfig


def fixtures() -> list[ModuleType]:
    """Return the names of the modules with vLLM's fixtures."""
    names = ("tests.entrypoints.conftest", "tests.entrypoints.openai.responses.conftest")
    return [import_module(name) for name in names]
