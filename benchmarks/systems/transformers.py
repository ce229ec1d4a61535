"""Program that runs Hugging Face transformers.

``options`` are ``model`` (a folder), ``dtype``, ``threads`` and ``compiled``, which compiles the model with
torch.compile for prompts of any length. (A program for each length takes 7 % less time per token at 4,096 tokens, but
every new length is compiled for 20 seconds.) A prompt reuses the prefix that it shares with the
previous prompt, from the library's cache object.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from benchmarks.systems import wire
from benchmarks.systems.common_prefix import common_prefix

_WARMING = [7] * 70


class Transformers:
    """A model with one sequence in its cache."""

    def __init__(self, model: str, dtype: str, threads: int, compiled: bool) -> None:
        torch.set_num_threads(threads)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self._cache: Any = transformers.DynamicCache()
        self._there: list[int] = []
        self.cached = 0
        if compiled:
            torch._dynamo.config.recompile_limit = 64
            self._model = torch.compile(self._model, dynamic=True)
            self._warm()

    @torch.inference_mode()
    def tokens(self, prompt: list[int], max_tokens: int) -> Iterator[int]:
        self.cached = min(common_prefix(self._there, prompt), len(prompt) - 1)
        if not self.cached:
            self._cache = transformers.DynamicCache()
        elif self.cached < len(self._there):
            self._cache.crop(self.cached - len(self._there))
        self._there = self._there[: self.cached]
        todo = prompt[self.cached :]
        for _ in range(max_tokens):
            out = self._model(
                input_ids=torch.tensor([todo]), past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
            self._there += todo
            token = int(out.logits[0, -1].argmax())
            yield token
            todo = [token]

    def _warm(self) -> None:
        """Compile for new prompts, for prompts and batches that continue them, and for single tokens."""
        for length in (50, 40):  # the second makes lengths dynamic
            list(self.tokens(_WARMING, 1))
            list(self.tokens(_WARMING[:length] + [8] * 20, 3))
            for count in (2, 3):
                list(self.batch([_WARMING[:length] + [8 + i] * 10 for i in range(count)], 3))
            self.do("reset")

    @torch.inference_mode()
    def batch(self, prompts: list[list[int]], max_tokens: int) -> Iterator[list[int]]:
        """Answer prompts that continue the previous prompt's beginning, on copies of its cache."""
        shared = min(common_prefix(self._there, prompt) for prompt in prompts)
        self.cached = min(shared, len(prompts[0]) - 1)
        cache = copy.deepcopy(self._cache)
        cache.crop(self.cached - len(self._there))
        cache.batch_repeat_interleave(len(prompts))
        todo = [prompt[self.cached :] for prompt in prompts]
        for _ in range(max_tokens):
            out = self._model(input_ids=torch.tensor(todo), past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens: list[int] = out.logits[:, -1].argmax(-1).tolist()
            yield tokens
            todo = [[token] for token in tokens]

    def do(self, what: str) -> bool:
        if what != "reset":
            raise ValueError(f"{what!r} is not known; known is reset")
        self._cache, self._there = transformers.DynamicCache(), []
        return True


def main() -> None:
    link, options = wire.connect()
    engine = Transformers(**options)
    wire.serve(link, {"transformers": transformers.__version__, "torch": torch.__version__}, engine)


if __name__ == "__main__":
    main()
