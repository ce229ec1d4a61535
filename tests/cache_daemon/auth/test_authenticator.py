"""Principals of TLS callers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from kvsidecar.errors import Unauthenticated

from cache_daemon.auth.authenticator import Authenticator
from cache_daemon.auth.tenants_table import TenantsTable


class Call:
    """A call over TLS, with metadata and with gRPC's information about the client's certificate."""

    def __init__(self, name: str) -> None:
        self._name = name

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {"x509_common_name": [self._name.encode()]}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


def test_an_unknown_certificate_is_a_guests_only_where_guests_are_allowed() -> None:
    table = TenantsTable()
    guest = Authenticator(lambda: table, guests=True).principal_of(Call("worker-7"))  # type: ignore[arg-type]
    assert (guest.name, guest.tenants) == ("worker-7", None)
    with pytest.raises(Unauthenticated, match="no name that the tenants file has"):
        Authenticator(lambda: table, guests=False).principal_of(Call("worker-7"))  # type: ignore[arg-type]
