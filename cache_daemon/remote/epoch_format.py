"""What an engine says of deletions: marks of 16 random bytes. Another one than before means that there was one.

The lowest bit of a mark's last byte says why it was made: 1 by a deletion, 0 because there was none, as at first or
when the engine has lost it. Who sees another mark of a deletion knows that; who sees another one of the other kind
knows only that the engine has lost something, and perhaps a deletion with it.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from cache_daemon.remote.remote_record import EPOCH_BYTES, record_epoch_of


def new_epoch(*, deletion: bool) -> bytes:
    """A mark that nobody has made before."""
    drawn = secrets.token_bytes(EPOCH_BYTES)
    return drawn[:-1] + bytes([drawn[-1] & 0xFE | deletion])


def is_deletion_epoch(mark: bytes | None) -> bool:
    """Whether a value is the mark of a deletion."""
    return mark is not None and len(mark) == EPOCH_BYTES and bool(mark[-1] & 1)


def epoch_digest(mark: bytes | None) -> bytes:
    """A mark as it is remembered, whatever the engine gave for one: of ``MARK_BYTES``, empty for none."""
    return b"" if mark is None else hashlib.sha256(mark).digest()[:EPOCH_BYTES]


@dataclass(frozen=True)
class TenantEpochs:
    """The marks of everything and of a tenant, and that of its chunks, which is another one after each deletion of
    single ones. None where there is none."""

    global_epoch: bytes | None
    tenant_epoch: bytes | None
    chunks_epoch: bytes | None

    @property
    def record_epoch(self) -> bytes | None:
        """What the tenant's values carry, see ``mark_of``."""
        return record_epoch_of(self.global_epoch, self.tenant_epoch)
