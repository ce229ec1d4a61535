"""``--remote`` and its secrets: accepted and refused values, and that no secret is shown."""

from __future__ import annotations

import builtins
import traceback
from pathlib import Path
from typing import Any

import pytest
from kvsidecar.cli.service_settings import read_settings
from kvsidecar.errors import ConfigurationError
from pydantic import ValidationError

from cache_daemon.config import DaemonConfig
from cache_daemon.remote.address import Credentials, RemoteAddress, credentials_of, parse_remote
from cache_daemon.remote.backend_factory import new_backend
from tests.cache_daemon.operators import daemon_that_ends

UNDERSTOOD = {
    "redis://cache": RemoteAddress("valkey", "kvsidecar", hosts=(("cache", 6379),)),
    "valkey://u@cache:7000/3?prefix=a/b": RemoteAddress("valkey", "a/b", "u", (("cache", 7000),), database=3),
    "rediss://[::1]:7000": RemoteAddress("valkey", "kvsidecar", hosts=(("::1", 7000),), tls=True),
    "valkey-cluster://a:1,b:2,c": RemoteAddress(
        "valkey", "kvsidecar", hosts=(("a", 1), ("b", 2), ("c", 6379)), cluster=True
    ),
    "valkeys-cluster://a?prefix=": RemoteAddress("valkey", "", hosts=(("a", 6379),), cluster=True, tls=True),
    "redis://cache?prefix=a//./b": RemoteAddress("valkey", "a//./b", hosts=(("cache", 6379),)),
    "s3://bucket/some/where/": RemoteAddress("s3", "some/where", tls=True, bucket="bucket"),
    "s3://id@bucket?endpoint=http://h:1/&region=eu": RemoteAddress(
        "s3", "kvsidecar", "id", bucket="bucket", endpoint="http://h:1", region="eu"
    ),
    "az://account@box/a": RemoteAddress("azure", "a", "account", tls=True, bucket="box"),
    "az://account@box?endpoint=http://h:1/account": RemoteAddress(
        "azure", "kvsidecar", "account", bucket="box", endpoint="http://h:1/account"
    ),
}
REFUSED = {
    "cache:6379": "scheme",
    "http://cache": "its scheme is none of ours",
    "hush://cache": "its scheme is none of ours",
    "redis://user:hush@cache": "password",
    "redis://:hush@cache": "password",
    "s3://id:hush@bucket": "password",
    "redis://@cache": "empty user",
    "redis://": "no host",
    "redis://cache:99999": "no host",
    "redis://user:hu/sh@cache": "password",
    "redis://user:hu#sh@cache": "password",
    "redis://user:hush?sh@cache": "unknown option",
    "redis://user:hush": "no host",
    "redis://cache/hush": "number of a database",
    "valkey-cluster://cache/1": "a cluster has none",
    "redis://cache?db=1": "unknown option",
    "redis://cache/?password=hush": "unknown option",
    "redis://cache?hush": "unknown option",
    "redis://cache?prefix=hush@": "prefix",
    "redis://cache?prefix=a%20b": "prefix",
    "redis://cache?prefix=../x": "prefix",
    "redis://cache#x": "behind #",
    "s3://bucket/team//kv": "its prefix has an empty part or the part",
    "s3://bucket/a/./b": "its prefix has an empty part or the part",
    "s3://bucket/.": "its prefix has an empty part or the part",
    "s3://bucket/a/../b": "its prefix has an empty part or the part",
    "az://account@box/a//b": "its prefix has an empty part or the part",
    "s3://": "no bucket",
    "az://": "no container",
    "az://box": "it names no account",
    "gs://bucket/a": "its scheme is none of ours",
    "s3://bucket?anonymous=true": "unknown option",
    "az://account:hush@box": "password",
    "az://account@box?region=hush": "unknown option",
    "s3://bucket?endpoint=h:1": "must begin with http",
    "s3://bucket?endpoint=http://id:hush@h": "has a user",
    "s3://bucket?endpoint=id:hush@h:9000": "has a user",
    "s3://bucket?endpoint=hush:9000": "must begin with http",
}


@pytest.mark.parametrize("url", UNDERSTOOD)
def test_addresses_are_understood(url: str) -> None:
    assert parse_remote(url) == UNDERSTOOD[url]


@pytest.mark.parametrize("url", REFUSED)
def test_others_are_refused_in_a_sentence_without_secrets(url: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[url]) as caught:
        parse_remote(url)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["s3://b?endpoint=id:hush@h:9000", "redis://user:hush?@cache", "redis://u:hush/@cache", "redis://h/?password=hush"],
)
def test_a_refused_url_is_not_quoted(url: str) -> None:
    with pytest.raises(ConfigurationError, match="remote is not shown here: it") as caught:
        read_settings(DaemonConfig, {"remote": url}, None)
    assert "hush" not in "".join(traceback.format_exception(caught.value))
    assert "hush" not in repr(DaemonConfig.model_construct(remote=url))


def test_a_refused_password_is_not_printed_at_the_start(tmp_path: Path) -> None:
    done = daemon_that_ends(tmp_path, "--remote", "redis://user:hush@cache")
    assert done.returncode == 2
    assert "--remote-secret-file" in done.stderr
    assert "hush" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"remote_secret_file": "x"}, "set --remote"),
        ({"remote_ca": "x"}, "set --remote"),
        ({"remote": "redis://h", "remote_secret": "s", "remote_secret_file": "x"}, "use one of the two"),
        ({"remote_ttl": "a while"}, "write it like 7d"),
        ({"remote_ttl": "0s"}, "at least 1s"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        DaemonConfig(**given)


def test_the_secret_is_never_shown(tmp_path: Path) -> None:
    config = DaemonConfig(remote="redis://h", remote_secret="hush-hush")  # type: ignore[arg-type]
    assert "hush" not in f"{config!r} {config.model_dump()} {Credentials('hush-hush')!r}"
    path = tmp_path / "secret"
    path.write_text("hush-hush\n")
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        credentials_of("", path, None)
    path.chmod(0o600)
    assert credentials_of("", path, None).secret == "hush-hush"
    path.write_text("\n")
    with pytest.raises(ConfigurationError, match="has no secret"):
        credentials_of("", path, None)
    with pytest.raises(ConfigurationError, match="cannot read"):
        credentials_of("", tmp_path / "none", None)


@pytest.mark.parametrize(("url", "extra"), [("redis://h", "valkey"), ("s3://b", "s3"), ("az://a@b", "azure")])
def test_a_client_that_is_not_installed_is_named(url: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name in ("glide", "obstore"):
            raise ImportError(name)
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigurationError, match=rf"pip install 'kvsidecar\[{extra}\]'"):
        new_backend(parse_remote(url), Credentials())
