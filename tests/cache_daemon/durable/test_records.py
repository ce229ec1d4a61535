"""A record's header is that of its own tokens, whoever wrote its checksum."""

from __future__ import annotations

import pytest
from kvsidecar import keys

from cache_daemon.durable.records import Record, Unsound, open_header, seal_header
from cache_daemon.durable.seal import NoSeal
from tests.cache_daemon.durable.chunks import chunk


def test_a_header_whose_hash_is_not_that_of_its_tokens_is_refused() -> None:
    header = chunk([1, 2, 3]).header
    key = header.prefix_hash
    assert open_header(NoSeal(), key, Record(0, 1, 0, 0, seal_header(NoSeal(), header))) == header
    header.token_ids[0] = 9
    assert header.prefix_hash == key != keys.prefix_hash(header.parent_prefix_hash, header.token_ids[:])
    with pytest.raises(Unsound, match="another chunk"):
        open_header(NoSeal(), key, Record(0, 1, 0, 0, seal_header(NoSeal(), header)))
