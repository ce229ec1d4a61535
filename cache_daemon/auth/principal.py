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
    """For logs and messages; never a secret."""
    operator: bool = False
    """May see and do everything, whosever it is."""
    tenants: frozenset[bytes] | None = field(default=frozenset(), repr=False)
    """The salts that it may use; None: any that it can name, the salt itself being the capability."""

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
"""Whoever reaches the private socket: the daemon's own user, who could read its memory anyhow."""
GUEST = Principal("guest", tenants=None)
"""Whoever reaches a door that asks for no name: it knows only what its salts open."""
