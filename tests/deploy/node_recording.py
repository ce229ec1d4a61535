"""Recording of a node's metrics under load: python -m tests.deploy.node_recording.

The command scrapes gateway, worker and daemon of a real node while prompts with common prefixes arrive. It writes the
series of the dashboard's first row to recorded_node.json.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import httpx

from benchmarks.node import Node, free_port
from deploy.grafana import generate
from tests.inference_svc.gateway.conftest import of_node

FILE = Path(__file__).with_name("recorded_node.json")
INTERVAL_SECONDS, _SCRAPES = 5, 13
_DOCUMENT = "The daemon keeps keys and values of every chunk of this text. " * 30


def main() -> None:
    """Record a node's metrics and write the file."""
    ports = {"daemon": free_port(), "worker": free_port()}
    flags = {"metrics_port": ports["worker"], "resident_sequences": 0}
    series: dict[str, list[float | None]] = {}
    wanted = {
        name
        for panel in generate.rows()["Overview"]
        for _, query in panel.queries
        for name in generate.metrics_in(query)
    }
    with Node("demo", arena_bytes="64MiB", worker_flags=flags, daemon_flags={"metrics_port": ports["daemon"]}) as node:
        gateway, ended = of_node(node), threading.Event()

        def ask() -> None:
            number = 0
            while not ended.is_set():
                question = f"{_DOCUMENT} Question {number}: what does it keep?"
                gateway.post("/v1/completions", model="demo", prompt=question, max_tokens=8)
                number += 1

        asker = threading.Thread(target=ask)
        asker.start()
        try:
            ports["gateway"] = gateway.port
            for at in range(_SCRAPES):
                time.sleep(INTERVAL_SECONDS)
                for process, port in ports.items():
                    _scrape(process, httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text, at, wanted, series)
        finally:
            ended.set()
            asker.join()
            gateway.close()
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(values)}" for name, values in sorted(series.items()))
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _scrape(process: str, text: str, at: int, wanted: set[str], series: dict[str, list[float | None]]) -> None:
    """Add the samples of the wanted metrics from one scrape, with the labels that Prometheus would add."""
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        metric, _, labels = name.partition("{")
        if not line.startswith("#") and generate.metrics_in(metric) & wanted:
            target = f'job="node",instance="{process}:1"'
            rest = labels.rstrip("}")
            values = series.setdefault(f"{metric}{{{target}{',' if rest else ''}{rest}}}", [])
            values += [None] * (at - len(values)) + [float(value)]


if __name__ == "__main__":
    main()
