"""Program that runs llama.cpp through its C interface.

``options`` are ``model`` (a GGUF file), ``context``, ``sequences``, ``threads`` and ``prompt_cache``. The latter is a
folder of state files that outlive the process, like those of ``--slot-save-path`` in llama.cpp's server. A prompt
reuses the longest prefix that it shares with the previous prompt or with a file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.systems import wire
from benchmarks.systems.common_prefix import common_prefix

_BATCH, _UBATCH = 2048, 512


class LlamaCpp:
    """A llama.cpp context. Sequence 0 keeps the prompts' prefix; the sequences of a batch share its cells."""

    def __init__(self, model: str, context: int, sequences: int, threads: int, prompt_cache: str) -> None:
        """``context`` is the number of tokens of all sequences, ``sequences`` the largest batch."""
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context, _BATCH, _UBATCH
        settings.n_seq_max, settings.kv_unified = sequences + 1, True
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {context} tokens")
        self._room = context
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._folder, self._there = Path(prompt_cache), list[int]()
        self._filed = {file: self._load(file) for file in sorted(self._folder.glob("*.bin"))}
        self._clear()
        self.cached = 0

    def tokens(self, prompt: list[int], max_tokens: int) -> Iterator[int]:
        here = common_prefix(self._there, prompt)
        shared, best = max(
            ((common_prefix(kept, prompt), file) for file, kept in self._filed.items()), default=(0, None)
        )
        if best is not None and shared > here:
            self._load(best)
            here = shared
        self.cached = min(here, len(prompt) - 1)
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_seq_rm(memory, 0, self.cached, -1)
        self._there = self._there[: self.cached]
        todo = prompt[self.cached :]
        for _ in range(max_tokens):
            token = self._read(todo)
            yield token
            todo = [token]

    def batch(self, prompts: list[list[int]], max_tokens: int) -> Iterator[list[int]]:
        memory = llama_cpp.llama_get_memory(self._context)
        self.cached = min(*(common_prefix(self._there, prompt) for prompt in prompts), len(prompts[0]) - 1)
        places = range(1, len(prompts) + 1)
        for place in places:
            llama_cpp.llama_memory_seq_cp(memory, 0, place, 0, self.cached)
        todo, at = [prompt[self.cached :] for prompt in prompts], self.cached
        rows = llama_cpp.llama_batch_init(sum(map(len, todo)), 0, 1)
        try:
            for _ in range(max_tokens):
                tokens = self._read_batch(rows, todo, at)
                yield tokens
                at += len(todo[0])
                todo = [[token] for token in tokens]
        finally:
            llama_cpp.llama_batch_free(rows)
            for place in places:
                llama_cpp.llama_memory_seq_rm(memory, place, -1, -1)

    def do(self, what: str) -> bool:
        if what == "reset":
            self._clear()
            return True
        if what == "save":
            file = self._folder / f"{len(self._filed)}.bin"
            kept = (llama_cpp.llama_token * len(self._there))(*self._there)
            written = llama_cpp.llama_state_seq_save_file(self._context, str(file).encode(), 0, kept, len(kept))
            self._filed[file] = list(self._there)
            return bool(written)
        raise ValueError(f"{what!r} is not known; known are reset and save")

    def _read(self, tokens: list[int]) -> int:
        """Compute the tokens that follow the cached ones; return the likeliest next token."""
        for begin in range(0, len(tokens), _BATCH):
            piece = tokens[begin : begin + _BATCH]
            there = (llama_cpp.llama_token * len(piece))(*piece)  # keeps the memory of the batch alive
            if llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(there, len(piece))) != 0:
                raise RuntimeError("llama.cpp cannot go on: its context is full")
            self._there += piece
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())

    def _read_batch(self, rows: Any, todo: list[list[int]], at: int) -> list[int]:
        """Compute tokens of sequences 1, 2, … from position ``at`` on; return the likeliest next token of each."""
        last = []
        rows.n_tokens = 0
        for place, tokens in enumerate(todo, 1):
            for position, token in enumerate(tokens, at):
                row = rows.n_tokens
                rows.token[row], rows.pos[row] = token, position
                rows.n_seq_id[row], rows.seq_id[row][0] = 1, place
                rows.logits[row] = position == at + len(tokens) - 1
                rows.n_tokens += 1
            last.append(rows.n_tokens - 1)
        if llama_cpp.llama_decode(self._context, rows) != 0:
            raise RuntimeError("llama.cpp cannot go on: its context is full")
        found = (llama_cpp.llama_get_logits_ith(self._context, row) for row in last)
        return [int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax()) for logits in found]

    def _load(self, file: Path) -> list[int]:
        """Replace the sequence by the one in a file; return its tokens."""
        self._clear()
        tokens, count = (llama_cpp.llama_token * self._room)(), ctypes.c_size_t()
        if not llama_cpp.llama_state_seq_load_file(
            self._context, str(file).encode(), 0, tokens, self._room, ctypes.byref(count)
        ):
            raise RuntimeError(f"llama.cpp cannot load {file}")
        self._there = list(tokens[: count.value])
        return list(self._there)

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._there = []


def main() -> None:
    link, options = wire.connect()
    engine = LlamaCpp(**options)
    about: dict[str, Any] = {
        "llama-cpp-python": llama_cpp.__version__,
        "instructions": llama_cpp.llama_print_system_info().decode(),
    }
    wire.serve(link, about, engine)


if __name__ == "__main__":
    main()
