"""Key schema of the remote backend::

    PREFIX/FORMAT/mark                     the global epoch
    PREFIX/FORMAT/deletions/mark           replaced by each deletion of anything
    PREFIX/FORMAT/ROOT/mark                a tenant's epoch
    PREFIX/FORMAT/ROOT/chunks/mark         replaced by each deletion of single chunks of the tenant
    PREFIX/FORMAT/ROOT/gone/HASH.ID        the tombstone of a deleted chunk; ID is random
    PREFIX/FORMAT/ROOT/HASH/head           a chunk's record
    PREFIX/FORMAT/ROOT/HASH/CHECKSUM/N     part N of its stored payload

FORMAT is the version of records and chunks together. ROOT is the tenant root in hexadecimal: the hash of namespace and
salt, so a name reveals neither. HASH is the chunk's prefix hash. CHECKSUM is the checksum of the stored payload, so
parts of two writers never mix.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar import keys

RECORD_VERSION = 1
TOMBSTONE_ID_BYTES = 8


@dataclass(frozen=True)
class KeySchema:
    """Keys under one prefix, which does not end with a slash and may be empty."""

    prefix: str

    @property
    def root_prefix(self) -> str:
        version = f"{RECORD_VERSION}.{keys.FORMAT_VERSION}/"
        return f"{self.prefix}/{version}" if self.prefix else version

    @property
    def global_epoch_key(self) -> str:
        return f"{self.root_prefix}mark"

    def tenant_prefix(self, root: bytes) -> str:
        """Return the prefix of all keys of a tenant."""
        return f"{self.root_prefix}{root.hex()}/"

    def tenant_epoch_key(self, root: bytes) -> str:
        return f"{self.tenant_prefix(root)}mark"

    @property
    def deletions_epoch_key(self) -> str:
        return f"{self.root_prefix}deletions/mark"

    def chunks_epoch_key(self, root: bytes) -> str:
        return f"{self.tenant_prefix(root)}chunks/mark"

    def tombstone_key(self, root: bytes, name: bytes = b"") -> str:
        """Return the key of a tombstone: prefix hash and an id of ``TOMBSTONE_ID_BYTES``.

        Without ``name``, return the prefix of all tombstones of a tenant.
        """
        key, number = name[: keys.HASH_BYTES], name[keys.HASH_BYTES :]
        return f"{self.tenant_prefix(root)}gone/" + (f"{key.hex()}.{number.hex()}" if name else "")

    def parse_tombstone_key(self, root: bytes, name: str) -> bytes | None:
        """Return the prefix hash and id of a tombstone key, None for other keys."""
        begin = self.tombstone_key(root)
        text = name.removeprefix(begin).replace(".", "", 1)
        if not name.startswith(begin) or len(text) != 2 * (keys.HASH_BYTES + TOMBSTONE_ID_BYTES):
            return None
        try:
            return bytes.fromhex(text)
        except ValueError:
            return None

    def record_key(self, root: bytes, prefix_hash: bytes) -> str:
        return f"{self.tenant_prefix(root)}{prefix_hash.hex()}/head"

    def payload_keys(self, root: bytes, prefix_hash: bytes, checksum: int, count: int) -> list[str]:
        begin = f"{self.tenant_prefix(root)}{prefix_hash.hex()}/{checksum:016x}/"
        return [f"{begin}{number}" for number in range(count)]

    def hash_of_record_key(self, root: bytes, name: str) -> bytes | None:
        """Return the prefix hash of a record's key, None for other keys."""
        return self.hash_of_key(root, name) if name.endswith("/head") else None

    def hash_of_key(self, root: bytes, name: str) -> bytes | None:
        """Return the prefix hash in a tenant's key, None for other keys."""
        middle, slash, _ = name.removeprefix(self.tenant_prefix(root)).partition("/")
        if not slash or len(middle) != 2 * keys.HASH_BYTES:
            return None
        try:
            return bytes.fromhex(middle)
        except ValueError:
            return None
