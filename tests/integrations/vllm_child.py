"""A vLLM engine in a process of its own, told what to do by lines of JSON: ``python vllm_child.py MODEL CONFIG``.

Prints ``READY``, then for each line ``{"prompts": [[ids], …], "salt": …, "tokens": n}`` one line of answers.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def engine(model: str, transfer: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model,
        dtype="float32",  # in which no two tokens are as likely
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        block_size=32,
        kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
        **options,
    )


def answers(llm: Any, asked: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": ids} | ({"cache_salt": asked["salt"]} if asked.get("salt") else {})
        for ids in asked["prompts"]
    ]
    greedy = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False)
    found = llm.generate(prompts, greedy, use_tqdm=False)
    return [
        {"ids": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens or 0, "why": o.outputs[0].finish_reason}
        for o in found
    ]


def break_loads() -> None:
    """From here on every load fails in the middle, with blocks half filled."""
    from kvsidecar.paged.reading import Reader

    whole = Reader.load

    def half(self: Reader, session: Any, tokens: list[int], salt: bytes, slots: Any, first: int) -> int:
        whole(self, session, tokens[: len(tokens) // 2], salt, slots[: len(tokens) // 2], first)
        raise ConnectionError("planted: the session ended while chunks were copied")

    Reader.load = half  # type: ignore[method-assign]


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is not an answer
    model, given = sys.argv[1], json.loads(sys.argv[2])
    llm = engine(model, given["transfer"], given["options"])
    print("READY", file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("break_loads"):
            break_loads()
        print(json.dumps(answers(llm, asked)), file=out, flush=True)


if __name__ == "__main__":
    main()
