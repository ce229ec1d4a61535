"""RAG workload: reused tokens and time to first token, by chunking and by repair.

The worker first computes all documents of a library once. Every request then has a system prompt, some documents in a
new order, and a new question. ``found_ratio`` is the share of the documents' tokens that came from the cache, as a
prefix or relocated.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import Any

from benchmarks import report
from benchmarks.node import Node

CHUNKINGS = ("fixed", "boundary", "document", "content_defined")
REPAIRS = ("none", "selective", "cacheblend", "guided")
QUESTION_TOKENS = 24


@dataclass(frozen=True)
class Request:
    """A prompt: its token ids, the end positions of its documents, and the tokens in documents."""

    tokens: list[int]
    segment_ends: list[int]
    document_tokens: int


class Library:
    """Documents of different lengths, and requests with some of them."""

    def __init__(self, seed: int, documents: int, mean_tokens: int) -> None:
        self._rng = random.Random(seed)
        self.system = self._words(60)
        self._documents = [
            self._words(self._rng.randint(mean_tokens // 2, mean_tokens * 3 // 2)) for _ in range(documents)
        ]

    def _words(self, count: int) -> list[int]:
        return [self._rng.randrange(16, 4000) for _ in range(count)]

    def _request(self, chosen: list[list[int]]) -> Request:
        tokens, ends = [1, *self.system], [1 + len(self.system)]
        for document in chosen:
            tokens = tokens + document
            ends.append(len(tokens))
        return Request(tokens + self._words(QUESTION_TOKENS), ends, sum(map(len, chosen)))

    def reading(self) -> list[Request]:
        """Return requests that together contain every document once."""
        return [self._request(self._documents[i : i + 4]) for i in range(0, len(self._documents), 4)]

    def asking(self, least: int, most: int) -> Request:
        """Return a request with ``least`` to ``most`` documents in random order."""
        return self._request(self._rng.sample(self._documents, self._rng.randint(least, most)))


def run(options: argparse.Namespace) -> dict[str, Any]:
    arms = {"nocache": {}, "prefix_only": {}}
    arms |= {
        f"{c}_guided": {"chunking": c, "repair": "guided", "reuse_anywhere": True, "unverified_reuse": True}
        for c in CHUNKINGS
    }
    arms |= {
        f"document_{r}": {"chunking": "document", "repair": r, "reuse_anywhere": True, "unverified_reuse": True}
        for r in REPAIRS
        if r != "guided"
    }
    library = Library(options.seed, options.documents, options.document_tokens)
    asked = [library.asking(*options.retrieved) for _ in range(options.requests)]
    times: dict[str, list[float]] = {a: [] for a in arms}
    found: dict[str, list[float]] = {a: [] for a in arms}
    recomputed: dict[str, list[float]] = {a: [] for a in arms}
    with report.progress() as progress:
        bar = progress.add_task("measuring", total=len(arms) * (len(asked) + 1))
        for arm, flags in arms.items():
            # Only one node runs at a time, because several models would not fit into memory.
            with Node(
                options.model,
                storage_bits=options.storage_bits,
                arena_bytes="512MiB",
                worker_flags={"resident_sequences": 0, "chunk_tokens": options.chunk_tokens, **flags},
            ) as node:
                client = node.client()
                for request in library.reading() if arm != "nocache" else []:
                    client.generate(request.tokens, max_tokens=1, segment_ends=request.segment_ends)
                node.settle()
                progress.advance(bar)
                for request in asked:
                    result = client.generate(
                        request.tokens,
                        max_tokens=1,
                        temperature=0,
                        segment_ends=request.segment_ends,
                        skip_cache=arm == "nocache",
                    )
                    node.settle()
                    times[arm].append(result.ttft_ms)
                    found[arm].append(max(0, result.cached_tokens - 1 - len(library.system)) / request.document_tokens)
                    recomputed[arm].append(result.recomputed_tokens / max(1, result.approximate_tokens))
                    progress.advance(bar)
    rows = [
        {
            "arm": arm,
            "chunking": str(flags.get("chunking", "content_defined")),
            "repair": str(flags.get("repair", "")),
            "requests": len(asked),
            **report.figure(times[arm], "ttft_ms_p50"),
            "ttft_ratio": round(report.median(times[arm]) / report.median(times["nocache"]), 3),
            "found_ratio": round(sum(found[arm]) / len(asked), 4),
            "recomputed_ratio": round(sum(recomputed[arm]) / len(asked), 4),
        }
        for arm, flags in arms.items()
    ]
    summary = {f"{r['arm']}_speedup": round(1 / r["ttft_ratio"], 2) for r in rows if r["arm"] != "nocache"}
    return report.write(options, "rag", rows, summary)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("rag", (__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--documents", type=report.at_least(1), default=24, help="documents in the library")
    parser.add_argument("--document-tokens", type=report.at_least(1), default=200, help="mean length of a document")
    parser.add_argument(
        "--retrieved",
        type=report.at_least(1),
        nargs=2,
        default=[3, 6],
        help="minimum and maximum documents per request",
    )
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--chunk-tokens", type=report.at_least(1), default=64)
    parser.add_argument("--storage-bits", type=int, choices=[16, 8, 4], default=16)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.quick:
        options.documents, options.requests = 12, 6
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
