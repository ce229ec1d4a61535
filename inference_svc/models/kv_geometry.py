"""KV geometry of a model, read from its configuration without loading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16, DATA_TYPE_FLOAT16, DATA_TYPE_FLOAT32, DataType
from kvsidecar.chunk_layout import Geometry
from kvsidecar.errors import ModelUnsupported

from inference_svc.models.model_resolver import resolve
from inference_svc.models.random_models import PREFIX, values_of

DTYPES: dict[str, DataType.ValueType] = {
    "float32": DATA_TYPE_FLOAT32,
    "float16": DATA_TYPE_FLOAT16,
    "bfloat16": DATA_TYPE_BFLOAT16,
}


def geometry_of(name: str, dtype: str) -> Geometry:
    """Return the geometry of a model's 16-bit chunks. Raises ModelUnsupported.

    ``dtype`` is the type that the model computes in; ``auto`` is the checkpoint's dtype, as the loader chooses it.
    """
    try:
        values = _values(name)
        values |= values.get("text_config") or {}
        if dtype == "auto":
            stored = values.get("dtype") or values.get("torch_dtype")
            dtype = stored if stored in DTYPES else "float32"
        heads = int(values["num_attention_heads"])
        return Geometry(
            int(values["num_hidden_layers"]),
            int(values.get("num_key_value_heads") or heads),
            int(values.get("head_dim") or values["hidden_size"] // heads),
            DTYPES[dtype],
            16,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelUnsupported(f"the configuration of {name} does not say how many keys it keeps: {error}") from error


def _values(name: str) -> dict[str, Any]:
    if name.startswith(PREFIX):
        return {"dtype": "bfloat16", **values_of(name)}
    found = resolve(name)
    return _of_gguf(found) if found.is_file() else _of_folder(found)


def _of_folder(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"cannot read {file}: {error}") from error
    return values if isinstance(values, dict) else {}


def _of_gguf(path: Path) -> dict[str, Any]:
    from inference_svc.models.gguf.gguf_file import read_gguf  # imported here because other models need no reader

    file = read_gguf(path)

    return {
        "num_hidden_layers": file.need("block_count"),
        "num_attention_heads": file.need("attention.head_count"),
        "num_key_value_heads": file.get("attention.head_count_kv"),
        "head_dim": file.head_dim,
        "dtype": file.dtype,
    }
