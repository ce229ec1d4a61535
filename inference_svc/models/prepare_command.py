"""``python -m inference_svc prepare MODEL``: converts a model ahead of its first start."""

from __future__ import annotations

import argparse
import sys

from kvsidecar.cli.service_settings import configure_logging
from kvsidecar.errors import KVSidecarError

from inference_svc.models.architectures import check_architecture
from inference_svc.models.device_choice import pick_device, pick_dtype
from inference_svc.models.gguf.gguf_loader import convert_gguf, open_source
from inference_svc.models.loader import quiet_transformers
from inference_svc.models.model_resolver import resolve
from inference_svc.models.pretrained_files import read_config


def main(arguments: list[str]) -> int:
    """Check and convert a model. Exit status: 0 ready, 1 the model cannot be served."""
    parser = argparse.ArgumentParser(prog="python -m inference_svc prepare", description=__doc__)
    parser.add_argument("model", help="a pulled model, a folder, a GGUF file, or a hub id")
    parser.add_argument("--device", default="auto", help="where it will run: auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", help="in which type: auto, float32, bfloat16 or, on CUDA, float16")
    options = parser.parse_args(arguments)
    configure_logging("info" if sys.stderr.isatty() else "warning")
    quiet_transformers()
    try:
        found = resolve(options.model)
        if found.is_file():
            source = open_source(found)
            found = convert_gguf(source, pick_dtype(options.dtype, source.dtype, pick_device(options.device)))
        config = read_config(found)
        check_architecture((config.architectures or ["(none named)"])[0], config)
    except (KVSidecarError, OSError, ValueError) as error:
        print(f"kvsidecar: {error}", file=sys.stderr)
        return 1
    return 0
