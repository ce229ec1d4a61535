"""Addresses in the manifests, against the code and the programs that use them."""

from __future__ import annotations

import pytest

from cache_daemon.remote.address import parse_remote
from tests.deploy.manifests import BUILDS, containers, pods, settings

REMOTES = [name for name in BUILDS if "remote" in name]


@pytest.mark.parametrize("name", REMOTES)
def test_the_remote_tier_is_one_server_over_tls(name: str) -> None:
    """A server that is not in cluster mode refuses the client of a cluster."""
    given = [settings(name, container) for pod in pods(name) for container in containers(pod)]
    urls = {found["KVSIDECAR_CACHE_REMOTE"] for found in given if "KVSIDECAR_CACHE_REMOTE" in found}
    (address,) = map(parse_remote, urls)
    assert (address.backend, address.cluster, address.tls) == ("valkey", False, True)
