"""A real etcd for tests. They are skipped without one, or fail if GPUFAAS_REQUIRE names it."""

import asyncio
import os
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import pytest
from tests.etcd_process import EtcdProcess, etcd_missing

from gpufaas_adapters.etcd.client import Etcd, EtcdSettings


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


@pytest.fixture(scope="session")
def elsewhere() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop in another thread: what blocks is called from the test's, as the gateway calls it from its threads."""
    with _loop() as loop:
        yield loop


@contextmanager
def _loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="etcd-loop", daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def open_etcd(elsewhere: asyncio.AbstractEventLoop) -> Iterator[Callable[[EtcdSettings], Etcd]]:
    """Open a connection on the loop in the other thread."""
    opened: list[Etcd] = []

    def on_loop(settings: EtcdSettings) -> Etcd:
        async def enter() -> Etcd:
            etcd = Etcd(settings)
            opened.append(etcd)
            return await etcd.__aenter__()

        return asyncio.run_coroutine_threadsafe(enter(), elsewhere).result(30)

    yield on_loop
    for etcd in opened:
        asyncio.run_coroutine_threadsafe(etcd.close(), elsewhere).result(30)


@pytest.fixture
def etcd_elsewhere(settings: EtcdSettings, open_etcd: Callable[[EtcdSettings], Etcd]) -> Etcd:
    """Connected to the shared etcd, with a prefix of this test's own."""
    return open_etcd(settings)


@pytest.fixture
async def etcd(settings: EtcdSettings) -> AsyncIterator[Etcd]:
    async with Etcd(settings) as opened:
        yield opened
