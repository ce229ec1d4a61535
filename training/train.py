"""Training of the demo model: copying, then look-up tasks, then language.

A small transformer that begins with the look-up tasks stays at chance level for millions of tokens. So it first learns
to copy: a random span occurs again later in the row, and the loss covers only the repetition. Induction heads appear
after a few hundred steps, and the model then learns the tasks in a few hundred more.

The first stages train 6 layers. Then the model grows to 12: the new layers begin as identities (zero output
projections), so the model loses nothing that it has learned.

The command resumes from ``--work``; ``--minutes`` bounds one run. The step number seeds all randomness.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from kvkernels.device.visible_devices import has_cuda
from tokenizers import Tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from training import bpe, corpus, relocated_documents, tasks
from training.export import export
from training.training_rows import FACTS, FILLER, IGNORED, RowGenerator, TrainingRow, batch


@dataclass
class Progress:
    """State of a run that resumes, without weights and optimizer."""

    step: int = 0
    stage: str = "copy"
    facts: int = 3
    filler: int = 4
    seconds: float = 0.0
    accuracy: dict[str, float] = field(default_factory=dict)
    language_loss: float = 9.0


def new_model(vocabulary: int, layers: int, width: int) -> Qwen2ForCausalLM:
    """Create a Qwen2 model.

    Qwen2 has biases of queries and keys, unlike Llama. They make attention at a fixed distance possible, which
    induction heads need.
    """
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            initializer_range=0.02,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def grow(small: Qwen2ForCausalLM, layers: int, width: int) -> Qwen2ForCausalLM:
    """Spread the layers of ``small`` evenly over a deeper model. The layers between them begin as identities."""
    old = small.config.num_hidden_layers
    every = layers // old
    big = new_model(small.config.vocab_size, layers, width)
    state = {k: v for k, v in small.state_dict().items() if ".layers." not in k}
    big.load_state_dict(state, strict=False)
    for i, layer in enumerate(big.model.layers):
        if i % every == 0:
            layer.load_state_dict(small.model.layers[i // every].state_dict())
        else:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return big


def rows_for(progress: Progress, source: RowGenerator, size: int) -> list[TrainingRow]:
    """Return the training rows of a step, mixed for the current stage.

    Once the model has learned all look-up tasks, their rows get more facts and longer documents.
    """
    rng = source.rng
    if progress.stage == "copy":
        return [source.copy(24) for _ in range(size)]
    names = list(tasks.TASKS)
    weights = [1.1 - progress.accuracy.get(n, 0.0) for n in names]
    if progress.stage == "tasks":
        # Rows have at least 3 facts: with fewer, a random place of the context is right so often that training gets
        # stuck. The stage keeps some copy rows, because the model would otherwise unlearn to copy before the tasks need
        # it. Implied words teach the intermediate step of the tasks.
        learned = progress.accuracy.get("passkey", 0.0) > 0.8
        rows = [source.copy(24) for _ in range(size // (8 if learned else 3))]
        for name in rng.choices(names, weights if learned else [1, 1, 1, 2, 2], k=size - len(rows)):
            rows.append(source.task(name, rng.randint(3, progress.facts), progress.filler, implied=True))
        return rows
    if rng.random() < source.task_share:
        drawn = rng.choices(names, weights, k=size)
        return [source.task(name, rng.randint(2, progress.facts), progress.filler, implied=True) for name in drawn]
    length = rng.choice([128, 256, 256, 512, 1024, 2048] if progress.step % 8 == 0 else [128, 256])
    return [source.language(length) for _ in range(max(1, 4096 // length))]


def advance(progress: Progress) -> None:
    accuracy = progress.accuracy
    learned = [accuracy.get(n, 0.0) > 0.85 for n in tasks.TASKS]
    if progress.stage == "copy" and accuracy.get("copy", 0.0) > 0.93:
        progress.stage = "tasks"
    elif progress.stage == "tasks" and progress.step % 50 == 0:
        if all(learned) and progress.facts == FACTS and progress.filler == FILLER:
            progress.stage = "mix"
        elif all(learned):
            progress.facts = min(FACTS, progress.facts + 1)
            progress.filler = min(FILLER, progress.filler + 4)


class TrainingRun:
    """One run of the training loop over a work folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work = options, Path(options.work)
        self.work.mkdir(parents=True, exist_ok=True)
        tokenizer_file = self.work / "tokenizer.json"
        start: Path | None = options.start_from
        if start and not tokenizer_file.exists():
            tokenizer_file.write_bytes((start / "tokenizer.json").read_bytes())
        if not tokenizer_file.exists():
            bpe.train(options.dialogues, options.documents).save(str(tokenizer_file))
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.train_stream, self.held_out = corpus.encode(
            self.tokenizer, options.dialogues, options.documents, self.work / "tokens"
        )
        self.source_ids = {w: self.tokenizer.token_to_id(w) for w in bpe.SPECIAL_TOKENS}
        self.progress = Progress()
        self.model = new_model(self.tokenizer.get_vocab_size(), options.first_layers, options.width)
        self.optimizer = self._optimizer()
        if (self.work / "checkpoint.pt").exists():
            self._resume()
        elif start:
            self.model = Qwen2ForCausalLM.from_pretrained(start, dtype=torch.float32)
            self.optimizer = self._optimizer()
            facts = json.loads((start / "accuracy.json").read_text())
            self.progress = Progress(int(facts["step"]), "mix", FACTS, FILLER, float(facts["seconds"]))

    def _optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.model.parameters(), lr=self.options.lr, betas=(0.9, 0.98), weight_decay=0.01)

    def _resume(self) -> None:
        saved = torch.load(self.work / "checkpoint.pt", map_location=self.options.device, weights_only=True)
        self.progress = Progress(**saved["progress"])
        layers = saved["layers"]
        self.model = new_model(self.tokenizer.get_vocab_size(), layers, self.options.width)
        self.model.load_state_dict(saved["model"])
        self.model.to(self.options.device)  # the optimizer's state goes where the parameters are
        self.optimizer = self._optimizer()
        self.optimizer.load_state_dict(saved["optimizer"])
        print(f"resumed at step {self.progress.step}, stage {self.progress.stage}, {layers} layers", flush=True)

    def save(self) -> None:
        part = self.work / "checkpoint.part"
        torch.save(
            {
                "progress": asdict(self.progress),
                "layers": self.model.config.num_hidden_layers,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            },
            part,
        )
        part.replace(self.work / "checkpoint.pt")

    def step(self) -> float:
        progress, options = self.progress, self.options
        progress.step += 1
        warm = min(1.0, progress.step / 100)
        decay = max(0.1, min(1.0, 2.0 - 2.0 * progress.step / options.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = options.lr * warm * decay
        source = RowGenerator(self.tokenizer, self.train_stream, progress.step, options.task_share)
        if progress.stage == "mix" and source.rng.random() < options.relocated_share:
            loss = self._relocated_loss(source)
        else:
            loss = self._loss(rows_for(progress, source, options.batch))
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        advance(progress)
        if progress.step >= options.grow_at and self.model.config.num_hidden_layers < options.layers:
            self.model = grow(self.model, options.layers, options.width).to(options.device)
            self.optimizer = self._optimizer()
        return loss.item()

    def _loss(self, rows: list[TrainingRow]) -> torch.Tensor:
        options = self.options
        ids, labels = (x.to(options.device) for x in batch(rows))
        with torch.autocast(options.device, torch.bfloat16):
            hidden = self.model.model(ids).last_hidden_state[:, :-1]
            target = labels[:, 1:]
            chosen = target != IGNORED
            logits = self.model.lm_head(hidden[chosen])
        loss = F.cross_entropy(logits.float(), target[chosen])
        self._account(rows, chosen, logits.argmax(-1) == target[chosen], loss.item())
        return loss

    def _relocated_loss(self, source: RowGenerator) -> torch.Tensor:
        """Return the loss on questions about relocated documents."""
        rows = [source.latest_in_parts() for _ in range(self.options.batch)]
        with torch.autocast(self.options.device, torch.bfloat16):
            states, tokens, learned = relocated_documents.tails(self.model, rows, source.rng)
            target = tokens[learned]
            logits = self.model.lm_head(states[:, :-1][learned[:, 1:]])
        self._count("latest relocated", logits.argmax(-1) == target)
        return F.cross_entropy(logits.float(), target)

    def _account(self, rows: list[TrainingRow], chosen: torch.Tensor, right: torch.Tensor, loss: float) -> None:
        if rows[0].kind == "language":
            self.progress.language_loss += 0.05 * (loss - self.progress.language_loss)
            return
        row_of, at = chosen.nonzero().unbind(1)
        for i, row in enumerate(rows):
            # A learned token before the first question is an implied word, which has its own accuracy.
            asked = row.tokens.index(self.source_ids["<|ask|>"]) if self.source_ids["<|ask|>"] in row.tokens else 0
            self._count(row.kind, right[(row_of == i) & (at >= asked)])
            if asked and bool(((row_of == i) & (at < asked)).any()):
                self._count(f"{row.kind} implied", right[(row_of == i) & (at < asked)])

    def _count(self, kind: str, right: torch.Tensor) -> None:
        old = self.progress.accuracy.get(kind, 0.0)
        self.progress.accuracy[kind] = old + 0.02 * (float(right.float().mean()) - old)

    def loop(self) -> None:
        started, saved = time.time(), time.time()
        self.model.to(self.options.device)
        while self.progress.step < self.options.steps:
            tick = time.time()
            loss = self.step()
            now = time.time()
            self.progress.seconds += now - tick
            if self.progress.step % 50 == 0:
                shown = {k: round(v, 3) for k, v in sorted(self.progress.accuracy.items())}
                print(
                    f"{self.progress.step} {self.progress.seconds:.0f}s {self.progress.stage} loss {loss:.3f} "
                    f"language {self.progress.language_loss:.3f} facts {self.progress.facts} "
                    f"filler {self.progress.filler} {shown}",
                    flush=True,
                )
            if now - saved > 120:
                self.save()
                saved = now
            if now - started > self.options.minutes * 60:
                break
        self.save()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__.split("\n")[0])
    parser.add_argument("--dialogues", type=Path, nargs="+", required=True, help="JSONL files with a 'turns' list")
    parser.add_argument("--documents", type=Path, nargs="+", required=True, help="tar archives of .rst and .md files")
    parser.add_argument("--work", default="build/demo_model", help="checkpoint and token cache")
    parser.add_argument("--start-from", type=Path, help="exported model to continue from if there is no checkpoint")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--grow-at", type=int, default=8000, help="step at which the model gets its full depth")
    parser.add_argument("--task-share", type=float, default=0.6, help="share of the last stage's steps that are tasks")
    parser.add_argument(
        "--relocated-share",
        "--elsewhere-share",
        type=float,
        default=0.25,
        help="share of the last stage's steps with relocated documents",
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--first-layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", default="cuda" if has_cuda() else "cpu")
    parser.add_argument("--export", type=Path, help="evaluate, write the model to this folder and stop")
    parser.add_argument("--samples", type=int, default=200, help="samples per task for --export")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    run = TrainingRun(options)
    if options.export:
        export(run, options.export, options.samples)
    else:
        run.loop()


if __name__ == "__main__":
    main()
