"""The addresses of workers: a valid one needs the key."""

import pytest

from gpufaas_core.messages import Outer
from gpufaas_core.model import DeviceId, FunctionId
from gpufaas_core.origin import Origins, without_origin

WORKER = Outer(DeviceId("node-1/cuda:0"), FunctionId("résumé.openfaas-fn@7"), 2)


def token_of(origins: Origins) -> str:
    address = origins.address("http://gateway:8080/", WORKER)
    token, path = without_origin(address.removeprefix("http://gateway:8080") + "/function/f/x")
    assert path == "/function/f/x"
    return token


def test_any_gateway_with_the_key_reads_whose_it_is() -> None:
    assert Origins(b"secret").read(token_of(Origins(b"secret"))) == WORKER
    assert Origins(b"other").read(token_of(Origins(b"secret"))) is None
    assert Origins().read(token_of(Origins())) is None, "without a key each platform has its own"


@pytest.mark.parametrize("token", ["", "x", "A" * 22, "A" * 100, "é", "a b", "=" * 8])
def test_what_nobody_made_is_nobodys(token: str) -> None:
    assert Origins(b"secret").read(token) is None


def test_no_letter_of_it_can_be_changed() -> None:
    token = token_of(Origins(b"secret"))
    for at, letter in enumerate(token[:-1]):
        changed = token[:at] + ("A" if letter != "A" else "B") + token[at + 1 :]
        assert Origins(b"secret").read(changed) is None


def test_a_path_without_one_stays_as_it_is() -> None:
    assert without_origin("/function/from/x") == ("", "/function/from/x")
    assert without_origin("/from/t") == ("t", "/")
