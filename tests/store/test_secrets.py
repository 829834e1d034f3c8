"""What every `Secrets` does: the fake that tests use, and files. Another adapter is added to `STORES`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpufaas_gateway.errors import NameTaken, UnknownName
from gpufaas_gateway.ports import Secrets
from gpufaas_gateway.secret_files import SecretFiles
from gpufaas_gateway.testing import MemorySecrets

STORES: dict[str, Callable[[Path], Secrets]] = {
    "memory": lambda _: MemorySecrets(),
    "files": lambda root: SecretFiles(root / "secrets", root / "mounts"),
}


@pytest.fixture(params=STORES)
def secrets(request: pytest.FixtureRequest, tmp_path: Path) -> Secrets:
    return STORES[request.param](tmp_path)


def test_a_namespace_without_secrets_has_no_names(secrets: Secrets) -> None:
    assert secrets.names("openfaas-fn") == []


def test_names_are_sorted_and_of_one_namespace(secrets: Secrets) -> None:
    for namespace, name in (("a", "two"), ("a", "one"), ("b", "three")):
        secrets.create(namespace, name, b"")

    assert secrets.names("a") == ["one", "two"]


def test_a_name_is_taken_once_in_a_namespace(secrets: Secrets) -> None:
    secrets.create("a", "key", b"1")
    secrets.create("b", "key", b"1")

    with pytest.raises(NameTaken, match="key in a exists"):
        secrets.create("a", "key", b"2")


def test_only_what_exists_is_updated_or_removed(secrets: Secrets) -> None:
    secrets.create("a", "key", b"1")

    with pytest.raises(UnknownName, match="key in b does not exist"):
        secrets.update("b", "key", b"2")
    with pytest.raises(UnknownName, match="other in a does not exist"):
        secrets.remove("a", "other")

    assert secrets.names("a") == ["key"]


def test_a_removed_name_can_be_used_again(secrets: Secrets) -> None:
    secrets.create("a", "key", b"1")
    secrets.update("a", "key", b"2")
    secrets.remove("a", "key")

    secrets.create("a", "key", b"3")

    assert secrets.names("a") == ["key"]


def test_a_dropped_namespace_is_empty_and_dropping_twice_is_no_error(secrets: Secrets) -> None:
    for namespace in ("a", "b"):
        secrets.create(namespace, "key", b"1")

    secrets.drop("a")
    secrets.drop("a")

    assert (secrets.names("a"), secrets.names("b")) == ([], ["key"])
