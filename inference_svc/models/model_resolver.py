"""Resolves model names to files. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from kvsidecar.errors import ModelUnsupported, Unavailable
from kvsidecar.models import hub
from kvsidecar.models.catalogue import CATALOGUE
from kvsidecar.models.gguf_parts import first_parts
from kvsidecar.models.model_library import BUILT_IN, ModelLibrary

DEMO_MODEL = Path(__file__).parent.parent / "demo_model"


def resolve(name: str, library: ModelLibrary | None = None) -> Path:
    """Find a model's folder of safetensors or GGUF file.

    ``name`` is ``demo``, a pulled model, a path, or a hub id, which is downloaded. A pulled model has precedence over a
    folder of the same name; ``./NAME`` is always the folder. Raises ModelUnsupported with advice.
    """
    if name == BUILT_IN:
        return DEMO_MODEL
    library = library or ModelLibrary()
    pulled, path = library.find(name), Path(name)
    if pulled is not None:
        return pulled
    if path.is_file():
        return path
    if path.is_dir():
        return _in_folder(path)
    if name in CATALOGUE:
        raise ModelUnsupported(f"{name} is not here yet; fetch it with: kvsidecar pull {name}")
    if hub.is_hub_id(name) and not name.startswith((".", "/")):
        return _from_hub(name)
    there = ", ".join([*CATALOGUE, *(e.name for e, _ in library.entries() if e.name not in CATALOGUE)])
    raise ModelUnsupported(
        f"{name!r} is neither 'demo', 'shape:NAME', a folder, a GGUF file, a hub id (ORG/NAME), nor one of {there}"
    )


def _in_folder(folder: Path) -> Path:
    """Return the folder if it has safetensors. If not, return its only GGUF file, or the first part of that file."""
    packed = [folder / name for name in first_parts(file.name for file in folder.glob("*.gguf"))]
    if not packed or any(folder.glob("*.safetensors")):
        return folder
    if len(packed) > 1:
        raise ModelUnsupported(f"{folder} holds {len(packed)} GGUF files; name one of {', '.join(map(str, packed))}")
    return packed[0]


def _from_hub(name: str) -> Path:
    try:
        chosen = hub.select_files(name)
        return hub.fetch(chosen) / chosen.gguf
    except (ModelUnsupported, Unavailable) as error:
        cached = hub.fetched_before(name) if isinstance(error, Unavailable) else None
        if cached is not None:
            return cached
        raise ModelUnsupported(
            f"{name!r} is neither 'demo', 'shape:NAME', a folder, a GGUF file, nor a model that the hub could give: "
            f"{error}"
        ) from error
