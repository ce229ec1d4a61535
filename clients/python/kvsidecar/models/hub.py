"""Downloads models from a Hugging Face hub, and selects a repository's files.

``ORG/NAME`` selects the safetensors files or, in a repository without any, its only GGUF file. ``ORG/NAME:QUANT``
selects the GGUF file with that quantization. huggingface_hub's variables ``HF_ENDPOINT``, ``HF_TOKEN`` and ``HF_HOME``
apply. huggingface_hub is imported lazily: importing it takes as long as importing the rest of the command line.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path

from kvsidecar.errors import ModelUnsupported, Unavailable, first_line
from kvsidecar.models.gguf_parts import first_parts, part_names

_WANTED = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "LICENSE*", "NOTICE*")
_UNWANTED = ("*/*", "consolidated.safetensors")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:\w+)?")


@dataclass(frozen=True)
class HubSelection:
    """A model's files in one commit of a repository."""

    repository: str
    commit: str
    files: tuple[str, ...]
    size_bytes: int
    gguf: str  # the GGUF file or its first part; empty for safetensors
    licence: str


def is_hub_id(name: str) -> bool:
    return bool(_HUB_ID.fullmatch(name))


def select_files(name: str) -> HubSelection:
    """Select the files of ``ORG/NAME`` or ``ORG/NAME:QUANT``.

    Raises Unavailable when the hub gives no such repository, and ModelUnsupported when it has no suitable file.
    """
    from huggingface_hub import HfApi

    repository, _, wanted = name.partition(":")
    try:
        info = HfApi().model_info(repository, files_metadata=True)
    except _failures() as error:
        raise Unavailable(f"the hub {HfApi().endpoint} gave no {repository}: {first_line(error)}") from error
    sizes = {s.rfilename: s.size or 0 for s in info.siblings or []}
    files, gguf = _files(repository, list(sizes), wanted)
    licence = str(getattr(info.card_data, "license", "") or "")
    return HubSelection(repository, str(info.sha), tuple(files), sum(sizes[f] for f in files), gguf, licence)


def _files(repository: str, files: list[str], wanted: str) -> tuple[list[str], str]:
    packed = first_parts(f for f in files if f.endswith(".gguf"))
    if not wanted and any(f.endswith(".safetensors") and "/" not in f for f in files):
        return [f for f in files if _fits(f, _WANTED) and not _fits(f, _UNWANTED)], ""
    fitting = [f for f in packed if wanted.lower() in re.split(r"[.-]", f.lower())] if wanted else packed
    if len(fitting) == 1:
        notes = [f for f in files if _fits(f, ("LICENSE*", "NOTICE*"))]
        return [*part_names(fitting[0]), *notes], fitting[0]
    if not packed:
        raise ModelUnsupported(f"{repository} holds neither safetensors nor GGUF files")
    raise ModelUnsupported(
        f"{repository} holds {len(fitting)} GGUF files{f' quantized as {wanted}' if wanted else ''}; name one like "
        f"{repository}:Q4_K_M; there are {', '.join(packed)}"
    )


def _fits(file: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(file, pattern) for pattern in patterns)


def fetch(chosen: HubSelection, folder: Path | None = None) -> Path:
    """Download the files into a folder, or into huggingface_hub's cache. Raises Unavailable."""
    from huggingface_hub import snapshot_download

    # For a branch, huggingface_hub records the commit in its cache; without the record, fetched_before finds nothing.
    revision = "main" if folder is None else chosen.commit
    try:
        found = snapshot_download(
            chosen.repository, revision=revision, local_dir=folder, allow_patterns=list(chosen.files)
        )
    except _failures() as error:
        raise Unavailable(f"the hub did not give all of {chosen.repository}: {first_line(error)}") from error
    return Path(found)


def fetched_before(name: str) -> Path | None:
    """Return the folder or GGUF file of a hub id in huggingface_hub's cache, or None; uses no network."""
    from huggingface_hub import snapshot_download

    repository, _, wanted = name.partition(":")
    # A repository with safetensors must not resolve to a GGUF file because the cache lacks the safetensors.
    needed = [] if wanted else ["*.safetensors"]
    try:
        folder = Path(
            snapshot_download(repository, local_files_only=True, allow_patterns=needed, ignore_patterns=list(_UNWANTED))
        )
        here = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
        files, gguf = _files(repository, here, wanted)
    except _failures():
        return None
    except ModelUnsupported:  # none of the files in the cache is the model
        return None
    return folder / gguf if set(files) <= set(here) else None


def _failures() -> tuple[type[BaseException], ...]:
    """Return huggingface_hub's exceptions.

    The first one is the exception of its HTTP client, which depends on the version of huggingface_hub.
    """
    from huggingface_hub import errors

    client_error = errors.HfHubHTTPError.__bases__[0]
    return client_error, errors.HFValidationError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError
