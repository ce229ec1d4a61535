"""Request traces with arrival times: recorded or synthetic."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.eviction_traces import BLOCK_TOKENS, KINDS, Line, Request, of_lines, read

# Longest pause between two turns of a conversation. A later request counts as a new conversation.
_MAX_PAUSE_SECONDS, _MAX_NEW_TOKENS = 600.0, 512


@dataclass(frozen=True)
class Arrival:
    """A request with its arrival time in seconds since the first request."""

    seconds: float
    request: Request


def arrivals(trace: str, requests: int | None = None) -> list[Arrival]:
    """Read a trace: ``KIND:SEED``, JSON lines, or CSV of the Azure LLM inference traces.

    The requests of ``KIND:SEED`` are spread evenly over an hour. Each JSON line has ``timestamp`` (ms),
    ``input_length`` and ``hash_ids``. Raises SystemExit for any other input.
    """
    kind, _, seed = trace.partition(":")
    if kind in KINDS and seed.isdecimal():
        made = read(trace, requests)
        return [Arrival(3600.0 * i / len(made), request) for i, request in enumerate(made)]
    try:
        with Path(trace).open(encoding="utf-8", newline="") as file:
            rows = list(itertools.islice(_azure(file) if trace.endswith(".csv") else _mooncake(file), requests))
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(
            f"--trace is {trace}, which is no trace ({error}); give a file of JSON lines with timestamp, input_length "
            f"and hash_ids, a CSV of Azure's with TIMESTAMP, ContextTokens and GeneratedTokens, or one of "
            f"{', '.join(KINDS)} and a seed, as synthetic:1"
        ) from error
    if not rows:
        raise SystemExit(f"--trace is {trace}, which has no requests")
    begin = rows[0][0]
    found = of_lines(line for _, line in rows)
    return [Arrival(at - begin, request) for (at, _), request in zip(rows, found, strict=True)]


def _mooncake(file: Iterator[str]) -> Iterator[tuple[float, Line]]:
    for line in file:
        row = json.loads(line)
        yield row["timestamp"] / 1e3, (row["input_length"], row["hash_ids"])


@dataclass
class _Conversation:
    """Last turn of a conversation.

    ``at`` is its time in seconds. ``read`` is the number of tokens in its prompt, and ``tokens`` the number in prompt
    and answer. ``ids`` are the ids of the prompt's blocks.
    """

    at: float
    read: int
    tokens: int
    ids: list[int]


def _azure(file: Iterator[str]) -> Iterator[tuple[float, Line]]:
    """Read an Azure trace and infer conversations from lengths.

    The traces have no texts. A prompt counts as the next turn of a conversation if it arrives within
    ``_MAX_PAUSE_SECONDS`` and has up to ``_MAX_NEW_TOKENS`` more tokens than the last prompt with its answer. If
    several conversations fit, the nearest in length counts. So the inferred reuse is an upper bound.
    """
    talks: list[_Conversation] = []
    numbers = itertools.count()
    for row in csv.DictReader(file):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        tokens, answered = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        talks = [talk for talk in talks if at - talk.at <= _MAX_PAUSE_SECONDS]
        near = [talk for talk in talks if 0 < tokens - talk.tokens <= _MAX_NEW_TOKENS]
        talk = min(near, key=lambda one: tokens - one.tokens, default=None)
        # The new prompt shares the whole blocks of the earlier prompt, but not its partial last block.
        ids = talk.ids[: talk.read // BLOCK_TOKENS] if talk is not None else []
        ids = ids + [next(numbers) for _ in range(-(-tokens // BLOCK_TOKENS) - len(ids))]
        if talk is not None:
            talks.remove(talk)
        talks.append(_Conversation(at, tokens, tokens + answered, ids))
        if tokens:
            yield at, (tokens, ids)
