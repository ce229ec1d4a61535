"""Dashboard and alerts against the exported metrics."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.grafana import generate
from deploy.grafana.exported import exported
from deploy.grafana.panels import ROWS
from deploy.prometheus import operator
from tests.deploy.manifests import DEPLOY, of_kind

RULES = [rule for group in yaml.safe_load(operator.RULES.read_text())["groups"] for rule in group["rules"]]
TOOLS = Path(__file__).parents[2] / "build" / "tools" / "usr" / "bin"


def test_the_dashboard_is_current() -> None:
    assert generate.main(["--check"]) == 0


def test_every_metric_is_on_the_dashboard_once_or_more() -> None:
    model = json.loads(generate.FILE.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in model["panels"] for target in panel.get("targets", ())]
    shown = {name for query in queries for name in generate.metrics_in(query)}
    assert shown == exported().keys()


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in generate.dashboard()["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & own
        assert at["x"] + at["w"] <= 24
        cells |= own


def test_counters_are_shown_as_rates() -> None:
    kinds = exported()
    for panel in (panel for row in generate.rows().values() for panel in row):
        for _, query in panel.queries:
            for name in generate.metrics_in(query):
                assert (f"rate({name}" in query) == (kinds[name] != "gauge"), query


def test_a_metric_that_nobody_exports_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = generate.Panel("wrong", "short", (("", "kvsidecar_cache_hits"),))
    monkeypatch.setitem(ROWS, "wrong", (wrong,))
    with pytest.raises(ValueError, match="no process exports kvsidecar_cache_hits"):
        generate.dashboard()


def test_alerts_go_by_metrics_that_exist() -> None:
    for rule in RULES:
        assert generate.metrics_in(rule["expr"]) <= exported().keys(), rule["alert"]


def test_the_operators_alerts_are_the_same() -> None:
    assert operator.main(["--check"]) == 0
    (resource,) = of_kind("base", "PrometheusRule")
    assert [r for group in resource["spec"]["groups"] for r in group["rules"]] == RULES


def test_every_alert_is_in_the_runbook() -> None:
    page = (DEPLOY.parent / "docs" / "operations" / "monitoring.md").read_text(encoding="utf-8")
    assert [r["alert"] for r in RULES if f"| `{r['alert']}` |" not in page] == []


def test_alerts_fire_when_they_should() -> None:
    promtool = shutil.which("promtool") or shutil.which("promtool", path=str(TOOLS))
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    for command in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(
            [promtool, *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_autoscaler_asks_for_a_metric_that_the_adapter_serves() -> None:
    (scaler,) = of_kind("base", "HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    (rule,) = yaml.safe_load((DEPLOY / "prometheus" / "adapter.yaml").read_text())["rules"]
    name = metric["pods"]["metric"]["name"]
    assert name in exported()
    assert rule["name"]["matches"] == f"^{name}$"
