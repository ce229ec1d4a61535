"""``kvsidecar quantize MODEL --out DIR``: writes a model at 4 bits and reports its quality."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from kvsidecar.byte_sizes import format_size
from kvsidecar.cli.flags import FlagParser
from kvsidecar.cli.service_settings import configure_logging
from kvsidecar.errors import KVSidecarError, ModelUnsupported
from kvsidecar.models.checkpoint_files import weight_files
from rich.console import Console
from rich.table import Table

from inference_svc.models.architectures import check_architecture
from inference_svc.models.device_choice import pick_device, pick_dtype
from inference_svc.models.gguf.gguf_loader import convert_gguf, open_source
from inference_svc.models.loader import quiet_transformers
from inference_svc.models.mkl_determinism import make_mkl_deterministic
from inference_svc.models.model_check import check_dtypes, check_folder
from inference_svc.models.model_resolver import resolve
from inference_svc.models.pretrained_files import read_config, read_tokenizer
from inference_svc.models.progress_bar import progress_bar
from inference_svc.models.random_models import PREFIX
from inference_svc.models.safetensors_writer import SafetensorsWriter
from inference_svc.models.tied_head import untie_own_head
from inference_svc.quantize import calibration_texts
from inference_svc.quantize.layerwise_quantizer import LayerwiseQuantizer, QualityReport
from inference_svc.quantize.quantized_checkpoint import REPORT, building, check_output, write_metadata
from inference_svc.quantize.scale_folding import FAMILIES, check_quantizable

_ABOUT = f"""\
Writes a model with its linear weights at 4 bits, in the format of AutoAWQ (GEMM), which this server and
others read: about a quarter of 16 bits, and as much less to read for every token.

The model reads calibration text, layer by layer, and the weights of important inputs are rounded finer (AWQ,
activation-aware weight quantization). The report compares perplexity on other text (lower is better): of the
original, plainly rounded and written models. Use text similar to the model's later prompts: --text FILE, of
which the last tenth is kept for the evaluation.

It runs on the CPU and takes memory for one layer and the text, not for the model. Embeddings, norms and the
head stay at 16 bits. Models: {", ".join(FAMILIES)}."""
_EXAMPLES = """\
examples:
  kvsidecar quantize smollm2 --out ./smollm2-4bit
  kvsidecar quantize ./my-model --out ./my-model-4bit --text conversations.txt
  kvsidecar serve --model ./my-model-4bit

Exit status: 0 written, 2 not, and then nothing is left at --out."""


@dataclass(frozen=True)
class QuantizeReport:
    """Result of a quantization. Sizes are those of the weight files."""

    model: str
    out: str
    group_size: int
    size_bytes: int
    quantized_size_bytes: int
    tokens_read: int
    tokens_measured: int
    seconds: float
    measured: QualityReport

    def as_dict(self) -> dict[str, object]:
        found: dict[str, object] = asdict(self)
        del found["measured"]
        return found | asdict(self.measured)


def parser() -> argparse.ArgumentParser:
    out = FlagParser(
        prog="kvsidecar quantize",
        usage="%(prog)s MODEL --out DIR [--text FILE] [--json]",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("model", metavar="MODEL", help="as `kvsidecar serve` takes it, not quantized yet; or a GGUF file")
    out.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write it; must not be there yet")
    out.add_argument("--text", type=Path, metavar="FILE", help="text to read and measure (UTF-8); a sample is built in")
    out.add_argument("--json", action="store_true", help="print the report as JSON")
    return out


def quantize(name: str, out: Path, text: Path | None) -> QuantizeReport:
    """Write a model at 4 bits. Raises KVSidecarError, and then leaves no files at ``out``."""
    began = time.perf_counter()
    out = out.absolute()
    check_output(out)
    folder = _folder_of(name)
    config = read_config(folder)
    architecture = (config.architectures or ["(none named)"])[0]
    check_quantizable(architecture, config)
    check_architecture(architecture, config)
    tokenizer = read_tokenizer(folder)
    try:
        untie_own_head(config, folder)
        work = LayerwiseQuantizer(folder, config)
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnsupported(f"cannot read the model in {folder}: {error}") from error
    windows = [w for w in (config.max_position_embeddings, getattr(config, "sliding_window", None)) if w]
    length = min(calibration_texts.TOKENS, *windows)
    found = (
        calibration_texts.built_in(tokenizer, length)
        if text is None
        else calibration_texts.of_file(text, tokenizer, length)
    )
    tensors = work.specs()
    size = sum(tensor.size_bytes for tensor in tensors)
    with building(out, size) as partial:
        write_metadata(folder, partial, work.group, bool(config.tie_word_embeddings))
        with (
            progress_bar("quantizing") as progress,
            SafetensorsWriter(partial / "model.safetensors", tensors) as weights,
        ):
            measured = work.run(found, weights, progress)
        before = sum(f.stat().st_size for f in weight_files(folder))
        counts = (found.calibration.numel(), found.evaluation.numel())
        seconds = round(time.perf_counter() - began, 1)
        report = QuantizeReport(name, str(out), work.group, before, size, *counts, seconds, measured)
        (partial / REPORT).write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
    return report


def _folder_of(name: str) -> Path:
    if name.startswith(PREFIX):
        raise ModelUnsupported(f"{name} has random weights, which there is nothing to gain from; name a trained model")
    found = resolve(name)
    if found.is_file():
        source = open_source(found)
        found = convert_gguf(source, pick_dtype("auto", source.dtype, pick_device("cpu")))
    check_folder(found)
    check_dtypes(found)
    return found


def table(report: QuantizeReport) -> Table:
    """Format the report as a table."""
    measured = report.measured
    out = Table(box=None, padding=(0, 2), pad_edge=False)
    for name in ("", "before", "plainly rounded", "AWQ"):
        out.add_column(name, justify="left" if not name else "right", no_wrap=True)
    out.add_row("weights", format_size(report.size_bytes), *2 * [format_size(report.quantized_size_bytes)])
    found = (measured.perplexity, measured.plain_perplexity, measured.awq_perplexity)
    out.add_row("perplexity", *(f"{p:.3f}" for p in found))
    out.add_row("", "", *(f"{100 * (p / measured.perplexity - 1):+.2f} %" for p in found[1:]))
    out.add_row("error of a layer's outputs", "", f"{measured.plain_error:.3%}", f"{measured.awq_error:.3%}")
    return out


def _ended(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    configure_logging("info" if sys.stderr.isatty() else "warning")
    quiet_transformers()
    make_mkl_deterministic()
    before = signal.signal(signal.SIGTERM, _ended)  # SIGTERM raises an exception, so that temporary files are removed
    try:
        report = quantize(options.model, options.out, options.text)
    except (KVSidecarError, OSError) as error:
        print(f"kvsidecar quantize: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
    if options.json:
        json.dump(report.as_dict(), sys.stdout, indent=1)
        sys.stdout.write("\n")
        return 0
    console = Console()
    console.print(table(report))
    console.print(
        f"4 bits in groups of {report.group_size}; {report.tokens_read:,} tokens read, perplexity of "
        f"{report.tokens_measured:,} others; {report.seconds:.0f} s\n"
        f"kvsidecar serve --model {report.out}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0
