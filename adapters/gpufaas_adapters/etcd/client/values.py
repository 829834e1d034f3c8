"""What is read from etcd and written to it. Keys are text below the prefix: ``v1/functions/openfaas-fn/echo``."""

from typing import Final, Literal, TypeAlias

from msgspec import Struct

MAX_OPERATIONS: Final = 128
"""In one transaction; etcd's own limit (``--max-txn-ops``)."""


class Item(Struct, frozen=True):
    """A key with its value. `create_revision` stays while the key exists, `mod_revision` is of its last change."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


class Range(Struct, frozen=True):
    """Items ordered by key, as they were at `revision`; a watch from there tells what happened later."""

    items: tuple[Item, ...]
    revision: int


# --- what a watch tells ---


class Put(Struct, frozen=True, tag=True):
    """*item* is there, or has another value."""

    item: Item


class Deleted(Struct, frozen=True, tag=True):
    """The key was deleted, or its lease has ended."""

    key: str


class Listed(Struct, frozen=True, tag=True):
    """All that is there has been told; what follows happened later. Comes again after a gap in a watch was closed."""


Change: TypeAlias = Put | Deleted | Listed


# --- what a transaction asks, does and answers ---


class Compare(Struct, frozen=True):
    """A condition on a revision of *key*; 0 is the revision of a key that is not there."""

    key: str
    target: Literal["mod", "create"]
    revision: int
    is_equal: bool = True


def absent(key: str) -> Compare:
    return Compare(key, "create", 0)


def present(key: str) -> Compare:
    return Compare(key, "create", 0, is_equal=False)


def unchanged(key: str, mod_revision: int) -> Compare:
    """The key was not written since it was read; 0: it was not there, and still is not."""
    return Compare(key, "mod", mod_revision)


def created_at(key: str, create_revision: int) -> Compare:
    """The key was not deleted since, not even to be made anew."""
    return Compare(key, "create", create_revision)


class DoPut(Struct, frozen=True):
    key: str
    value: bytes
    lease: int = 0


class DoDelete(Struct, frozen=True):
    key: str
    below: bool = False
    """All is deleted that begins with the key."""


class DoGet(Struct, frozen=True):
    key: str
    below: bool = False
    """All is read that begins with the key."""


Operation: TypeAlias = DoPut | DoDelete | DoGet


class TxnResult(Struct, frozen=True):
    """What a transaction did, all of it at `revision`."""

    succeeded: bool
    revision: int
    found: tuple[tuple[Item, ...], ...]
    """What each of the operations that were carried out read; empty for those that read nothing."""
