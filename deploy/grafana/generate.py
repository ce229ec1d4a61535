"""Generator of the Grafana dashboard kvsidecar.json: python -m deploy.grafana.generate [--check].

The dashboard has the panels of panels.py, and one panel for every other exported metric. With --check, the command
writes nothing, and its exit code is 1 if the file is stale.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from deploy.grafana.exported import exported
from deploy.grafana.panels import ROWS, Panel, quantile, rate

FILE = Path(__file__).with_name("kvsidecar.json")
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _ACROSS = 24, 8, 3
# Matches exactly one series of each of our processes and of each vLLM engine with our connector.
_OURS = '__name__=~"kvsidecar_build_info|vllm:kvsidecar_attached"'
_SELECTED, _NAMESPACE = 'job=~"$job",instance=~"$instance"', ',namespace=~"$namespace"'
_BY_NAMESPACE = "kvsidecar_engine_"


def metrics_in(expression: str) -> set[str]:
    """Return the names of the metrics in a query; histograms without ``_bucket``, ``_sum`` and ``_count``."""
    found = re.findall(r"\b(?:kvsidecar_|vllm:|gen_ai_server_)[a-z0-9_]+", expression)
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


def selected(expression: str) -> str:
    """Restrict a query to the jobs, instances and namespaces that the dashboard's variables select."""

    def with_labels(found: re.Match[str]) -> str:
        labels = _SELECTED + (_NAMESPACE if found[1].startswith(_BY_NAMESPACE) else "")
        return f"{found[1]}{{{labels}{',' if found[2] else '}'}"

    return re.sub(r"\b((?:kvsidecar_|vllm:|gen_ai_server_)[a-z0-9_]+)(\{)?", with_labels, expression)


def rows() -> dict[str, tuple[Panel, ...]]:
    """Return ``ROWS`` and a row for all other metrics. Raises ValueError if a query has an unknown metric."""
    known = exported()
    shown = {name for row in ROWS.values() for panel in row for _, query in panel.queries for name in metrics_in(query)}
    if unknown := shown - known.keys():
        raise ValueError(f"no process exports {', '.join(sorted(unknown))}")
    rest = []
    for name in sorted(known.keys() - shown):
        title, unit = name.removeprefix("kvsidecar_").replace("_", " "), "s" if name.endswith("_seconds") else "short"
        if known[name] == "histogram":
            rest.append(Panel(title, unit, tuple((f"p{round(q * 100)}", quantile(q, name)) for q in (0.5, 0.95))))
        else:
            query = rate(name) if known[name] == "counter" else f"sum({name})"
            rest.append(Panel(title, "short", (("", query),)))
    return {**ROWS, "All other metrics": tuple(rest)}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in rows().items():
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": _place(0, y, _WIDTH, 1)})
        across = 4 if len(row) == 4 else _ACROSS
        width = _WIDTH // across
        for i, panel in enumerate(row):
            at = _place(i % across * width, y + 1 + i // across * _HEIGHT, width, _HEIGHT)
            panels.append(_graph(panel, at))
        y += 1 + -(-len(row) // across) * _HEIGHT
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    namespaces = _variable("namespace", f",{_SELECTED}", f'__name__="{_BY_NAMESPACE}loads_total"')
    return {
        "uid": "kvsidecar",
        "title": "KVSidecar",
        "tags": ["llm", "kv-cache"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [source, _variable("job"), _variable("instance", ',job=~"$job"'), namespaces]},
        "panels": panels,
    }


def _variable(label: str, selector: str = "", metrics: str = _OURS) -> dict[str, Any]:
    """Return a dashboard variable whose choices are a label's values in our metrics; all are selected by default."""
    query = f"label_values({{{metrics}{selector}}}, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": query,
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _graph(panel: Panel, at: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + i),
            "datasource": _DATASOURCE,
            "expr": selected(query),
            "legendFormat": legend or "__auto",
        }
        for i, (legend, query) in enumerate(panel.queries)
    ]
    custom = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
    limits = {"min": 0, "max": 1} if panel.unit == "percentunit" else {"min": 0}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom, **limits}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def text_of(model: dict[str, Any]) -> str:
    """Return the dashboard as JSON with one line per panel, so that diffs are readable."""
    lines = ",\n  ".join(json.dumps(panel) for panel in model["panels"])
    head = json.dumps({**model, "panels": []}, indent=1)
    return head.replace('"panels": []', f'"panels": [\n  {lines}\n ]') + "\n"


def main(arguments: list[str]) -> int:
    """Write or check the dashboard. Return the exit code, which is 1 if --check finds a stale file."""
    text = text_of(dashboard())
    if "--check" not in arguments:
        FILE.write_text(text, encoding="utf-8")
        return 0
    if FILE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{FILE} is stale; run: python -m deploy.grafana.generate", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
