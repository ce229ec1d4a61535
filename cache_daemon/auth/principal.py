"""Principals: authenticated callers and their rights."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvsidecar.errors import PermissionDenied


@dataclass(frozen=True)
class Principal:
    """An authenticated caller.

    A session may be used only by a principal equal to the one that opened it.
    """

    name: str
    """Name for logs and messages; never a secret."""
    operator: bool = False
    """Operators may read and change the data of all tenants."""
    tenants: frozenset[bytes] | None = field(default=frozenset(), repr=False)
    """Salts that the principal may use.

    None means every salt that the principal can name: knowing a salt is the permission to use it.
    """

    def check_salt(self, salt: bytes) -> None:
        """Raise PermissionDenied unless the caller may use the salt.

        The message is the same for every salt.
        """
        if not (self.operator or self.tenants is None or salt in self.tenants):
            raise PermissionDenied(
                f"{self.name} may not use the tenant_salt of this request; use that of a tenant which names {self.name}"
            )

    def require_operator(self, action: str) -> None:
        """Raise PermissionDenied unless the caller is an operator.

        ``action`` is a verb phrase for the message.
        """
        if not self.operator:
            raise PermissionDenied(
                f"{self.name} may not {action}; ask at the daemon's private socket, or as a tenant with operator = true"
            )


OPERATOR = Principal("operator", operator=True, tenants=None)
"""Caller on the private socket: the daemon's own user, who could read the daemon's memory anyway."""
GUEST = Principal("guest", tenants=None)
"""Caller on a listener without authentication: it may use every salt that it knows."""
