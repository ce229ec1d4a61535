"""Encryption at rest: nothing readable on disk, nothing exchangeable, one sentence for a wrong key."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb
import pytest
from kvsidecar.errors import ConfigurationError, StoreUnavailable

from cache_daemon.durable.durable_tier import ReadResult, WriteGroup
from cache_daemon.durable.encryption import DecryptError, XaesGcmCipher, key_from_environment, key_from_file
from cache_daemon.durable.lmdb_tier import LmdbTier
from cache_daemon.durable.record_format import META, checked
from cache_daemon.durable.scrub import scrub
from tests.cache_daemon.durable.aes_gcm_cipher import AesGcmCipher
from tests.cache_daemon.durable.chunks import BUDGET, chain, chunk, key_of, opened, read, store
from tests.cache_daemon.durable.test_lost_pages import lose_pages
from tests.cache_daemon.durable.test_payload_codec import trained_chunks

pytest.importorskip("cryptography")
KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def test_an_encrypted_store_gives_back_what_was_put(tmp_path: Path) -> None:
    puts = [*chain(4), chunk([77], payload=b"x"), *trained_chunks()]
    tier = opened(tmp_path, key=KEY, compression="zstd")
    store(tier, *puts)
    tier.apply(WriteGroup(notes={b"verdict": b"passed"}))
    tier.close()
    tier = opened(tmp_path, key=KEY)
    assert {result.value for result in read(tier, *puts)} == {"ok"}
    assert tier.notes() == {b"verdict": b"passed"}
    raw = sum(len(put.payload) for put in trained_chunks())
    assert tier.usage().live_bytes < 0.75 * raw + 40_000, "it is compressed before"
    tier.close()


def test_nothing_readable_is_on_disk(tmp_path: Path) -> None:
    put = chunk(range(500, 600), payload=b"secret payload" * 300)
    tier = opened(tmp_path, key=KEY)
    store(tier, put)
    tier.apply(WriteGroup(notes={b"verdict": b"secret note"}))
    tier.close()
    content = (tmp_path / "data.mdb").read_bytes()
    assert b"secret" not in content
    assert put.header.SerializeToString()[100:140] not in content, "headers hold tokens"


def test_no_two_values_share_a_derived_key_or_a_nonce() -> None:
    """The first half of a nonce determines the key of a value; the second half is its nonce under that key."""
    cipher = XaesGcmCipher(KEY)
    values = [bytes(cipher.encrypt(b"p", b"same")) for _ in range(10_000)]
    assert {value[:8] for value in values} == {b"XAES256G"}
    for half in (slice(8, 20), slice(20, 32), slice(32, None)):
        assert len({value[half] for value in values}) == 10_000


def test_every_flipped_bit_of_a_value_is_noticed() -> None:
    cipher = XaesGcmCipher(KEY)
    whole = bytes(cipher.encrypt(b"p", b"value"))
    for bit in range(8 * len(whole)):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DecryptError):
            cipher.decrypt(b"p", memoryview(broken), memoryview(bytearray(cipher.plain_length(memoryview(broken)))))
    for length in range(len(whole)):
        target = memoryview(bytearray(max(0, length - cipher.max_overhead)))
        with pytest.raises(DecryptError):
            cipher.decrypt(b"p", memoryview(whole[:length]), target)
    with pytest.raises(DecryptError, match="a value of 27 bytes is too short"):
        cipher.plain_length(bytes(27))


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_store_of_the_previous_version_stays_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    old, new = [*chain(4), *trained_chunks()], chain(3, seed=1)
    with monkeypatch.context() as previous:
        previous.setattr("cache_daemon.durable.lmdb_tier.cipher_for", AesGcmCipher)
        tier = opened(tmp_path, key=KEY, compression=compression)
        store(tier, *old)
        tier.apply(WriteGroup(notes={b"verdict": b"passed"}))
        tier.close()
    assert b"XAES256G" not in (tmp_path / "data.mdb").read_bytes()
    tier = opened(tmp_path, key=KEY, compression=compression)
    store(tier, *new)
    assert set(read(tier, *old, *new)) == {ReadResult.OK}
    assert tier.notes() == {b"verdict": b"passed"}
    tier.close()
    assert b"XAES256G" in (tmp_path / "data.mdb").read_bytes(), "new values have the new format"
    found = scrub(tmp_path, repair=False, key=KEY)
    assert (found.is_clean, found.sound) == (True, len(old) + len(new))
    tier = opened(tmp_path, key=KEY)
    assert set(read(tier, *old, *new)) == {ReadResult.OK}
    tier.close()


def test_the_previous_version_finds_new_values_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    puts = chain(4)
    tier = opened(tmp_path, key=KEY)
    store(tier, *puts)
    tier.apply(WriteGroup(notes={b"verdict": b"passed"}))
    tier.close()
    monkeypatch.setattr("cache_daemon.durable.lmdb_tier.cipher_for", AesGcmCipher)
    tier = opened(tmp_path, key=KEY)
    assert set(read(tier, *puts)) == {ReadResult.MISSING}
    assert tier.notes() == {}
    store(tier, *puts)
    assert set(read(tier, *puts)) == {ReadResult.OK}
    tier.close()


@pytest.mark.parametrize(
    ("first", "then", "text"),
    [
        (KEY, OTHER_KEY, "encrypted with another key; give that key"),
        (KEY, None, "is encrypted; give its key"),
        (None, KEY, "is not encrypted, but a key is given"),
    ],
)
def test_a_wrong_key_is_refused_with_a_sentence(
    tmp_path: Path, first: bytes | None, then: bytes | None, text: str
) -> None:
    opened(tmp_path, key=first).close()
    with pytest.raises(StoreUnavailable, match=text):
        LmdbTier(tmp_path, BUDGET, key=then)
    opened(tmp_path, key=first).close()


def test_a_wrong_key_destroys_nothing_even_where_the_store_is_damaged(tmp_path: Path) -> None:
    tier = opened(tmp_path, key=KEY)
    puts = chain(6)
    store(tier, *puts)
    tier.close()
    data = tmp_path / "data.mdb"
    with data.open("r+b") as file:
        file.write(bytes(4096))
    for wrong in (OTHER_KEY, None):
        with pytest.raises(StoreUnavailable, match="key"):
            LmdbTier(tmp_path, BUDGET, key=wrong)
    tier = opened(tmp_path, key=KEY)
    assert read(tier, *puts) == [ReadResult.OK] * 6
    tier.close()


def test_verify_empties_no_damaged_store_without_its_key(tmp_path: Path) -> None:
    """The damaged page lists the databases, so the record of the key is not found either."""
    tier = opened(tmp_path, key=KEY)
    puts = chain(6)
    store(tier, *puts)
    tier.close()
    lose_pages(tmp_path, b"main")
    damaged = (tmp_path / "data.mdb").read_bytes()
    for wrong in (OTHER_KEY, None):
        for repair in (False, True):
            with pytest.raises(StoreUnavailable, match="is damaged and cannot be read with the key given"):
                scrub(tmp_path, repair=repair, key=wrong)
    assert (tmp_path / "data.mdb").read_bytes() == damaged
    assert scrub(tmp_path, repair=True, key=KEY).sound == 6
    tier = opened(tmp_path, key=KEY)
    assert read(tier, *puts) == [ReadResult.OK] * 6
    tier.close()


def test_values_cannot_be_exchanged(tmp_path: Path) -> None:
    """Two chunks of one length; the payload of one is put in the other's place."""
    tier = opened(tmp_path, key=KEY)
    first, second = chunk([1], payload=b"1" * 5000), chunk([2], payload=b"1" * 5000)
    store(tier, first, second)
    tier.close()
    environment = lmdb.open(str(tmp_path), max_dbs=5, lock=False)
    with environment.begin(write=True) as txn:
        payloads, meta = environment.open_db(b"payloads", txn=txn), environment.open_db(b"meta", txn=txn)
        txn.put(key_of(first), txn.get(key_of(second), db=payloads), db=payloads)
        txn.put(b"commit", checked(META, b"commit", txn.id().to_bytes(8, "little")), db=meta)
    environment.close()
    tier = opened(tmp_path, key=KEY)
    assert read(tier, first, second) == [ReadResult.CORRUPT, ReadResult.OK]
    tier.close()


def test_a_value_opens_only_in_its_place() -> None:
    cipher = XaesGcmCipher(KEY)
    encrypted = memoryview(cipher.encrypt(b"notes\0a", b"value"))
    target = memoryview(bytearray(5))
    cipher.decrypt(b"notes\0a", encrypted, target)
    assert target == b"value"
    with pytest.raises(DecryptError):
        cipher.decrypt(b"notes\0b", encrypted, target)
    with pytest.raises(DecryptError):
        cipher.decrypt(b"notes\0a", encrypted[:-1], target[:4])


@pytest.mark.parametrize("text", [b"0123456789abcdef" * 2, b"correct horse battery staple 31\n", b"k" * 32])
def test_a_key_of_32_characters_has_too_few_random_bits(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(text)
    file.chmod(0o600)
    with pytest.raises(ConfigurationError, match="openssl rand -hex 32 makes one"):
        key_from_file(file)


def test_keys_come_from_private_files_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, text = tmp_path / "raw", tmp_path / "text"
    key = bytes(range(200, 232))
    raw.write_bytes(key)
    text.write_text(key.hex() + "\n")
    for file in (raw, text):
        file.chmod(0o640)
        with pytest.raises(ConfigurationError, match="has mode 640; a key must be private: chmod 600"):
            key_from_file(file)
        file.chmod(0o600)
        assert key_from_file(file) == key
    text.write_text("short")
    with pytest.raises(ConfigurationError, match="holds no key: it must be 32 random bytes, or 64 hex digits"):
        key_from_file(text)
    with pytest.raises(ConfigurationError, match="cannot read the store's key"):
        key_from_file(tmp_path / "none")
    assert key_from_environment("KVSIDECAR_TEST_KEY") is None
    monkeypatch.setenv("KVSIDECAR_TEST_KEY", KEY.hex())
    assert key_from_environment("KVSIDECAR_TEST_KEY") == KEY
    with pytest.raises(ConfigurationError, match="has 5 bytes; AES-256 takes 32"):
        LmdbTier(tmp_path / "store", BUDGET, key=b"short")
    assert not os.path.exists(tmp_path / "store")


def test_an_empty_key_variable_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIDECAR_TEST_KEY", "")
    assert key_from_environment("KVSIDECAR_TEST_KEY") is None
