"""Traces of requests as block paths: recorded or synthetic."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK_TOKENS = 512


class Block:
    """A block of a prompt together with all blocks before it: equal blocks have equal prefixes."""

    __slots__ = ("key", "parent", "prefill_seconds", "size_bytes", "start_position", "tokens")

    def __init__(self, number: int, parent: Block | None, start_position: int, tokens: int) -> None:
        self.key = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()
        self.parent, self.start_position, self.tokens = parent, start_position, tokens
        self.size_bytes = BLOCK_TOKENS  # a partial block takes the capacity of a whole one
        self.prefill_seconds = float(tokens)


@dataclass(frozen=True)
class Request:
    """A prompt. ``path`` has its blocks in order; the last block may be partial."""

    tokens: int
    path: tuple[Block, ...]


# A line of a trace: the number of prompt tokens, and an id for each block with its prefix.
Line = tuple[int, list[int]]


def read(trace: str, requests: int | None = None) -> list[Request]:
    """Read ``synthetic:SEED``, ``KIND:SEED`` for one of ``KINDS``, or JSON lines.

    Each JSON line has ``input_length`` and ``hash_ids``. Returns at most ``requests`` requests.
    """
    kind, _, seed = trace.partition(":")
    if kind in KINDS and seed.isdecimal():
        lines: Iterable[Line] = KINDS[kind](int(seed))
    else:
        try:
            text = Path(trace).read_text(encoding="utf-8")
        except OSError as error:
            raise SystemExit(
                f"--trace is {trace}, which is no file; or name one of {', '.join(KINDS)} and a seed, as synthetic:1"
            ) from error
        lines = ((x["input_length"], x["hash_ids"]) for x in map(json.loads, text.splitlines()))
    return of_lines(itertools.islice(lines, requests))


def of_lines(lines: Iterable[Line]) -> list[Request]:
    """Build requests from lines. Equal ids become the same block."""
    blocks: dict[int, Block] = {}
    out = []
    for tokens, ids in lines:
        path: list[Block] = []
        for i, number in enumerate(ids):
            block = blocks.get(number)
            if block is None:
                at = i * BLOCK_TOKENS
                parent = path[-1] if path else None
                block = blocks[number] = Block(number, parent, at, min(BLOCK_TOKENS, tokens - at))
            path.append(block)
        out.append(Request(tokens, tuple(path)))
    return out


# ---- synthetic traces ------------------------------------------------------------------------------------------------

# The next request of a client: its time, and its prompt as ``(text id, tokens)`` pieces. Equal ids mean equal texts.
Prompt = list[tuple[int, int]]
Sent = tuple[float, Prompt]


def _lognormal(rng: random.Random, median: float, sigma: float, most: float) -> float:
    return min(most, median * math.exp(rng.gauss(0.0, sigma)))


class _TextIds:
    """Source of new text ids."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self._next = rng, itertools.count()

    def text(self, median: float, sigma: float = 0.8, most: float = 60_000) -> tuple[int, int]:
        return next(self._next), 1 + int(_lognormal(self.rng, median, sigma, most))


def _chats(texts: _TextIds, rate: float, begin: float, end: float) -> Iterator[Iterator[Sent]]:
    """Generate conversations. A next turn follows after the time that a user needs to read and think."""
    rng = texts.rng
    systems = [texts.text(900) for _ in range(4)]
    at = begin
    while (at := at + rng.expovariate(rate)) < end:
        yield _chat(texts, at, [rng.choices(systems, weights=(8, 4, 2, 1))[0]], rng.betavariate(1.2, 1.5))


def _chat(texts: _TextIds, at: float, prompt: Prompt, goes_on: float) -> Iterator[Sent]:
    rng = texts.rng
    prompt = [*prompt, texts.text(2500, 1.3)]
    while True:
        yield at, prompt
        if rng.random() > goes_on:
            return
        answer = texts.text(300)
        prompt = [*prompt, answer, texts.text(200, 1.2)]
        at += answer[1] / 40 + _lognormal(rng, 60, 1.0, 3600)


def _documents(texts: _TextIds, rate: float, begin: float, end: float) -> Iterator[Iterator[Sent]]:
    """Generate questions about documents, of which few are popular."""
    rng = texts.rng
    system = texts.text(1500)
    shelf = [texts.text(6000) for _ in range(1200)]
    weights = list(itertools.accumulate((i + 1) ** -0.9 for i in range(len(shelf))))
    at = begin
    while (at := at + rng.expovariate(rate)) < end:
        document = rng.choices(shelf, cum_weights=weights)[0]
        yield iter([(at, [system, document, texts.text(120)])])


def _agents(texts: _TextIds, rate: float, begin: float, end: float) -> Iterator[Iterator[Sent]]:
    """Generate tool-call loops. Their context grows, and sometimes branches."""
    rng = texts.rng
    tools = [texts.text(5000, 0.4) for _ in range(3)]
    at = begin
    while (at := at + rng.expovariate(rate)) < end:
        yield _agent(texts, at, [rng.choice(tools), texts.text(1500)])


def _agent(texts: _TextIds, at: float, prompt: Prompt) -> Iterator[Sent]:
    rng = texts.rng
    for _ in range(1 + int(rng.expovariate(1 / 8))):
        yield at, prompt
        if rng.random() < 0.1:
            for i in range(rng.randint(2, 5)):
                yield at + i + 1, [*prompt, texts.text(800)]
        answer = texts.text(150)
        prompt = [*prompt, answer, texts.text(700, 1.2)]
        at += answer[1] / 40 + _lognormal(rng, 5, 1.0, 600)


def _scans(texts: _TextIds, rate: float, begin: float, end: float) -> Iterator[Iterator[Sent]]:
    """Generate batch jobs, whose long prompts share instructions and never occur again."""
    rng = texts.rng
    instructions = texts.text(700)
    at = begin
    while (at := at + rng.expovariate(rate)) < end:
        yield iter([(at, [instructions, texts.text(9000, 0.7)])])


_Source = Callable[[_TextIds, float, float, float], Iterator[Iterator[Sent]]]


def _lines(seed: int, parts: list[tuple[_Source, float, float, float]]) -> Iterator[Line]:
    """Return the requests of all sources in time order. A source is ``(source, clients per second, begin, end)``."""
    texts = _TextIds(random.Random(seed))
    waiting: list[tuple[float, int, Prompt, Iterator[Sent]]] = []
    ties = itertools.count()
    clients = heapq.merge(*(_begun(source(texts, *rest)) for source, *rest in parts), key=lambda c: c[0][0])
    last = max(end for *_, end in parts)
    numbers: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}
    upcoming = next(clients, None)
    while upcoming or waiting:
        if upcoming and (not waiting or upcoming[0][0] <= waiting[0][0]):
            (at, prompt), client = upcoming
            upcoming = next(clients, None)
        else:
            at, _, prompt, client = heapq.heappop(waiting)
        if at > last:
            continue
        yield _line(prompt, numbers)
        following = next(client, None)
        if following is not None:
            heapq.heappush(waiting, (following[0], next(ties), following[1], client))


def _begun(clients: Iterator[Iterator[Sent]]) -> Iterator[tuple[Sent, Iterator[Sent]]]:
    for client in clients:
        yield next(client), client


def _line(prompt: Prompt, numbers: dict[tuple[int, tuple[tuple[int, int], ...]], int]) -> Line:
    """Cut a prompt into blocks. A block's id depends on its pieces and on everything before them."""
    total = sum(tokens for _, tokens in prompt)
    ids: list[int] = []
    at, end, pieces = 0, 0, iter(prompt)
    reach: list[tuple[int, int]] = []
    for start in range(0, total, BLOCK_TOKENS):
        stop = min(start + BLOCK_TOKENS, total)
        inside = [r for r in reach if end > start][-1:]
        while end < stop:
            text, tokens = next(pieces)
            at, end = end, end + tokens
            inside.append((text, at))
            reach = [(text, at)]
        identity = ids[-1] if ids else -1, (*inside, (stop - start, 0))
        ids.append(numbers.setdefault(identity, len(numbers)))
    return total, ids


_HOUR = 3600.0


def _synthetic(seed: int) -> Iterator[Line]:
    """Mix chats and agents all the time, documents in the first half, and batch jobs in the middle third."""
    return _lines(
        seed,
        [
            (_chats, 0.5, 0, _HOUR),
            (_agents, 0.06, 0, _HOUR),
            (_documents, 0.8, 0, _HOUR / 2),
            (_scans, 0.5, _HOUR / 3, 2 * _HOUR / 3),
        ],
    )


def _shift(seed: int) -> Iterator[Line]:
    quarter = _HOUR / 4
    return _lines(
        seed,
        [
            (_documents, 2.5, 0, quarter),
            (_chats, 1.2, quarter, 2 * quarter),
            (_documents, 2.5, 2 * quarter, 3 * quarter),
            (_agents, 0.3, 3 * quarter, _HOUR),
        ],
    )


KINDS: dict[str, Callable[[int], Iterator[Line]]] = {
    "synthetic": _synthetic,
    "chat": lambda seed: _lines(seed, [(_chats, 1.0, 0, _HOUR)]),
    "documents": lambda seed: _lines(seed, [(_documents, 2.5, 0, _HOUR)]),
    "agents": lambda seed: _lines(seed, [(_agents, 0.25, 0, _HOUR)]),
    "scans": lambda seed: _lines(seed, [(_scans, 1.0, 0, _HOUR), (_chats, 0.5, 0, _HOUR)]),
    "shift": _shift,
}
