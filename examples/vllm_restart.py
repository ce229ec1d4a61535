"""vLLM over a restart. Run it in vLLM's environment: python examples/vllm_restart.py --model MODEL

Starts a cache daemon and vLLM with our connector, sends a long prompt, and restarts vLLM. It then sends the same prompt
again, which vLLM loads from the daemon. `docs/engines.md` describes the environment. MODEL is a folder or a repository
on Hugging Face's hub.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONNECTOR = {
    "kv_connector": "KVSidecarConnector",
    "kv_connector_module_path": "kvsidecar.integrations.vllm",
    "kv_role": "kv_both",
}
PROMPT = "The harbour office keeps a list of all boats that stay over night, with their length and their owner. " * 40


@contextmanager
def process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Context manager that runs a command, with its output in ``log``; stops the command at the end."""
    with log.open("ab") as output:
        running = subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=output)
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(timeout=120)


@contextmanager
def vllm(model: str, environment: dict[str, str], folder: Path, seconds: float) -> Iterator[str]:
    """Context manager that runs vLLM's OpenAI server with our connector; yields the URL when the server is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--port", str(port), "--model", model, "--served-model-name", "model", "--max-model-len", "2048"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
    log = folder / "vllm.log"
    with process([*command, "--kv-transfer-config", json.dumps(CONNECTOR)], environment, log) as running:
        deadline = time.monotonic() + seconds
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                if running.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"vLLM does not serve:\n{log.read_text()[-2000:]}") from None
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"


def complete(url: str) -> tuple[float, int]:
    """Sends the prompt; returns the seconds until the answer, and the number of tokens from the daemon."""
    body = json.dumps({"model": "model", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    began = time.monotonic()
    urllib.request.urlopen(request, timeout=600).close()
    seconds = time.monotonic() - began
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    loaded = [line for line in lines if line.startswith("vllm:external_prefix_cache_hits_total")]
    return seconds, sum(int(float(line.rsplit(" ", 1)[1])) for line in loaded)


def main() -> None:
    parser = argparse.ArgumentParser(description="A prompt that is warm after vLLM's restart.")
    parser.add_argument("--model", required=True, help="a folder or a hub id that vLLM serves")
    parser.add_argument("--start-seconds", type=float, default=600, help="longest start of vLLM")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvsidecar-example-") as name:
        folder = Path(name)
        here = {"KVSIDECAR_CACHE_SOCKET": str(folder / "cache.sock")}
        daemon = [str(Path(sys.executable).with_name("kvsidecar")), "daemon", "--socket", str(folder / "cache.sock")]
        with process([*daemon, "--store", str(folder / "store")], {}, folder / "daemon.log"):
            for start in ("first", "second"):
                with vllm(arguments.model, here, folder, arguments.start_seconds) as url:
                    seconds, loaded = complete(url)
                    print(f"{start} start of vLLM: {seconds:.1f} s, {loaded} prompt tokens loaded from the daemon")


if __name__ == "__main__":
    main()
