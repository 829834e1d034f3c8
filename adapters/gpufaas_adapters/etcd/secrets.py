"""
`EtcdSecrets`: secrets in etcd, sealed with a key that is not in etcd (port: `gpufaas_gateway.ports.SecretStore`).

Gateways and nodes are given the same key file. A value is sealed together with its namespace and name
(XSalsa20-Poly1305, a nonce for each): a person who can write to etcd and has no key can neither read a value nor put
one in the place of another. `KEY_CHECK` tells at the start whether a key file is the right one.
"""

import base64
import binascii
import hashlib
import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from gpufaas_adapters.etcd.blocking import Blocking
from gpufaas_adapters.etcd.client import (
    Compare,
    Deleted,
    DoGet,
    DoPut,
    Etcd,
    EtcdRefused,
    Item,
    Listed,
    Put,
    absent,
    present,
)
from gpufaas_core.errors import InvalidSpec, NameTaken, UnknownName

log = logging.getLogger(__name__)

SECRETS: Final = "v1/secrets/"
KEY_CHECK: Final = "v1/secrets-key"

_KEY_BYTES: Final = 32
_encode: Final = msgspec.json.encode


class WrongKey(EtcdRefused):
    """What is sealed in etcd was sealed with another key than ours."""


@dataclass(frozen=True, slots=True)
class SecretsKey:
    """The key that seals values. In a file: base64 of 32 bytes."""

    raw: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """A name for the key that does not reveal it."""
        return hashlib.sha256(b"gpufaas secrets key " + self.raw).hexdigest()[:12]

    @staticmethod
    def read(path: Path) -> "SecretsKey":
        """:raises InvalidSpec: it cannot be read, or is no key"""
        try:
            text = path.read_text("ascii").strip()
            raw = base64.b64decode(text, validate=True)
        except OSError as exc:
            raise InvalidSpec(f"the key file for secrets {path} cannot be read: {exc.strerror}") from None
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != _KEY_BYTES:
            raise InvalidSpec(
                f"{path} is no key file for secrets: base64 of {_KEY_BYTES} bytes is expected, as "
                f"'head -c {_KEY_BYTES} /dev/urandom | base64' makes it"
            )
        return SecretsKey(raw)


def create_key_file(path: Path) -> SecretsKey:
    """
    Write a new key to *path*, which only its owner may read.

    :raises InvalidSpec: it exists (what was sealed with that key could never be read again), or cannot be written
    """
    key = SecretsKey(os.urandom(_KEY_BYTES))
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InvalidSpec(f"{path} exists: it is not overwritten, for what it sealed could not be read again") from None
    except OSError as exc:
        raise InvalidSpec(f"the key cannot be written to {path}: {exc.strerror}") from None
    with open(file, "wb") as out:
        out.write(base64.b64encode(key.raw) + b"\n")
        out.flush()
        os.fsync(out.fileno())
    return key


class _Sealed(Struct, frozen=True):
    """The value of a key."""

    key: str
    """Id of the key that sealed it."""
    sealed: bytes
    """In JSON: base64."""


class SecretChanged(Struct, frozen=True, tag=True):
    namespace: str
    name: str
    value: bytes

    def __repr__(self) -> str:
        return f"SecretChanged({self.namespace!r}, {self.name!r})"


class SecretRemoved(Struct, frozen=True, tag=True):
    namespace: str
    name: str


SecretChange = SecretChanged | SecretRemoved | Listed


class EtcdSecrets:
    """
    The port's methods block, and are called from other threads than that of *etcd*'s loop; those that are coroutines
    belong to that loop, and are for nodes. `check_key` comes first.
    """

    def __init__(self, etcd: Etcd, key: SecretsKey) -> None:
        from nacl.secret import SecretBox

        self._etcd = etcd
        self._blocking = Blocking(etcd)
        self._key_id = key.id
        self._box = SecretBox(key.raw)

    async def check_key(self) -> None:
        """
        Check that our key is the one that seals what is in etcd. The first process to check decides which one it is.

        :raises WrongKey: it is another
        """
        mine = self._sealed("", KEY_CHECK, b"")
        done = await self._etcd.txn((absent(KEY_CHECK),), (DoPut(KEY_CHECK, mine),), (DoGet(KEY_CHECK),))
        if not done.succeeded:
            self._open(done.found[0][0], "", KEY_CHECK)

    # --- Secrets ---

    def names(self, namespace: str) -> list[str]:
        prefix = f"{SECRETS}{namespace}/"
        return [key.removeprefix(prefix) for key in self._blocking(self._etcd.keys(prefix))]

    def create(self, namespace: str, name: str, value: bytes) -> None:
        if not self._put(absent, namespace, name, value):
            raise NameTaken(f"secret {name} in {namespace} exists: update it with PUT, or remove it first")
        log.info("secret.created name=%s namespace=%s", name, namespace)

    def update(self, namespace: str, name: str, value: bytes) -> None:
        """Durable when it returns. Running functions find it in their files as soon as their nodes have read it."""
        if not self._put(present, namespace, name, value):
            raise _unknown(namespace, name)
        log.info("secret.updated name=%s namespace=%s", name, namespace)

    def remove(self, namespace: str, name: str) -> None:
        if not self._blocking(self._etcd.delete(f"{SECRETS}{namespace}/{name}")):
            raise _unknown(namespace, name)
        log.info("secret.removed name=%s namespace=%s", name, namespace)

    def drop(self, namespace: str) -> None:
        self._blocking(self._etcd.delete(f"{SECRETS}{namespace}/", below=True))

    # --- for nodes ---

    async def watch(self) -> AsyncGenerator[SecretChange]:
        """Yield what is there, then `Listed`, then each change, without end. What cannot be opened is logged."""
        async with aclosing(self._etcd.watch(SECRETS)) as changes:
            async for change in changes:
                match change:
                    case Put(item):
                        namespace, _, name = item.key.removeprefix(SECRETS).partition("/")
                        try:
                            yield SecretChanged(namespace, name, self._open(item, namespace, name))
                        except WrongKey as exc:
                            log.error("secret.unreadable reason=%s", exc)
                    case Deleted(key):
                        namespace, _, name = key.removeprefix(SECRETS).partition("/")
                        yield SecretRemoved(namespace, name)
                    case Listed():
                        yield change

    # --- sealing ---

    def _put(self, condition: Callable[[str], Compare], namespace: str, name: str, value: bytes) -> bool:
        key = f"{SECRETS}{namespace}/{name}"
        put = DoPut(key, self._sealed(namespace, name, value))
        return self._blocking(self._etcd.txn((condition(key),), (put,))).succeeded

    def _sealed(self, namespace: str, name: str, value: bytes) -> bytes:
        sealed = self._box.encrypt(msgspec.msgpack.encode((namespace, name, value)))
        return _encode(_Sealed(self._key_id, bytes(sealed)))

    def _open(self, item: Item, namespace: str, name: str) -> bytes:
        from nacl.exceptions import CryptoError

        by = "?"
        try:
            found = msgspec.json.decode(item.value, type=_Sealed)
            by = found.key
            content = msgspec.msgpack.decode(self._box.decrypt(found.sealed), type=tuple[str, str, bytes])
        except (msgspec.DecodeError, CryptoError, ValueError):
            content = ("", "", b"")
        if content[:2] != (namespace, name):
            what = f"{self._etcd.settings.prefix}/{item.key} in etcd at {self._etcd.endpoint}"
            if by == self._key_id:
                raise WrongKey(f"{what} was changed without our key: write it again")
            raise WrongKey(
                f"{what} cannot be opened with the key {self._key_id}: it was sealed with {by}; give all gateways and "
                "nodes the same key file"
            )
        return content[2]


def _unknown(namespace: str, name: str) -> UnknownName:
    return UnknownName(f"secret {name} in {namespace} does not exist: create it with POST")
