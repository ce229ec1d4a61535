"""What tenants may use, and what they use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from cache_daemon.tenant_limits import TenantLimits


@dataclass(eq=False, slots=True, weakref_slot=True)
class TenantAccount:
    """One tenant's account, over all namespaces."""

    id: bytes
    limits: TenantLimits
    entries: int = 0
    pinned_bytes: int = 0

    def is_expired(self, idle_seconds: float) -> bool:
        """Whether a chunk that was not used for so long has passed its time to live."""
        ttl = self.limits.ttl_seconds
        return ttl is not None and idle_seconds > ttl


class TenantAccounts:
    """The tenants that have chunks, or are about to: each is here as long as anything is on its account.

    ``limits_of`` knows the limits of an account, ``account_of`` the account of a tenant id: tenants that nobody named
    share one, or each new salt would come with a new quota.
    """

    def __init__(
        self,
        limits_of: Callable[[bytes], TenantLimits] | None = None,
        account_of: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._limits_of = limits_of or (lambda _: TenantLimits())
        self._account_id_of = account_of or (lambda tenant: tenant)
        self._tenants: WeakValueDictionary[bytes, TenantAccount] = WeakValueDictionary()

    def account_of(self, tenant_id: bytes) -> TenantAccount:
        """The account of a tenant."""
        account = self._account_id_of(tenant_id)
        found = self._tenants.get(account)
        if found is None:
            found = self._tenants[account] = TenantAccount(account, self._limits_of(account))
        return found

    def reload(self) -> None:
        """Asks for everybody's limits anew. Chunks that are stored stay on the account that they are on."""
        for tenant in list(self._tenants.values()):
            tenant.limits = self._limits_of(tenant.id)

    @property
    def has_ttl(self) -> bool:
        """Whether any chunk can expire."""
        return any(t.limits.ttl_seconds is not None for t in list(self._tenants.values()))

    def __len__(self) -> int:
        return len(self._tenants)
