"""Requests with the times when they came: a recorded trace, or a made one."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.eviction_traces import KINDS, PAGE_TOKENS, Line, Request, of_lines, read

# A user reads, thinks and writes; who has not gone on by then does not.
_MOST_PAUSE_SECONDS, _MOST_NEW_TOKENS = 600.0, 512


@dataclass(frozen=True)
class Arrival:
    """A request, in seconds since the first one."""

    seconds: float
    request: Request


def arrivals(trace: str, requests: int | None = None) -> list[Arrival]:
    """``KIND:SEED`` (spread evenly over an hour), a file of JSON lines with ``timestamp`` (ms), ``input_length`` and
    ``hash_ids``, or a CSV file of the Azure LLM inference traces. Raises SystemExit for what is none of them."""
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
class _Talk:
    """A conversation so far: tokens of its last prompt, those of prompt and answer, and the ids of the prompt's
    blocks."""

    at: float
    read: int
    tokens: int
    ids: list[int]


def _azure(file: Iterator[str]) -> Iterator[tuple[float, Line]]:
    """These have no texts, so which prompts begin alike is not known. Taken for the next turn of a conversation: a
    prompt that is longer than an earlier one with its answer by at most ``_MOST_NEW_TOKENS``, within
    ``_MOST_PAUSE_SECONDS``; the nearest in length. So reuse is what the sizes allow, at the most."""
    talks: list[_Talk] = []
    numbers = itertools.count()
    for row in csv.DictReader(file):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        tokens, answered = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        talks = [talk for talk in talks if at - talk.at <= _MOST_PAUSE_SECONDS]
        near = [talk for talk in talks if 0 < tokens - talk.tokens <= _MOST_NEW_TOKENS]
        talk = min(near, key=lambda one: tokens - one.tokens, default=None)
        # What was read whole is the same; the block that the earlier prompt ended in goes on differently.
        ids = talk.ids[: talk.read // PAGE_TOKENS] if talk is not None else []
        ids = ids + [next(numbers) for _ in range(-(-tokens // PAGE_TOKENS) - len(ids))]
        if talk is not None:
            talks.remove(talk)
        talks.append(_Talk(at, tokens, tokens + answered, ids))
        if tokens:
            yield at, (tokens, ids)
