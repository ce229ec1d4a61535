"""Program that flips bits of a store, and uses the damaged store in child processes, which must not crash.

Usage: damage_child.py STORE WORK FIRST COUNT. The program prints a line of JSON for each flip, with the exit code of
the child and the chunks that it read. The caller checks the exit codes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path

import structlog

from cache_daemon.durable.durable_tier import PutOutcome, ReadResult, WriteGroup
from tests.cache_daemon.durable.chunks import chain, chunk, is_sound, key_of, opened, read, store

CHAINS, LENGTH, TOKENS = 20, 10, 16


def stored_chains() -> list[list[object]]:
    return [chain(LENGTH, TOKENS, seed) for seed in range(CHAINS)]


def flip(file: Path, rng: random.Random) -> int:
    """Flip one bit, mostly in pages of LMDB's structure: meta pages, branches, leaves, headers of large values."""
    size = file.stat().st_size
    page = rng.randrange(size // 4096)
    kind = rng.random()
    if kind < 0.15:
        offset = rng.randrange(2) * 4096 + rng.randrange(160)
    elif kind < 0.6:
        offset = page * 4096 + rng.randrange(64)
    else:
        offset = rng.randrange(size)
    with file.open("r+b") as data:
        data.seek(offset)
        byte = data.read(1)[0]
        data.seek(offset)
        data.write(bytes([byte ^ 1 << rng.randrange(8)]))
    return offset


def use(folder: Path) -> dict[str, int]:
    """Open a store, read all chunks, write, remove, and open it again. Raises AssertionError for wrong bytes."""
    chains = stored_chains()
    tier = opened(folder)
    sound = corrupt = 0
    for puts in chains:
        results = read(tier, *puts)  # type: ignore[arg-type]
        sound += results.count(ReadResult.OK)
        corrupt += results.count(ReadResult.CORRUPT)
        missing = [i for i, result in enumerate(results) if result is ReadResult.MISSING]
        assert not missing or missing == list(range(missing[0], LENGTH)), "a chunk is there without its parent"
    fresh = chunk([7, 7, 7])
    for _ in range(4):  # after a failed open, the next try must succeed
        try:
            tier.apply(WriteGroup(remove=(key_of(chains[0][0]),)))  # type: ignore[arg-type]
            assert store(tier, fresh) == [PutOutcome.STORED]
            break
        except Exception as error:
            last = error
    else:
        raise AssertionError(f"the store does not heal: {last!r}")
    tier.close()
    tier = opened(folder)
    assert is_sound(tier, fresh)
    assert not is_sound(tier, chains[0][0]), "what was removed came back"  # type: ignore[arg-type]
    notes = tier.notes()
    assert notes in ({b"verdict": b"passed"}, {}), notes
    tier.close()
    return {"sound": sound, "corrupt": corrupt, "notes": len(notes)}


def main(source: Path, work: Path, first: int, count: int) -> None:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    for seed in range(first, first + count):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        shutil.copyfile(source / "data.mdb", work / "data.mdb")
        offset = flip(work / "data.mdb", random.Random(seed))
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            try:
                answer = use(work)
            except BaseException as error:  # reported to the parent, which checks it
                answer = {"error": repr(error)}  # type: ignore[dict-item]
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answers:
            answer = json.loads(answers.read() or "{}")
        status = os.waitpid(child, 0)[1]
        print(json.dumps({"seed": seed, "offset": offset, "signal": os.WTERMSIG(status), **answer}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
