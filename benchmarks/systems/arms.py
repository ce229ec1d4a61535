"""Arms: our engine and vLLM behind one interface, with different caches."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.node import Node
from benchmarks.systems.engine import Answer, Engine
from benchmarks.systems.environments import EngineNotInstalled
from benchmarks.systems.vllm_engines import EngineSettings, environment
from inference_svc.models.model_shape import model_shape

BLOCK_TOKENS = 128  # vLLM's largest block: caches grow by one block per sequence
_ASK_SECONDS, _WARMING_TOKENS = 900.0, 32


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class EngineArm:
    """One engine configuration.

    ``ask`` returns a greedy answer, and ``ask_batch`` the answers to prompts that the engine decodes together.
    ``restart`` sends SIGKILL and starts a new process; for an engine without a cache, it does nothing. ``settle`` waits
    until all stores have finished. ``save`` persists the cache of an engine that does so only on request. The engine
    reuses whole blocks of ``block`` tokens.
    """

    name: str
    ask: Callable[[list[int], int], Answer]
    ask_batch: Callable[[list[list[int]], int], list[Answer]]
    restart: Callable[[], None]
    settle: Callable[[], None] = _nothing
    save: Callable[[], object] = _nothing
    block: int = 1


def _together(ask: Callable[..., Answer]) -> Callable[[list[list[int]], int], list[Answer]]:
    """Send the prompts of a batch at once, each from a thread."""

    def ask_batch(prompts: list[list[int]], answer: int) -> list[Answer]:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: ask(prompt, answer), prompts))

    return ask_batch


def of_node(name: str, node: Node, *, skip: bool = False) -> EngineArm:
    """Create an arm with our worker. ``skip`` disables the cache."""

    def ask(tokens: list[int], answer: int) -> Answer:
        found = node.client().generate(
            tokens, max_tokens=answer, temperature=0, ignore_eos=True, skip_cache=skip, deadline=_ASK_SECONDS
        )
        total = found.ttft_ms + found.timings["decode_ms"]
        return Answer(found.token_ids, found.ttft_ms, total, found.cached_tokens)

    restart = _nothing if skip else lambda: node.restart_worker(0)
    return EngineArm(name, ask, _together(ask), restart, node.settle)


def of_engine(
    name: str,
    engine: Engine,
    settle: Callable[[], None] = _nothing,
    save: Callable[[], object] = _nothing,
    *,
    keeps: bool = True,
) -> EngineArm:
    """Create an arm with another engine. ``keeps`` says that the engine has a cache, so a restart matters."""

    def restart() -> None:
        engine.restart()
        engine.ask([7] * _WARMING_TOKENS, 2)  # warm-up

    block = int(engine.about.get("block_tokens", 1))
    return EngineArm(name, engine.ask, engine.ask_batch, restart if keeps else _nothing, settle, save, block)


def arms_of(
    options: argparse.Namespace, stack: ExitStack, scratch: Path, model: Path, dtype: str, longest: int
) -> tuple[list[EngineArm], list[str]]:
    """Start the arms of ``options.arms``; return them, and the reasons why arms are missing.

    ``longest`` is the maximum number of tokens in a prompt with its answer. ``nocache`` shares the node of ``ours``,
    because it neither reads nor writes the cache.
    """
    room = (longest + BLOCK_TOKENS) * options.clients * model_shape(str(model)).token_bytes
    flags = {"dtype": dtype}
    found: list[EngineArm] = []
    shared: Node | None = None
    for name in options.arms:
        if name in ("nocache", "ours"):
            shared = shared or stack.enter_context(
                Node(
                    str(model),
                    storage_bits=options.storage_bits,
                    pool_bytes=str(room),
                    arena_bytes=str(2 * room),
                    worker_flags=flags,
                )
            )
            found.append(of_node(name, shared, skip=name == "nocache"))
        elif name == "prefix":
            alone = stack.enter_context(Node(str(model), workers=0, pool_bytes=str(room), worker_flags=flags))
            alone.kill("daemon")
            alone.workers = 1
            alone.start_worker(0)
            found.append(of_node(name, alone))
    asked = [name for name in options.arms if name.startswith("vllm")]
    if not asked:
        return found, []
    try:
        recipe = EngineSettings(
            environment(), scratch, model, dtype, longest, room, sequences=options.clients, eager=options.eager
        )
    except EngineNotInstalled as why:
        return found, [f"{', '.join(asked)}: {why}"]
    for name in asked:
        arena = 2 * room if name == "vllm_ours" else 0
        found.append(of_vllm(name, recipe, stack, arena, prefix_caching=name != "vllm_nocache"))
    return found, []


def of_vllm(
    name: str, recipe: EngineSettings, stack: ExitStack, arena: int = 0, *, prefix_caching: bool = True
) -> EngineArm:
    """Start vLLM. If ``arena`` is not 0, vLLM has our connector, and its daemon has an arena of this size."""
    settle: Callable[[], None] = _nothing
    if arena:
        node = stack.enter_context(Node(workers=0, arena_bytes=str(arena)))
        engine, settle = recipe.connected(node.cache_socket), node.settle_stores
    else:
        engine = recipe.plain(prefix_caching=prefix_caching)
    stack.enter_context(engine)
    arm = of_engine(name, engine, settle, keeps=prefix_caching or arena > 0)

    def ask_batch(prompts: list[list[int]], answer: int) -> list[Answer]:
        return _together(partial(engine.ask, together=len(prompts)))(prompts, answer)

    return replace(arm, ask_batch=ask_batch)
