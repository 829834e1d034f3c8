"""
Secrets of a build, sealed for the builder that may read them.

Keys are base64 of 32 bytes (Curve25519), as text: what key files hold and what ``/publickey`` tells. Each value is
sealed for itself (XSalsa20-Poly1305, a nonce of its own before it), with a sender's key made for this one file. The
names can be read by whoever has the file, the values only with the builder's private key. No error has a value in it.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from gpufaas_core.errors import InvalidSpec

ALGORITHM: Final = "nacl/box"
_VERSION: Final = "v1"
_KEY_BYTES: Final = 32
_ID_CHARS: Final = 8


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: str
    private: str = field(repr=False)


def make_keys() -> KeyPair:
    from nacl.public import PrivateKey

    made = PrivateKey.generate()
    return KeyPair(_text(bytes(made.public_key)), _text(bytes(made)))


def public_of(private: str) -> str:
    """
    Return the public key that belongs to *private*.

    :raises InvalidSpec: it is no key
    """
    from nacl.public import PrivateKey

    return _text(bytes(PrivateKey(_key(private, "private")).public_key))


def key_id(public: str) -> str:
    """
    Return what tells one key from a later one.

    :raises InvalidSpec: *public* is no key
    """
    return _text(_key(public, "public"))[:_ID_CHARS]


def seal(public: str, values: Mapping[str, bytes], named: str | None = None) -> str:
    """
    Return the text of a sealed file, YAML, that only the owner of *public*'s private key can open.

    :param named: the key's id; else `key_id`
    :raises InvalidSpec: *public* is no key
    """
    from nacl.public import Box, PrivateKey, PublicKey

    sender = PrivateKey.generate()
    box = Box(sender, PublicKey(_key(public, "public")))
    content = {
        "version": _VERSION,
        "algorithm": ALGORITHM,
        "key_id": named or key_id(public),
        "public_key": _text(bytes(sender.public_key)),
        "secrets": {name: _text(bytes(box.encrypt(value))) for name, value in sorted(values.items())},
    }
    return yaml.safe_dump(content, sort_keys=False)


def unseal(private: str, sealed: str) -> dict[str, bytes]:
    """
    Return the values in *sealed*, the text that `seal` returns, by name.

    :raises InvalidSpec: it is not such a text, was sealed for another key, or was changed since
    """
    from nacl.exceptions import CryptoError
    from nacl.public import Box, PrivateKey, PublicKey

    content = _read(sealed)
    box = Box(PrivateKey(_key(private, "private")), PublicKey(_key(str(content.get("public_key")), "sender's public")))
    values: dict[str, bytes] = {}
    for name, text in content["secrets"].items():
        try:
            values[name] = box.decrypt(base64.b64decode(text, validate=True))
        except (binascii.Error, CryptoError, ValueError, TypeError):
            mine, meant = key_id(public_of(private)), content.get("key_id")
            raise InvalidSpec(
                f"{name} cannot be unsealed with the key {mine}: it was sealed for another one (it says {meant}), or "
                "was changed since"
            ) from None
    return values


def _read(sealed: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(sealed)
    except yaml.YAMLError:
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("secrets"), dict):
        raise InvalidSpec(
            "these are no sealed secrets: YAML with version, algorithm, public_key and secrets is expected"
        )
    if (content.get("version"), content.get("algorithm")) != (_VERSION, ALGORITHM):
        raise InvalidSpec(
            f"the secrets are sealed as {content.get('version')} {content.get('algorithm')}: {_VERSION} {ALGORITHM} is "
            "known here"
        )
    if not all(isinstance(name, str) for name in content["secrets"]):
        raise InvalidSpec("the names of sealed secrets must be text")
    return content


def _key(text: str, which: str) -> bytes:
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != _KEY_BYTES:
        raise InvalidSpec(f"it is not a {which} key: base64 of {_KEY_BYTES} bytes, as 'secret keygen' writes it")
    return key


def _text(key: bytes) -> str:
    return base64.b64encode(key).decode()
