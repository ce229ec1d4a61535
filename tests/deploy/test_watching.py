"""Dashboard and alerts against the exported metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from cache_daemon.observability import call_metrics
from deploy.grafana import generate
from deploy.grafana.exported import exported
from deploy.grafana.panels import ROWS
from deploy.prometheus import operator
from inference_svc.engine import engine
from tests.deploy import node_recording
from tests.deploy.manifests import BUILDS, DEPLOY, containers, of_kind

RULES = [rule for group in yaml.safe_load(operator.RULES.read_text())["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
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
        recorded = {rule["record"].partition(":")[2].partition(":")[0] for rule in RULES if "record" in rule}
        assert generate.metrics_in(rule["expr"]) <= exported().keys() | recorded, rule


def test_the_operators_alerts_are_the_same() -> None:
    assert operator.main(["--check"]) == 0
    (resource,) = of_kind("base", "PrometheusRule")
    assert [r for group in resource["spec"]["groups"] for r in group["rules"]] == RULES


def test_the_runbook_has_one_entry_for_every_alert_and_no_other() -> None:
    page = (DEPLOY.parent / "docs" / "operations" / "monitoring.md").read_text(encoding="utf-8")
    table = page.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    entries = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if "| `KVS" in line
    ]
    assert sorted(entry[0].strip("`") for entry in entries) == sorted(rule["alert"] for rule in ALERTS)
    for name, *cells in entries:
        assert len(cells) == 3, f"{name}: what users notice, what to look at, what to do"
        assert all(cells), name


def test_the_health_table_names_all_limits_after_which_a_process_is_restarted() -> None:
    page = (DEPLOY.parent / "docs" / "operations" / "monitoring.md").read_text(encoding="utf-8")
    table = page.partition("\n## Health\n")[2].partition("\n## ")[0]
    (daemon,) = [line for line in table.splitlines() if line.startswith('| `""`, `kvsidecar.cache')]
    (worker,) = [line for line in table.splitlines() if line.startswith('| `""`, `kvsidecar.inference')]
    assert (call_metrics._INTERNAL_SHARE, call_metrics._WINDOW_SECONDS, engine._MAX_STEP_SECONDS) == (0.5, 60, 60)
    assert f"at least {call_metrics._MIN_INTERNAL} and at least half of the calls of a method within a minute" in daemon
    assert f"longer than a minute (on a slow machine: than {engine._MAX_STEP_RATIO:g} times" in worker


def promtool(*arguments: str) -> None:
    program = shutil.which("promtool") or shutil.which("promtool", path=str(TOOLS))
    if program is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(
        [program, *arguments], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should() -> None:
    promtool("check", "rules", "alerts.yaml")
    promtool("test", "rules", "alerts_test.yaml")


def test_the_alert_of_kills_for_memory_finds_our_containers_in_a_cluster() -> None:
    (rule,) = [rule for rule in ALERTS if rule["alert"] == "KVSidecarOutOfMemory"]
    pods, names = (re.findall(rf'{label}=~"([^"]+)"', rule["expr"]) for label in ("pod", "container"))
    assert len(pods) == 2
    for build in BUILDS:
        for workload in of_kind(build, "StatefulSet", "DaemonSet", "Deployment"):
            assert all(re.fullmatch(pattern, f"{workload['metadata']['name']}-0") for pattern in pods)
            pod = workload["spec"]["template"]["spec"]
            long_running = [c["name"] for c in containers(pod) if "args" in c]
            assert all(re.fullmatch(pattern, name) for pattern in names for name in long_running), long_running


# Series of a node and of a vLLM engine, one value a minute, as their processes export them.
SCRAPED = {
    'kvsidecar_build_info{job="n",instance="a:1",process="gateway",version="1"}': "1x10",
    'kvsidecar_build_info{job="n",instance="a:2",process="worker",version="1"}': "1x10",
    'kvsidecar_build_info{job="n",instance="a:3",process="daemon",version="1"}': "1x10",
    'vllm:prefix_cache_queries_total{job="n",instance="a:1",engine="0"}': "0+600x10",
    'vllm:prefix_cache_hits_total{job="n",instance="a:1",engine="0"}': "0+60x10",
    'vllm:external_prefix_cache_hits_total{job="n",instance="a:1",engine="0"}': "0+300x10",
    'vllm:prefix_cache_queries_total{job="v",instance="v:1",engine="0"}': "0+600x10",
    'vllm:prefix_cache_hits_total{job="v",instance="v:1",engine="0"}': "0+0x10",
    'vllm:external_prefix_cache_hits_total{job="v",instance="v:1",engine="0"}': "0+540x10",
    'vllm:kvsidecar_attached{job="v",instance="v:1",engine="0"}': "0x10",
    'kvsidecar_gateway_requests_total{job="n",instance="a:1",path="/v1/chat/completions",code="200"}': "0+30x10",
    'kvsidecar_gateway_requests_total{job="n",instance="a:1",path="/v1/messages",code="503"}': "0+10x10",
    'kvsidecar_gateway_requests_total{job="n",instance="a:1",path="/health",code="503"}': "0+999x10",
    'kvsidecar_cache_durable_failing{job="n",instance="a:3"}': "1x10",
    'kvsidecar_cache_remote_failing{job="n",instance="a:3"}': "0x10",
    'kvsidecar_cache_oom_kills_total{job="n",instance="a:3"}': "0+1x10",
    'kvsidecar_cache_arena_used_bytes{job="n",instance="a:3"}': "75x10",
    'kvsidecar_cache_arena_bytes{job="n",instance="a:3"}': "100x10",
    'kvsidecar_cache_durable_bytes{job="n",instance="a:3"}': "50x10",
    'kvsidecar_cache_durable_budget_bytes{job="n",instance="a:3"}': "200x10",
    'kvsidecar_worker_pool_free_pages{job="n",instance="a:2"}': "10x10",
    'kvsidecar_worker_pool_pages{job="n",instance="a:2"}': "100x10",
    'kvsidecar_engine_load_seconds_total{job="n",instance="a:3",engine="vllm",namespace="ab"}': "0+1x10",
    'kvsidecar_engine_saved_prefill_seconds_total{job="n",instance="a:3",engine="vllm",namespace="ab"}': "0+4x10",
    'vllm:time_to_first_token_seconds_bucket{job="n",instance="a:1",le="1"}': "0+0x10",
    'vllm:time_to_first_token_seconds_bucket{job="n",instance="a:1",le="2"}': "0+60x10",
    'vllm:time_to_first_token_seconds_bucket{job="n",instance="a:1",le="+Inf"}': "0+60x10",
    'kvsidecar_cache_call_seconds_total{job="n",instance="a:3",method="Match"}': "0+3x10",
    'kvsidecar_cache_calls_total{job="n",instance="a:3",method="Match",status="OK"}': "0+60x10",
    'kvsidecar_cache_loop_stall_seconds{job="n",instance="a:3"}': "0.04x10",
}
ANSWERS = {
    "all engines": 0.75,
    "engines' own prefix caches": 0.05,
    "cache daemon": 0.7,
    "{{engine}}: time of loads per saved prefill time": 0.25,
    "{{process}} processes": 1,
    "failed share of answers": 0.25,
    "stores whose disk fails": 1,
    "daemons without their remote tier": 0,
    "processes killed for memory": 1,
    "vLLM engines without a daemon": 1,
    "arena": 0.75,
    "disk": 0.25,
    "workers' KV pools": 0.9,
    "time to first token, p95": 1.95,
    "Match, mean": 0.05,
    "stall of a daemon's event loop, longest": 0.04,
}


# Conditions on a recorded node under load: python -m tests.deploy.node_recording.
RECORDED_ANSWERS = {
    "all engines": "> 0.9",
    "engines' own prefix caches": "< 0.1",
    "cache daemon": "> 0.9",
    "{{engine}}: time of loads per saved prefill time": "< 0.5",
    "{{process}} processes": "== 1",
    "failed share of answers": "== 0",
    "stores whose disk fails": "== 0",
    "daemons without their remote tier": "== 0",
    "processes killed for memory": "== 0",
    "arena": "> 0.9",
    "disk": "< 0.5",
    "workers' KV pools": "< 0.1",
    "time to first token, p95": "< 1",
    "Match, mean": "< 0.1",
    "stall of a daemon's event loop, longest": "< 1",
}


def first_row() -> dict[str, str]:
    """Queries of the first row by legend, with the values of the dashboard's variables."""
    panels = generate.rows()["Overview"]
    assert len(panels) == 4
    found = {legend: generate.selected(query) for panel in panels for legend, query in panel.queries}
    for name, value in {"$job": ".*", "$instance": ".*", "$namespace": ".*", "$__rate_interval": "5m"}.items():
        found = {legend: query.replace(name, value) for legend, query in found.items()}
    return found


def evaluate(tmp_path: Path, series: dict[str, str], interval: str, at: str, cases: dict[str, float]) -> None:
    """Let promtool compare expressions over series with their values."""
    tests = [
        {"expr": expression, "eval_time": at, "exp_samples": [{"labels": "{}", "value": value}]}
        for expression, value in cases.items()
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    run = {"interval": interval, "input_series": given, "promql_expr_test": tests}
    (tmp_path / "row.yaml").write_text(yaml.safe_dump({"evaluation_interval": interval, "tests": [run]}))
    promtool("test", "rules", str(tmp_path / "row.yaml"))


def test_the_first_row_says_whether_the_cache_pays_is_healthy_is_full_and_what_is_slow(tmp_path: Path) -> None:
    queries = first_row()
    assert queries.keys() == ANSWERS.keys()
    cases = {
        f"sum by () (round({query}, 0.001))" if "count by" not in query else f"max by () ({query})": ANSWERS[legend]
        for legend, query in queries.items()
    }
    evaluate(tmp_path, SCRAPED, "1m", "9m", cases)


def test_the_first_row_answers_for_a_recorded_node_under_load(tmp_path: Path) -> None:
    recorded = json.loads(node_recording.FILE.read_text(encoding="utf-8"))
    series = {name: " ".join("_" if v is None else repr(v) for v in values) for name, values in recorded.items()}
    queries = first_row()
    assert queries.keys() - RECORDED_ANSWERS.keys() == {"vLLM engines without a daemon"}
    cases = {
        f"min by () (({queries[legend]}) {condition.replace(' ', ' bool ', 1)})": 1.0
        for legend, condition in RECORDED_ANSWERS.items()
    }
    evaluate(tmp_path, series, f"{node_recording.INTERVAL_SECONDS}s", "1m", cases)


def test_the_autoscaler_asks_for_a_metric_that_the_adapter_serves() -> None:
    (scaler,) = of_kind("base", "HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    (rule,) = yaml.safe_load((DEPLOY / "prometheus" / "adapter.yaml").read_text())["rules"]
    name = metric["pods"]["metric"]["name"]
    assert name in exported()
    assert rule["name"]["matches"] == f"^{name}$"
