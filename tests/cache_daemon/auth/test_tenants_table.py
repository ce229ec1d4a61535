"""The tenants file: valid and refused content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvsidecar.errors import ConfigurationError, PermissionDenied
from kvsidecar.tenants_file import hash_token

from cache_daemon.auth.principal import GUEST, OPERATOR, Principal
from cache_daemon.auth.tenant_limits import Priority, TenantLimits
from cache_daemon.auth.tenants_table import UNLIMITED, ReloadableTenantsTable, TenantsTable, load
from tests.cache_daemon.auth.conftest import tenant_id

FULL = f"""
[default]
arena_bytes = "64MiB"
ttl = 90

[tenant.alice]
salt = "salt-of-alice"
tokens = ["{hash_token("a")}", "{hash_token("both")}"]
certificates = ["alice.example", "spiffe://there/alice"]
arena_bytes = "256MiB"
store_bytes = 1000000
entries = 5000
ttl = "7d"
pin_bytes = "16MiB"
priority = "high"

[tenant.bob]
salt_hex = "00ff"
tokens = ["{hash_token("b")}", "{hash_token("both")}"]
certificates = ["bob.example"]

[tenant.admin]
operator = true
tokens = ["{hash_token("root")}"]
"""


def write(path: Path, text: str) -> Path:
    path.touch(0o600)
    path.write_text(text)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "tenants.toml", FULL)


@pytest.fixture
def tenants(file: Path) -> TenantsTable:
    return load(file, tenant_id)


def test_limits_are_a_tenants_own(tenants: TenantsTable) -> None:
    expected = TenantLimits(256 << 20, 1_000_000, 5000, 7 * 86400, 16 << 20, Priority.HIGH)
    assert tenants.limits_for(b"salt-of-alice") == expected
    assert tenants.limits_of(tenant_id(b"salt-of-alice")) == expected
    assert tenants.limits_for(b"\x00\xff") == UNLIMITED


def test_salts_that_no_table_names_have_the_default_on_one_account(tenants: TenantsTable) -> None:
    assert tenants.limits_for(b"new") == tenants.default == TenantLimits(arena_bytes=64 << 20, ttl_seconds=90)
    assert tenants.account_of(tenant_id(b"new")) == tenants.account_of(tenant_id(b"newer")) == b""
    assert tenants.account_of(tenant_id(b"\x00\xff")) == tenant_id(b"\x00\xff")


def test_a_token_opens_the_tenants_that_name_it(tenants: TenantsTable) -> None:
    assert tenants.by_token("a") == Principal("alice", tenants=frozenset([b"salt-of-alice"]))
    both = tenants.by_token("both")
    assert both == Principal("alice+bob", tenants=frozenset([b"salt-of-alice", b"\x00\xff"]))
    assert tenants.by_token("root") == Principal("admin", operator=True, tenants=None)
    for unknown in ("", "A", hash_token("a"), "\udcff"):
        assert tenants.by_token(unknown) is None


def test_a_certificate_opens_the_tenants_that_name_it(tenants: TenantsTable) -> None:
    assert tenants.by_certificate(["x", "spiffe://there/alice", "alice.example"]) == tenants.by_token("a")
    assert tenants.by_certificate(["alice.example", "bob.example"]) == tenants.by_token("both")
    assert tenants.by_certificate(["x"]) is None


def test_without_a_file_nobody_is_named_and_nothing_limited() -> None:
    none = ReloadableTenantsTable(None, tenant_id)
    assert none.reload()
    assert none().limits_for(b"any") == UNLIMITED
    assert none().by_token("") is None


def test_a_principal_uses_its_salts_alone() -> None:
    alice = Principal("alice", tenants=frozenset([b"salt-1"]))
    alice.check_salt(b"salt-1")
    for salt in (b"", b"salt-2"):
        with pytest.raises(PermissionDenied) as caught:
            alice.check_salt(salt)
        assert "salt-" not in str(caught.value)
    for anybody in (GUEST, OPERATOR):
        anybody.check_salt(b"salt-2")
    OPERATOR.require_operator("delete everything")
    for somebody in (GUEST, alice):
        with pytest.raises(PermissionDenied, match="may not delete everything"):
            somebody.require_operator("delete everything")
    with pytest.raises(PermissionDenied):
        Principal("nobody").check_salt(b"")
    assert "salt-" not in repr(alice)


def test_a_bad_file_changes_nothing_when_read_again(file: Path) -> None:
    current = ReloadableTenantsTable(file, tenant_id)
    file.write_text(FULL.replace("[tenant.bob]", "[tenant.bert]"))
    assert current.reload()
    assert current().by_token("b").name == "bert"
    file.write_text(FULL.replace("priority", "prio"))
    assert not current.reload()
    file.write_text(FULL.replace('"high"', '["high"]'))
    assert not current.reload()
    file.unlink()
    assert not current.reload()
    assert current().by_token("b").name == "bert"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tenants.alice]", "the file: 'tenants' is not known there; allowed are default, tenant"),
        ("tenant = 3", r"\[tenant\]: it must be a table"),
        ("[tenant]\nalice = 3", r"\[tenant.alice\]: it must be a table"),
        ("[default]\nsalt = 'x'", r"\[default\]: 'salt' is not known there; allowed are arena_bytes, "),
        ("[tenant.alice]\nsalt = 'x'\nquota = 1", r"\[tenant.alice\]: 'quota' is not known there; allowed are salt, "),
        ("[tenant.alice]", "needs salt"),
        ("[tenant.alice]\nsalt = 'x'\nsalt_hex = '00'", "one of them"),
        ("[tenant.alice]\nsalt = 3", "salt must be a text"),
        ("[tenant.alice]\nsalt_hex = '0'", "hex digits"),
        ("[tenant.alice]\nsalt = '" + "x" * 257 + "'", "257 bytes; at most 256"),
        ("[tenant.alice]\nsalt = 'x'\n[tenant.bob]\nsalt_hex = '78'", r"\[tenant.bob\]: its salt is that of another"),
        ("[tenant.alice]\nsalt = 'x'\noperator = true", "an operator has no salt"),
        ("[tenant.alice]\nentries = 1\noperator = true", "an operator has no salt and no limits"),
        ("[tenant.alice]\nsalt = 'x'\noperator = 1", "true or false"),
        ("[tenant.alice]\nsalt = 'x'\ntokens = ['plain']", "only a token's hash is kept"),
        ("[tenant.alice]\nsalt = 'x'\ntokens = 'plain'", "list of texts"),
        ("[tenant.alice]\nsalt = 'x'\ncertificates = ['']", "list of texts"),
        ("[tenant.alice]\nsalt = 'x'\narena_bytes = 'much'", "arena_bytes is 'much'; write a size"),
        ("[tenant.alice]\nsalt = 'x'\nstore_bytes = -1", "store_bytes is -1"),
        ("[tenant.alice]\nsalt = 'x'\nentries = 1.5", "entries is 1.5; write a whole number"),
        ("[tenant.alice]\nsalt = 'x'\nentries = true", "entries is True"),
        ("[tenant.alice]\nsalt = 'x'\nttl = '7 weeks'", "ttl is '7 weeks'; write it like 7d"),
        ("[tenant.alice]\nsalt = 'x'\nttl = 0", "ttl is 0"),
        ("[tenant.alice]\nsalt = 'x'\npriority = 'urgent'", "high, normal or low"),
        ("[tenant.alice]\nsalt = 'x'\npriority = ['high']", r"priority is \['high'\]; it must be high, normal or low"),
        ("[tenant.alice]\nsalt = 'x'\npriority = {high = 1}", "high, normal or low"),
        ("[tenant.'a b']\nsalt = 'x'", "'a b' is no name"),
        ("[tenant.alice", "is not TOML"),
    ],
)
def test_what_is_wrong_is_refused_by_file_table_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "t.toml", text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        load(path, tenant_id)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("text", "seconds"), [("'45s'", 45), ("'30m'", 1800), ("'12h'", 43200), ("90", 90)])
def test_a_ttl_is_written_in_units_or_seconds(tmp_path: Path, text: str, seconds: int) -> None:
    path = write(tmp_path / "t.toml", f"[default]\nttl = {text}")
    assert load(path, tenant_id).default.ttl_seconds == seconds


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o644])
def test_a_file_that_others_can_read_or_change_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigurationError, match="chmod"):
        load(file, tenant_id)


def test_a_group_may_read_the_file(file: Path) -> None:
    file.chmod(0o640)
    assert load(file, tenant_id).has_tokens


def test_a_strangers_file_is_refused(file: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root may give a file away")
    os.chown(file, 65534, -1)
    with pytest.raises(ConfigurationError, match="belongs to user 65534"):
        load(file, tenant_id)


def test_a_missing_file_and_one_that_is_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        load(tmp_path / "none.toml", tenant_id)
    write(tmp_path / "binary.toml", "").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="not UTF-8 at byte 0"):
        load(tmp_path / "binary.toml", tenant_id)
