"""
What every `SecretStore` does: the fake that tests use, files, and etcd. Add another adapter to `secrets`. Tests of
etcd alone are below.
"""

import asyncio
import stat
from contextlib import aclosing
from pathlib import Path

import pytest
from tests.unit.gateway.fakes import MemorySecrets

from gpufaas_adapters.etcd.client import Etcd, EtcdSettings, Listed
from gpufaas_adapters.etcd.secrets import (
    KEY_CHECK,
    EtcdSecrets,
    SecretChange,
    SecretChanged,
    SecretRemoved,
    SecretsKey,
    WrongKey,
    create_key_file,
)
from gpufaas_adapters.files.secrets import SecretFiles
from gpufaas_core.errors import InvalidSpec, NameTaken, UnknownName
from gpufaas_gateway.ports import SecretStore

KEY = SecretsKey(b"k" * 32)


@pytest.fixture(params=["memory", "files", "etcd"])
def secrets(request: pytest.FixtureRequest, tmp_path: Path) -> SecretStore:
    match request.param:
        case "memory":
            return MemorySecrets()
        case "files":
            return SecretFiles(tmp_path / "secrets", tmp_path / "mounts")
        case _:
            return EtcdSecrets(request.getfixturevalue("etcd_elsewhere"), KEY)


def test_a_namespace_without_secrets_has_no_names(secrets: SecretStore) -> None:
    assert secrets.names("openfaas-fn") == []


def test_names_are_sorted_and_of_one_namespace(secrets: SecretStore) -> None:
    for namespace, name in (("a", "two"), ("a", "one"), ("b", "three")):
        secrets.create(namespace, name, b"")

    assert secrets.names("a") == ["one", "two"]


def test_a_name_is_taken_once_in_a_namespace(secrets: SecretStore) -> None:
    secrets.create("a", "key", b"1")
    secrets.create("b", "key", b"1")

    with pytest.raises(NameTaken, match="key in a exists"):
        secrets.create("a", "key", b"2")


def test_only_what_exists_is_updated_or_removed(secrets: SecretStore) -> None:
    secrets.create("a", "key", b"1")

    with pytest.raises(UnknownName, match="key in b does not exist"):
        secrets.update("b", "key", b"2")
    with pytest.raises(UnknownName, match="other in a does not exist"):
        secrets.remove("a", "other")

    assert secrets.names("a") == ["key"]


def test_a_removed_name_can_be_used_again(secrets: SecretStore) -> None:
    secrets.create("a", "key", b"1")
    secrets.update("a", "key", b"2")
    secrets.remove("a", "key")

    secrets.create("a", "key", b"3")

    assert secrets.names("a") == ["key"]


def test_a_dropped_namespace_is_empty_and_dropping_twice_is_no_error(secrets: SecretStore) -> None:
    for namespace in ("a", "b"):
        secrets.create(namespace, "key", b"1")

    secrets.drop("a")
    secrets.drop("a")

    assert (secrets.names("a"), secrets.names("b")) == ([], ["key"])


def test_names_in_one_namespace_are_not_those_of_a_longer_one(secrets: SecretStore) -> None:
    secrets.create("a", "key", b"1")
    secrets.create("ab", "other", b"2")

    secrets.drop("a")

    assert (secrets.names("a"), secrets.names("ab")) == ([], ["other"])


# --- etcd alone ---


async def test_etcd_tells_nodes_what_changes(etcd: Etcd, settings: EtcdSettings) -> None:
    kept = EtcdSecrets(etcd, KEY)
    await asyncio.to_thread(kept.create, "a", "key", b"\x00\xff")
    seen: list[SecretChange] = []
    async with Etcd(settings) as other, asyncio.timeout(30), aclosing(EtcdSecrets(other, KEY).watch()) as changes:
        async for change in changes:
            seen.append(change)
            if isinstance(change, Listed):
                await asyncio.to_thread(kept.update, "a", "key", b"2")
                await asyncio.to_thread(kept.remove, "a", "key")
            if isinstance(change, SecretRemoved):
                break

    first, _, second, gone = seen
    assert (first, second) == (SecretChanged("a", "key", b"\x00\xff"), SecretChanged("a", "key", b"2"))
    assert gone == SecretRemoved("a", "key")
    assert "xff" not in repr(first)


async def test_etcd_never_sees_a_value(etcd: Etcd) -> None:
    kept = EtcdSecrets(etcd, KEY)
    await kept.check_key()
    for name in ("one", "two"):
        await asyncio.to_thread(kept.create, "a", name, b"hush hush")

    items = (await etcd.range("v1/")).items

    assert all(b"hush" not in item.value and b"aHVzaCBodXNo" not in item.value for item in items)
    values = {item.value for item in items if item.key != KEY_CHECK}
    assert len(values) == 2  # the same value twice does not show


async def test_etcd_with_another_key_file_is_refused_at_the_start(etcd: Etcd) -> None:
    other = SecretsKey(b"x" * 32)
    await EtcdSecrets(etcd, KEY).check_key()
    await EtcdSecrets(etcd, KEY).check_key()

    with pytest.raises(WrongKey, match=rf"with the key {other.id}: it was sealed with {KEY.id}; give all .* same key"):
        await EtcdSecrets(etcd, other).check_key()


async def test_etcd_cannot_pass_one_secret_off_as_another(etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    """Who can write to etcd has no key; what is sealed says what it is."""
    kept = EtcdSecrets(etcd, KEY)
    await asyncio.to_thread(kept.create, "a", "harmless", b"1")
    await asyncio.to_thread(kept.create, "a", "password", b"2")
    item = await etcd.get("v1/secrets/a/harmless")
    assert item is not None

    await etcd.put("v1/secrets/a/password", item.value)

    async with asyncio.timeout(30), aclosing(kept.watch()) as changes:
        assert await anext(changes) == SecretChanged("a", "harmless", b"1")
        assert isinstance(await anext(changes), Listed)
    assert "v1/secrets/a/password in etcd at" in caplog.text
    assert "was changed without our key: write it again" in caplog.text


def test_a_key_file_is_its_owners_and_is_never_overwritten(tmp_path: Path) -> None:
    made = create_key_file(tmp_path / "key")

    assert SecretsKey.read(tmp_path / "key") == made
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert create_key_file(tmp_path / "other") != made
    with pytest.raises(InvalidSpec, match="exists: it is not overwritten"):
        create_key_file(tmp_path / "key")
    assert made.raw.hex() not in repr(made)


def test_what_is_no_key_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("c2hvcnQ=")

    for name, message in (("short", "base64 of 32 bytes is expected"), ("none", "cannot be read: No such file")):
        with pytest.raises(InvalidSpec, match=message):
            SecretsKey.read(tmp_path / name)
