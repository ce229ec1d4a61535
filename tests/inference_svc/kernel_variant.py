"""Program whose worker runs one variant of the CPU kernels.

``python -m tests.inference_svc.kernel_variant VARIANT`` prints one JSON document. ``none`` is a
machine on which no kernel was compiled.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from kvkernels.cpu import cpu_library
from kvkernels.cpu.cpu_features import native_bfloat16
from kvsidecar import keys

from benchmarks.node import Node, Process, new_interpreter
from inference_svc import Engine
from tests import busy_machine
from tests.inference_svc.engine.test_exactness import prompt

NONE, TOKENS, ANSWER = "none", 200, 4
DTYPE = "bfloat16" if native_bfloat16() else "float32"


@dataclass(frozen=True)
class Run:
    """A run of this program, whose output is in a file."""

    process: Process
    output: IO[str]


def start(variant: str, *arguments: str, **environment: str) -> Run:
    """Start a run. One with an ``environment`` gets a new interpreter, because libraries read it while they load."""
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - said() closes it
    launch = new_interpreter if environment else Node.launch
    command = ["tests.inference_svc.kernel_variant", variant, *arguments]
    return Run(launch(command, os.environ | environment, output.fileno()), output)


def said(run: Run) -> Any:
    code = run.process.wait(400)
    with run.output as output:
        output.seek(0)
        text = output.read()
    assert code == 0, text
    return json.loads(text.splitlines()[-1])


def prompts(name: str, count: int) -> list[list[int]]:
    return [prompt(int.from_bytes(name.encode()) + i, TOKENS) for i in range(count)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("variant")
    parser.add_argument("--dtype", default=DTYPE)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--write", default="")
    parser.add_argument("--read", nargs="*", default=[])
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--share-across-machines", action="store_true")
    options = parser.parse_args(arguments)
    usable = cpu_library.usable_variants()
    cpu_library.usable_variants = lambda: [name for name in usable if name == options.variant]  # type: ignore[assignment]
    shares = options.share_across_machines
    busy_machine.prefer_loads()
    with Engine.from_pretrained(
        "demo", cache=options.cache, dtype=options.dtype, pool_bytes=64 << 20, resident_sequences=0,
        share_across_machines=shares, cache_timeout_ms=20_000,
    ) as engine:  # fmt: skip
        done = _done(engine, options)
    print(json.dumps(done))
    return 0


def _done(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    loaded, cache = engine._runtime.engine.loaded, engine._runtime.cache
    assert cache is None or all(daemon.wait(60) for daemon in cache._daemons.values())
    for ids in prompts(options.write, options.count) if options.write else ():
        engine.generate(ids, max_tokens=1, temperature=0)
    engine.generate(prompt(1, 300), max_tokens=1, temperature=0, skip_cache=True)
    pool = engine._runtime.engine.pool
    content = b"".join(kept[:, :, :300].contiguous().view(torch.uint8).numpy().tobytes() for kept in _kept(pool))
    return {
        "numerics": loaded.numerics.id,
        "namespace": keys.namespace_id(loaded.descriptor(16)).hex(),
        "content": hashlib.sha256(content).hexdigest(),
        "read": {name: _read(engine, prompts(name, options.count)) for name in options.read},
    }


def _kept(pool: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return pool.keys, pool.values


def _read(engine: Engine, stored: list[list[int]]) -> dict[str, int]:
    """Count the prompts with cached tokens, and the answers whose log probabilities differ from those without cache."""
    hits = differ = 0
    for ids in stored:
        asked: dict[str, Any] = {"max_tokens": ANSWER, "temperature": 0, "logprobs": 1}
        with_cache = engine.generate([*ids, 7, 8], **asked)
        without = engine.generate([*ids, 7, 8], skip_cache=True, **asked)
        hits += with_cache.cached_tokens == len(ids)
        differ += [p.logprob for p in with_cache.logprobs] != [p.logprob for p in without.logprobs]
    return {"hits": hits, "differ": differ}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
