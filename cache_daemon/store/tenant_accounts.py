"""Tenant accounts: limits and usage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from cache_daemon.auth.tenant_limits import TenantLimits


@dataclass(eq=False, slots=True, weakref_slot=True)
class TenantAccount:
    """Limits and usage of one tenant over all namespaces."""

    id: bytes
    limits: TenantLimits
    entries: int = 0
    pinned_bytes: int = 0
    retained_bytes: int = 0
    retained_chunks: int = 0


class TenantAccounts:
    """Accounts of tenants that have chunks or are about to; weakly referenced.

    ``limits_of`` returns the limits of an account, ``account_of`` the account id of a tenant id: tenants that the
    tenants file does not name share one account, or each new salt would come with a new quota.
    """

    def __init__(
        self,
        limits_of: Callable[[bytes], TenantLimits] | None = None,
        account_of: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._limits_of = limits_of or (lambda _: TenantLimits())
        self._account_id_of = account_of or (lambda tenant: tenant)
        self._tenants: WeakValueDictionary[bytes, TenantAccount] = WeakValueDictionary()
        self.num_reloads = 0

    def account_of(self, tenant_id: bytes) -> TenantAccount:
        """Return the account of a tenant."""
        account = self._account_id_of(tenant_id)
        found = self._tenants.get(account)
        if found is None:
            found = self._tenants[account] = TenantAccount(account, self._limits_of(account))
        return found

    def reload(self) -> None:
        """Read all limits again. Stored chunks stay on their account."""
        self.num_reloads += 1
        for tenant in list(self._tenants.values()):
            tenant.limits = self._limits_of(tenant.id)

    def __len__(self) -> int:
        return len(self._tenants)
