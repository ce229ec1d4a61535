"""Deletions in a remote engine, so that all nodes hear of them: of everything, of a tenant, of a chunk with what
continues it.

The first two are marks (see ``marks.py``). A deleted chunk leaves its name, which nothing but the deletion of its
tenant removes: a node that was away may have the chunk, and come back at any time. Of a tenant that has many of them
all is deleted, and the names go.
"""

from __future__ import annotations

import secrets

from cache_daemon.remote.epoch_format import new_mark
from cache_daemon.remote.key_schema import GONE_ID_BYTES
from cache_daemon.remote.remote_tier import RemoteTier

_PAGE, _LOOK_SECONDS = 256, 2.0
# Names of deleted chunks of a tenant.
MOST_GONE = 16384


async def void(tier: RemoteTier, root: bytes, mark: bytes) -> None:
    """Makes everything of a tenant, without ``root`` everything under the prefix, worthless at once, wherever it is
    written from, by its new mark. Raises RemoteFailed."""
    await tier.write([(tier.names.tenant_mark(root) if root else tier.names.mark, mark)], None)


async def purge(tier: RemoteTier, root: bytes) -> None:
    """Tells all nodes of a mark that ``void`` has made, and removes what is worth nothing any more; of everything,
    tenants' marks too. Raises RemoteFailed."""
    await tell(tier)
    names = tier.names
    prefix = names.tenant(root) if root else names.everything
    kept = {names.tenant_mark(root) if root else names.mark, names.deletions_mark}
    async for page in tier.scanned(prefix):
        await tier.remove([name for name in page if name not in kept])


async def forget_branch(tier: RemoteTier, root: bytes, key: bytes) -> tuple[int, set[bytes]]:
    """Removes a chunk and all that continues it, with all parts of every payload that was ever written of them, and
    leaves their names. Returns how many there were, and what ``names.gone`` wants of them. Raises RemoteFailed.

    Two walks, of which the first remembers nothing but who continues whom, and which names were left before.
    """
    names, begin = tier.names, tier.names.tenant(root)
    children: dict[bytes, list[bytes]] = {}
    there: set[bytes] = set()
    before: set[bytes] = set()
    async for page in tier.scanned(begin):
        hashes = [h for h in (names.hash_of_head(root, name) for name in page) if h is not None]
        before.update(filter(None, (names.name_of_gone(root, name) for name in page)))
        for at in range(0, len(hashes), _PAGE):
            found = await tier.find(root, hashes[at : at + _PAGE], _LOOK_SECONDS)
            for entry in filter(None, found.entries):
                children.setdefault(entry.header.parent_prefix_hash, []).append(entry.header.prefix_hash)
                there.add(entry.header.prefix_hash)
    doomed = [key]
    for gone in doomed:
        doomed += children.pop(gone, ())
    whole = set(doomed)
    left = {gone + secrets.token_bytes(GONE_ID_BYTES) for gone in whole}
    if len(before) + len(left) > MOST_GONE:
        await void(tier, root, new_mark(deletion=True))
        await purge(tier, root)
        return len(whole & there), set()
    await tier.write([(names.gone(root, name), b"") for name in left], None)
    await tier.remove([names.head(root, gone) for gone in doomed])
    async for page in tier.scanned(begin):
        await tier.remove([name for name in page if names.hash_of(root, name) in whole])
    await tier.remove([names.gone(root, name) for name in before if name[:-GONE_ID_BYTES] in whole])
    # Last, so that who hears of it finds nothing of it any more.
    await tier.write([(names.chunks_mark(root), new_mark(deletion=True))], None)
    await tell(tier)
    return len(whole & there), left


async def gone(tier: RemoteTier, root: bytes) -> set[bytes]:
    """What deleted chunks of a tenant have left, as ``names.gone`` wants it. Raises RemoteFailed."""
    found: set[bytes] = set()
    async for page in tier.scanned(tier.names.gone(root)):
        found.update(filter(None, (tier.names.name_of_gone(root, name) for name in page)))
    return found


async def leave(tier: RemoteTier, root: bytes, names: set[bytes]) -> None:
    """Leaves the names of deleted chunks, as ``Names.gone`` wants them, and tells all nodes. Raises RemoteFailed."""
    if names:
        await tier.write([(tier.names.gone(root, name), b"") for name in names], None)
    await tier.write([(tier.names.chunks_mark(root), new_mark(deletion=True))], None)


async def tell(tier: RemoteTier) -> None:
    """Makes all nodes look at the marks again. Raises RemoteFailed."""
    await tier.write([(tier.names.deletions_mark, new_mark(deletion=True))], None)
