"""Retrieval with one flag: documents of real text in many orders, on a node with --reuse-anywhere.

``kept_ratio`` is the share of reused tokens among the tokens that repair does not compute again. ``ttft_ratio`` is the
fastest TTFT over all orders divided by the fastest TTFT without the cache. All orders need the same work, so the
fastest one is disturbed least. ``cost`` is the expected work as a share of a prefill: the uncached tokens, the
selector's share of the relocated tokens, and the question's pass over the stored keys. The column
``ttft_over_cost_without_question`` leaves the pass out.

``agreement`` is defined as in a verification: for each token of a full prefill's greedy answer, a prompt that ends
before it is answered with reuse, and its likeliest token is compared. ``equal_first_tokens`` counts only the first
token of each answer, where the most tokens are about as likely.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvsidecar import Client
from kvsidecar.client import Completion
from kvsidecar.models.catalogue import DEFAULT
from rich.progress import Progress

from benchmarks import report
from benchmarks.node import Node
from benchmarks.real_prompts import SAMPLE
from inference_svc.context_reuse.selectors import SELECTORS, TokenSelector
from inference_svc.context_reuse.selectors.selector import question_rows, recompute_cost
from inference_svc.context_reuse.shipped_verdicts import shipped_verdict
from inference_svc.models.loader import load

DOCUMENTS = 10


def retrieved(tokenizer: Any, tokens: int, rng: random.Random) -> list[str]:
    """Return ``DOCUMENTS`` texts of ``tokens`` tokens each from the sample."""
    lines = [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]
    ids = tokenizer(" ".join(part for line in lines if line["kind"] == "documents" for part in line["parts"]))
    starts = rng.sample(range(0, len(ids["input_ids"]) - tokens, tokens), DOCUMENTS)
    return [tokenizer.decode(ids["input_ids"][at : at + tokens]).strip() for at in starts]


def agreements(client: Client, asked: list[dict[str, str]], first: Completion, answer: Sequence[int]) -> list[bool]:
    """Return for each token of a full prefill's greedy answer whether reuse predicts it after the tokens before it.

    ``first`` is the answer with reuse to the prompt itself.
    """
    ids = client.tokenize(asked)
    later = (client.generate([*ids, *answer[:before]], max_tokens=1, temperature=0) for before in range(1, len(answer)))
    return [list(found.token_ids) == [token] for found, token in zip((first, *later), answer, strict=False)]


def messages(texts: list[str], order: int) -> list[dict[str, str]]:
    """Return a chat with the documents and a question, which is new for each order."""
    question = f"Using the texts, say in one sentence what matters most about point {order}."
    return [{"role": "user", "content": "\n\n".join([*texts, question])}]


@dataclass(frozen=True)
class Repair:
    """The repair of the model's verdict."""

    selector: TokenSelector
    ratio: float
    layers: int
    projection_share: float

    def cost(self, answer: Any, *, question: bool = True) -> float:
        """Return the expected cost of an answer's prefill as a share of a prefill without the cache."""
        uncached, moved = answer.prompt_tokens - answer.cached_tokens, answer.approximate_tokens
        share = question_rows(self.selector, uncached) / moved if question else 0.0
        relocated = recompute_cost(self.selector, self.ratio, self.layers, self.projection_share, share)
        return float(uncached + relocated * moved) / float(answer.prompt_tokens)


def measure(
    node: Node, tokenizer: Any, tokens: int, options: argparse.Namespace, repair: Repair, progress: Progress
) -> dict[str, Any]:
    """Measure documents of one length."""
    rng, client = random.Random(tokens), node.client()
    texts = retrieved(tokenizer, tokens, rng)
    client.generate(messages(texts, 0), max_tokens=1)
    warm, cold, same = [], [], []
    orders = progress.add_task(f"{tokens} tokens", total=options.orders - 1)
    for order in range(1, options.orders):
        node.settle()
        rng.shuffle(texts)
        asked = messages(texts, order)
        cold.append(client.generate(asked, max_tokens=options.answer_tokens, temperature=0, skip_cache=True))
        warm.append(client.generate(asked, max_tokens=1, temperature=0))
        same.append(agreements(client, asked, warm[-1], cold[-1].token_ids))
        progress.advance(orders)
    prompt, cached, again = (
        sum(getattr(one, name) for one in warm) for name in ("prompt_tokens", "cached_tokens", "recomputed_tokens")
    )
    ratio = min(one.ttft_ms for one in warm) / min(one.ttft_ms for one in cold)
    cost = fmean(repair.cost(one) for one in warm)
    without_question = fmean(repair.cost(one, question=False) for one in warm)
    return {
        "document_tokens": tokens,
        "orders": len(warm),
        "prompt_tokens": prompt // len(warm),
        "kept_ratio": round((cached - again) / (prompt - again), 4),
        "ttft_ms": round(min(one.ttft_ms for one in warm), 1),
        "ttft_ratio": round(ratio, 3),
        "cost": round(cost, 3),
        "ttft_over_cost": round(ratio / cost, 3),
        "ttft_over_cost_without_question": round(ratio / without_question, 3),
        "agreement": round(fmean(one for answer in same for one in answer), 3),
        "compared": sum(map(len, same)),
        "equal_first_tokens": round(fmean(answer[0] for answer in same), 3),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser: argparse.ArgumentParser = report.parser("retrieval", (__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=DEFAULT, help="a model with a shipped verdict")
    parser.add_argument("--document-tokens", type=report.at_least(1), nargs="+", default=[60, 130, 400])
    parser.add_argument("--orders", type=report.at_least(1), default=10)
    parser.add_argument("--answer-tokens", type=report.at_least(1), default=16)
    options = parser.parse_args(arguments)
    if options.quick:
        options.document_tokens, options.orders, options.answer_tokens = [60], 4, 4
    loaded = load(options.model)
    verdict = shipped_verdict(loaded.descriptor(16))
    if verdict is None:
        raise SystemExit(f"{options.model} has no shipped verdict for {loaded.dtype}")
    repair = Repair(SELECTORS[verdict.strategy], verdict.ratio, loaded.layers, loaded.projection_share)
    tokenizer = loaded.tokenizer
    del loaded
    with Node(options.model, worker_flags={"reuse_anywhere": True}) as node, report.progress() as progress:
        rows = [measure(node, tokenizer, tokens, options, repair, progress) for tokens in options.document_tokens]
    summary = {
        "least_kept_ratio": min(row["kept_ratio"] for row in rows),
        "most_ttft_over_cost": max(row["ttft_over_cost"] for row in rows),
        "least_agreement": min(row["agreement"] for row in rows),
        "agreement_of_verdict": round(verdict.top1_agreement, 3),
    }
    return report.write(options, "retrieval", rows, summary)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
