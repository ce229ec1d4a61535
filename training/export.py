"""Evaluation of a trained demo model and export of its release folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from training import bpe, tasks
from training.training_rows import RowGenerator

if TYPE_CHECKING:
    from training.train import TrainingRun

JUDGED_FACTS, JUDGED_FILLER = 4, 12  # facts and maximum filler words per sample, for the published accuracies


def evaluate(run: TrainingRun, samples: int) -> dict[str, float]:
    """Return held-out loss (nats per token) and exact-match accuracy per task.

    The samples are new, and each has ``JUDGED_FACTS`` facts.
    """
    model = run.model.eval().float()
    source = RowGenerator(run.tokenizer, run.held_out, seed=10**9)
    report: dict[str, float] = {}
    with torch.inference_mode():
        losses = []
        for start in range(0, min(len(run.held_out) - 513, 512 * 64), 512):
            ids = torch.from_numpy(run.held_out[start : start + 513].astype(np.int64))[None].to(model.device)
            losses.append(float(F.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:])))
        report["held_out_loss"] = sum(losses) / len(losses)
        for name in tasks.TASKS:
            right = total = 0
            for _ in range(samples):
                row = source.task(name, JUDGED_FACTS, JUDGED_FILLER)
                assert row.learned is not None
                logits = model(torch.tensor([row.tokens]).to(model.device)).logits[0]
                right += sum(int(logits[i - 1].argmax()) == token for i, token in row.learned.items())
                total += len(row.learned)
            report[name] = right / total
    return report


def export(run: TrainingRun, folder: Path, samples: int) -> None:
    """Write the model in bfloat16, the tokenizer, the model card, and its figures as ``accuracy.json``."""
    report = evaluate(run, samples)
    run.model.to(torch.bfloat16).save_pretrained(folder)
    bpe.save(run.tokenizer, folder)
    facts = {"step": run.progress.step, "seconds": round(run.progress.seconds), **report}
    (folder / "accuracy.json").write_text(json.dumps(facts, indent=2) + "\n")
    (folder / "README.md").write_text(model_card(run, facts))
    print(json.dumps(facts, indent=2))


def model_card(run: TrainingRun, facts: dict[str, float]) -> str:
    """Return the model's README with the measured figures."""
    parameters = sum(p.numel() for p in run.model.parameters())
    layers = run.model.config.num_hidden_layers
    lines = [f"| {name} | {facts[name]:.3f} |" for name in tasks.TASKS]
    return f"""# KVSidecar's built-in model

Qwen2 architecture, {layers} layers of width {run.options.width}, {parameters / 1e6:.1f} M parameters, bfloat16, context
4096 tokens (trained on up to 2048), byte-level BPE of {run.tokenizer.get_vocab_size()} tokens with a chat template. It
exists so that the project runs, is tested and is demonstrated without a model hub; it is no assistant.

Trained by `python -m training.train` for {facts["step"]:.0f} steps ({facts["seconds"] / 60:.0f} minutes on two shared
CPU cores): copying, then look-up tasks over several documents with fresh names in every sample, then language beside
them. On the way the attention of a layer that looks up was copied into a later, idle one
(docs/adr/031-two-hop-training.md), and six layers became twelve.

Held-out loss on dialogues and documents: {facts["held_out_loss"]:.2f} nats per token. Exact-match accuracy with four
facts in up to eight documents, fresh samples (chance is about 0.25):

| task | accuracy |
|---|---|
{chr(10).join(lines)}

A task below 0.95 has not been learned and proves nothing about reuse.

Training texts: DSTC8 Schema-Guided Dialogue (CC BY-SA 4.0), Taskmaster-4 (CC BY 4.0), Python PEPs (public domain or
CC0), Rust RFCs (MIT or Apache-2.0). The weights are released under the project's MIT licence.
"""
