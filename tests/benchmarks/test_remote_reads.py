"""The benchmark of a worker on another host, small: over the loopback, or a link where one can be shaped."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import remote_reads


def test_it_moves_what_it_says_and_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "remote.json"
    remote_reads.main(["--gbit", "0", "--mebibytes", "8", "--repeats", "1", "--out", str(out)])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["arm"] for row in found["rows"]] == list(remote_reads.ARMS)
    assert all(row["megabytes_per_second"] > 0 for row in found["rows"])
    assert found["summary"]["read_over_iperf3_0gbit"] > 0
