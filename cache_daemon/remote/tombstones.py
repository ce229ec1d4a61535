"""Deletions in a remote engine, so that all nodes hear of them: of everything, of a tenant, of a chunk with what
continues it.

The first two are marks (see ``marks.py``). A deleted chunk leaves its name, which nothing but the deletion of its
tenant removes: a node that was away may have the chunk, and come back at any time. Of a tenant that has many of them
all is deleted, and the names go.
"""

from __future__ import annotations

import secrets

from cache_daemon.remote.epoch_format import new_epoch
from cache_daemon.remote.key_schema import TOMBSTONE_ID_BYTES
from cache_daemon.remote.remote_tier import RemoteTier

_PAGE, _LOOK_SECONDS = 256, 2.0
# Names of deleted chunks of a tenant.
MAX_TOMBSTONES = 16384


async def bump_epoch(tier: RemoteTier, root: bytes, mark: bytes) -> None:
    """Makes everything of a tenant, without ``root`` everything under the prefix, worthless at once, wherever it is
    written from, by its new mark. Raises RemoteFailed."""
    await tier.write(
        [(tier.key_schema.tenant_epoch_key(root) if root else tier.key_schema.global_epoch_key, mark)], None
    )


async def purge(tier: RemoteTier, root: bytes) -> None:
    """Tells all nodes of a mark that ``void`` has made, and removes what is worth nothing any more; of everything,
    tenants' marks too. Raises RemoteFailed."""
    await announce(tier)
    names = tier.key_schema
    prefix = names.tenant_prefix(root) if root else names.root_prefix
    kept = {names.tenant_epoch_key(root) if root else names.global_epoch_key, names.deletions_epoch_key}
    async for page in tier.scan(prefix):
        await tier.remove([name for name in page if name not in kept])


async def delete_subtree(tier: RemoteTier, root: bytes, key: bytes) -> tuple[int, set[bytes]]:
    """Removes a chunk and all that continues it, with all parts of every payload that was ever written of them, and
    leaves their names. Returns how many there were, and what ``names.gone`` wants of them. Raises RemoteFailed.

    Two walks, of which the first remembers nothing but who continues whom, and which names were left before.
    """
    names, begin = tier.key_schema, tier.key_schema.tenant_prefix(root)
    children: dict[bytes, list[bytes]] = {}
    there: set[bytes] = set()
    before: set[bytes] = set()
    async for page in tier.scan(begin):
        hashes = [h for h in (names.hash_of_record_key(root, name) for name in page) if h is not None]
        before.update(filter(None, (names.parse_tombstone_key(root, name) for name in page)))
        for at in range(0, len(hashes), _PAGE):
            found = await tier.find(root, hashes[at : at + _PAGE], _LOOK_SECONDS)
            for entry in filter(None, found.records):
                children.setdefault(entry.header.parent_prefix_hash, []).append(entry.header.prefix_hash)
                there.add(entry.header.prefix_hash)
    doomed = [key]
    for read_tombstones in doomed:
        doomed += children.pop(read_tombstones, ())
    whole = set(doomed)
    left = {read_tombstones + secrets.token_bytes(TOMBSTONE_ID_BYTES) for read_tombstones in whole}
    if len(before) + len(left) > MAX_TOMBSTONES:
        await bump_epoch(tier, root, new_epoch(deletion=True))
        await purge(tier, root)
        return len(whole & there), set()
    await tier.write([(names.tombstone_key(root, name), b"") for name in left], None)
    await tier.remove([names.record_key(root, read_tombstones) for read_tombstones in doomed])
    async for page in tier.scan(begin):
        await tier.remove([name for name in page if names.hash_of_key(root, name) in whole])
    await tier.remove([names.tombstone_key(root, name) for name in before if name[:-TOMBSTONE_ID_BYTES] in whole])
    # Last, so that who hears of it finds nothing of it any more.
    await tier.write([(names.chunks_epoch_key(root), new_epoch(deletion=True))], None)
    await announce(tier)
    return len(whole & there), left


async def read_tombstones(tier: RemoteTier, root: bytes) -> set[bytes]:
    """What deleted chunks of a tenant have left, as ``names.gone`` wants it. Raises RemoteFailed."""
    found: set[bytes] = set()
    async for page in tier.scan(tier.key_schema.tombstone_key(root)):
        found.update(filter(None, (tier.key_schema.parse_tombstone_key(root, name) for name in page)))
    return found


async def write_tombstones(tier: RemoteTier, root: bytes, names: set[bytes]) -> None:
    """Leaves the names of deleted chunks, as ``Names.gone`` wants them, and tells all nodes. Raises RemoteFailed."""
    if names:
        await tier.write([(tier.key_schema.tombstone_key(root, name), b"") for name in names], None)
    await tier.write([(tier.key_schema.chunks_epoch_key(root), new_epoch(deletion=True))], None)


async def announce(tier: RemoteTier) -> None:
    """Makes all nodes look at the marks again. Raises RemoteFailed."""
    await tier.write([(tier.key_schema.deletions_epoch_key, new_epoch(deletion=True))], None)
