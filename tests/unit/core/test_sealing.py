"""Sealed secrets, byte by byte as OpenFaaS's client makes them."""

import base64

import pytest
import yaml
from nacl.public import Box, PrivateKey, PublicKey

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.sealing import key_id, make_keys, public_of, seal, unseal

VALUES = {"npm_token": b"s3cret", "ca.crt": b"\x00\xff\n"}


def test_what_is_sealed_is_read_by_the_owner_of_the_key_and_by_nobody_else() -> None:
    keys, others = make_keys(), make_keys()

    sealed = seal(keys.public, VALUES)

    assert unseal(keys.private, sealed) == VALUES
    with pytest.raises(InvalidSpec, match="sealed for another one") as refused:
        unseal(others.private, sealed)
    assert "s3cret" not in f"{sealed}{refused.value}{keys!r}"
    assert keys.private not in repr(keys)


def test_the_file_is_what_openfaas_reads() -> None:
    keys = make_keys()

    content = yaml.safe_load(seal(keys.public, VALUES))

    assert {key: content[key] for key in ("version", "algorithm", "key_id")} == {
        "version": "v1", "algorithm": "nacl/box", "key_id": keys.public[:8],
    }  # fmt: skip
    box = Box(PrivateKey(base64.b64decode(keys.private)), PublicKey(base64.b64decode(content["public_key"])))
    value = base64.b64decode(content["secrets"]["npm_token"])
    assert box.decrypt(value[24:], value[:24]) == b"s3cret"


def test_a_key_may_be_named_for_its_rotation() -> None:
    assert yaml.safe_load(seal(make_keys().public, {}, "2026-11"))["key_id"] == "2026-11"


def test_keys_are_text_and_belong_together() -> None:
    keys = make_keys()

    assert public_of(keys.private + "\n") == keys.public
    assert key_id(keys.public) == keys.public[:8]


@pytest.mark.parametrize(
    ("sealed", "why"),
    [
        ("", "no sealed secrets"),
        ("[1]", "no sealed secrets"),
        ("{a: ", "no sealed secrets"),
        ("secrets: {1: a}\nversion: v1\nalgorithm: nacl/box", "must be text"),
        ("secrets: {}\nversion: v2\nalgorithm: nacl/box", "sealed as v2 nacl/box"),
        ("secrets: {a: '!'}\nversion: v1\nalgorithm: nacl/box\npublic_key: x", "not a sender's public key"),
    ],
)
def test_what_is_no_sealed_file_is_refused_in_words(sealed: str, why: str) -> None:
    with pytest.raises(InvalidSpec, match=why):
        unseal(make_keys().private, sealed)


def test_a_value_that_was_changed_is_refused() -> None:
    keys = make_keys()
    content = yaml.safe_load(seal(keys.public, {"a": b"1"}))
    for changed in ("AAAA", "no base64", 7):
        content["secrets"]["a"] = changed
        with pytest.raises(InvalidSpec, match="a cannot be unsealed"):
            unseal(keys.private, yaml.safe_dump(content))


@pytest.mark.parametrize("text", ["", "abc", "a" * 44])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpec, match="not a public key: base64 of 32 bytes"):
        seal(text, {})
