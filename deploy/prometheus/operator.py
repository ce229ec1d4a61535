"""Generator of the PrometheusRule resource: python -m deploy.prometheus.operator [--check].

A PrometheusRule (https://prometheus-operator.dev/docs/api-reference/api/) is a Prometheus rule file with a header.
"""

from __future__ import annotations

import sys
from pathlib import Path

RULES = Path(__file__).with_name("alerts.yaml")
FILE = Path(__file__).parents[1] / "kubernetes" / "base" / "alerts.yaml"
_HEAD = """\
# Written by `python -m deploy.prometheus.operator` from deploy/prometheus/alerts.yaml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: kvsidecar
spec:
"""


def text() -> str:
    """Return the resource as YAML."""
    lines = [line for line in RULES.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return _HEAD + "".join(f"  {line}\n" if line else "\n" for line in lines)


def main(arguments: list[str]) -> int:
    """Write or check the resource. Return the exit code, which is 1 if --check finds a stale file."""
    if "--check" not in arguments:
        FILE.write_text(text(), encoding="utf-8")
        return 0
    if FILE.read_text(encoding="utf-8") == text():
        return 0
    print(f"{FILE} is stale; run: python -m deploy.prometheus.operator", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
