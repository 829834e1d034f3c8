"""The signature of a build, and its JSON."""

import hashlib
import hmac

import msgspec

from gpufaas_core.remote_build import BuildConfig, BuildStatus, Signer


def test_the_signature_is_of_the_body_and_the_trimmed_secret() -> None:
    signer = Signer(b" payload-secret\n")
    signer.update(b"bo")
    signer.update(bytearray(b"dy"))
    right = "sha256=" + hmac.new(b"payload-secret", b"body", hashlib.sha256).hexdigest()

    assert signer.header() == right
    assert signer.matches(right)
    for wrong in ("", right[:-1], right.replace("sha256", "sha1"), "sha256=ü", right.removeprefix("sha256=")):
        assert not signer.matches(wrong)


def test_the_json_is_openfaas_json() -> None:
    config = BuildConfig("me/fn:1", {"A": "1"}, ("linux/amd64",), skip_push=True)

    assert msgspec.json.encode(config) == (
        b'{"image":"me/fn:1","buildArgs":{"A":"1"},"platforms":["linux/amd64"],"skipPush":true}'
    )
    assert msgspec.json.encode(BuildConfig("fn")) == b'{"image":"fn"}'
    assert msgspec.json.decode(b'{"log":["x"],"status":"failed","error":"e","new":1}', type=BuildStatus) == (
        BuildStatus(["x"], "", "failed", "e")
    )
