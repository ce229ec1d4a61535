"""Cost of 8-bit and 4-bit storage: exact reuse against full prefill, by dtype and prompt.

The prompts are those of ``kvsidecar verify``: documents and a question. The documents are stored and loaded at their
own positions, and the question is computed. KL is in nats per token of the question. ``equal_of_16`` is the number of
equal tokens at the beginning of the 16 greedy tokens of the answer.
"""

from __future__ import annotations

import argparse
from itertools import takewhile
from typing import Any

import numpy as np

from benchmarks import report
from inference_svc.context_reuse.question import BUILT_IN, Question, read_questions
from inference_svc.context_reuse.reuse_lab import LabResult, ReuseLab
from inference_svc.context_reuse.selectors import SELECTORS
from inference_svc.models.loader import load, quiet_transformers

BITS = (16, 8, 4)
_GO_ON = 16


def measure_widths(model: str, dtype: str, questions: list[Question]) -> list[dict[str, Any]]:
    """Return one row per storage width."""
    lab = ReuseLab(load(model, dtype=dtype))
    pairs = [pair for question in questions for pair in _against_full(lab, question)]
    return [_row(dtype, bits, [(full, got) for b, full, got in pairs if b == bits]) for bits in BITS]


def _against_full(lab: ReuseLab, question: Question) -> list[tuple[int, LabResult, LabResult]]:
    tokenizer = lab.loaded.tokenizer
    head = tokenizer("", add_special_tokens=True)["input_ids"] or [tokenizer.bos_token_id or 0]
    parts = [tokenizer(d + "\n\n", add_special_tokens=False)["input_ids"] for d in question.documents]
    read = lab.documents(head, parts)
    tokens = read.tokens + tokenizer(question.question, add_special_tokens=False)["input_ids"]
    at = np.arange(len(read.tokens), len(tokens))
    full, none = lab.full_prefill(tokens, at, go_on=_GO_ON), SELECTORS["none"]
    return [(b, full, lab.reuse(tokens, read.stored(b), [], none, 0.0, at, go_on=_GO_ON)) for b in BITS]


def _row(dtype: str, bits: int, pairs: list[tuple[LabResult, LabResult]]) -> dict[str, Any]:
    kl, same, equal = [], [], []
    for full, got in pairs:
        p, q = full.logits.log_softmax(-1), got.logits.log_softmax(-1)
        kl += (p.exp() * (p - q)).sum(-1).clamp_min(0).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
        answers = zip(full.greedy_tokens, got.greedy_tokens, strict=True)
        equal.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], answers)))
    return {
        "dtype": dtype,
        "bits": bits,
        "kl_mean": float(np.mean(kl)),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "agreement": float(np.mean(same)),
        "answers_equal": sum(e == _GO_ON for e in equal) / len(equal),
        "equal_of_16": float(np.mean(equal)),
        "prompts": len(pairs),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    quiet_transformers()
    questions = read_questions(BUILT_IN)[: options.prompts]
    rows = [row for dtype in options.dtypes.split(",") for row in measure_widths(options.model, dtype, questions)]
    summary = {f"{r['dtype']}_{r['bits']}_bits_agreement": round(r["agreement"], 4) for r in rows}
    return report.write(options, "storage_bits", rows, summary)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("storage_bits", __doc__ or "")
    parser.add_argument("--model", default="smollm2", help="a name of `kvsidecar models`, a folder, or demo")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--prompts", type=report.at_least(1), default=1000, help="maximum number of built-in prompts")
    options = parser.parse_args(arguments)
    if options.quick:
        options.prompts = min(4, options.prompts)
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
