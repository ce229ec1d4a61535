"""``python -m benchmarks.systems.llama_quantize SOURCE TARGET KIND`` runs llama.cpp's quantizer on a GGUF file."""

from __future__ import annotations

import sys

import llama_cpp

_TYPES = {"q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}


def main() -> None:
    source, target, kind = sys.argv[1:]
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = _TYPES[kind]
    failed = llama_cpp.llama_model_quantize(source.encode(), target.encode(), settings)
    if failed:
        sys.exit(f"llama.cpp cannot quantize {source} to {kind}: status {failed}")


if __name__ == "__main__":
    main()
