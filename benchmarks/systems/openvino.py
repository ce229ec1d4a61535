"""Program that runs OpenVINO GenAI's continuous batching with its prefix cache.

``options`` are ``model`` (a folder that ``optimum-cli export openvino`` wrote), ``dtype``, ``threads``, ``tokens`` (the
size of the KV cache) and ``sequences``. The cache does not outlive the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.systems import wire
from benchmarks.systems.common_prefix import common_prefix

_BLOCK = 32  # tokens of a KV block on CPUs
_BATCH_TOKENS = 2048  # a document of 4,096 tokens takes 4 % less time than with the default of 256


class OpenVino:
    """A pipeline. It reuses whole blocks of any prompt that it has read."""

    def __init__(self, model: str, dtype: str, threads: int, tokens: int, sequences: int) -> None:
        settings = openvino_genai.SchedulerConfig()
        settings.num_kv_blocks = -(-tokens // _BLOCK)
        settings.max_num_batched_tokens, settings.max_num_seqs = _BATCH_TOKENS, sequences
        settings.enable_prefix_caching = True
        precision = {"bfloat16": "bf16", "float32": "f32"}[dtype]
        properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(model, settings, "CPU", properties)
        self._there, self._asked = list[list[int]](), 0
        self.cached = 0

    def tokens(self, prompt: list[int], max_tokens: int) -> Iterator[int]:
        for step in self.batch([prompt], max_tokens):
            yield step[0]

    def batch(self, prompts: list[list[int]], max_tokens: int) -> Iterator[list[int]]:
        shared = max((common_prefix(earlier, prompts[0]) for earlier in self._there), default=0)
        self.cached = min(shared, len(prompts[0]) - 1) // _BLOCK * _BLOCK
        self._there += prompts
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos, config.do_sample = True, False
        handles = [self._add(prompt, config) for prompt in prompts]
        found: list[list[int]] = [[] for _ in prompts]
        done = 0
        while done < max_tokens:
            self._pipeline.step()
            for tokens, handle in zip(found, handles, strict=True):
                if handle.can_read():
                    tokens += next(iter(handle.read().values())).generated_ids
            while done < min(map(len, found)):
                yield [tokens[done] for tokens in found]
                done += 1

    def do(self, what: str) -> Any:
        raise ValueError(f"{what!r} is not known; nothing is")

    def _add(self, prompt: list[int], config: Any) -> Any:
        self._asked += 1
        return self._pipeline.add_request(self._asked, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)


def main() -> None:
    link, options = wire.connect()
    engine = OpenVino(**options)
    about = {"openvino-genai": openvino_genai.__version__, "block_tokens": _BLOCK}
    wire.serve(link, about, engine)


if __name__ == "__main__":
    main()
