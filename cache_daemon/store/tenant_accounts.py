"""Tenant accounts: limits and usage of tenants."""

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
    """Accounts of tenants, weakly referenced: an account exists while a chunk or a caller refers to it.

    ``limits_of`` maps an account id to its limits, and ``account_of`` maps a tenant id to its account id. Tenants that
    are not in the tenants file share one account; otherwise each new salt would get a new quota.
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
        """Read all limits again.

        Stored chunks keep their account. The next sweep moves them to the partitions that the limits name.
        """
        self.num_reloads += 1
        for tenant in list(self._tenants.values()):
            tenant.limits = self._limits_of(tenant.id)

    def __len__(self) -> int:
        return len(self._tenants)
