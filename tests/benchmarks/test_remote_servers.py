"""The remote servers of tests and benchmarks run beside others of their kind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.remote_servers import S3Server, why_no_s3


@pytest.mark.skipif(bool(why_no_s3()), reason=why_no_s3())
def test_two_s3_servers_run_at_once(tmp_path: Path) -> None:
    """SeaweedFS ends, also after it has answered, if one of its ports is taken."""
    with S3Server(tmp_path / "one") as one, S3Server(tmp_path / "two") as two:
        time.sleep(1)
        assert [one.is_running, two.is_running] == [True, True]
