"""A real etcd for what keeps state in it; skipped where there is none, failed if GPUFAAS_REQUIRE names it."""

import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from gpufaas_store.etcd import Etcd, EtcdSettings
from gpufaas_store.testing import EtcdProcess, etcd_missing


def _require_etcd() -> None:
    if reason := etcd_missing():
        if "etcd" in os.environ.get("GPUFAAS_REQUIRE", "").split(","):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[EtcdProcess]:
    """One for all tests that do it no harm; each has a prefix of its own."""
    _require_etcd()
    with EtcdProcess() as server:
        yield server


@pytest.fixture
def make_etcd() -> Iterator[Callable[..., EtcdProcess]]:
    """Start an etcd of the test's own, to be killed, filled or locked up."""
    _require_etcd()
    made: list[EtcdProcess] = []

    def make(*arguments: str, scheme: str = "http", start: bool = True) -> EtcdProcess:
        server = EtcdProcess(arguments, scheme=scheme)
        made.append(server)
        if start:
            server.start()
        return server

    yield make
    for server in made:
        server.close()


@pytest.fixture
def settings(etcd_server: EtcdProcess) -> EtcdSettings:
    return EtcdSettings((etcd_server.endpoint,), prefix=f"/test-{secrets.token_hex(6)}")


@pytest.fixture
async def etcd(settings: EtcdSettings) -> AsyncIterator[Etcd]:
    async with Etcd(settings) as opened:
        yield opened
