"""What a layer says is checked: code of its function has run in it, and may say anything."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.waiting import eventually

from gpufaas_gpu_manager.launch.layer import LayerServer
from gpufaas_gpu_manager.proc import state_of
from gpufaas_gpu_manager.zygote import Exited, Forked, FromForkServer, ServerReady

PARENT = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); input()"


class Liar:
    """A process with one child, whose socket the test has."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        self.child = int(self._process.stdout.readline())
        self.pid = self._process.pid
        self.failed: list[str] = []
        self.heard: list[tuple[int, int]] = []
        """Ends of workers."""
        self.born: asyncio.Future[int | None] | None = None
        ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.server = LayerServer(cast(Any, self), ours, lambda _: None, lambda *told: self.heard.append(told))
        self.say(ServerReady(1, []))

    def kill(self, reason: str) -> None:
        self.failed.append(reason)

    def say(self, message: FromForkServer) -> None:
        self._theirs.send(msgspec.msgpack.encode(message))

    def babble(self) -> None:
        self._theirs.send(b"\xc1 no message")

    async def ask_for(self, worker: int) -> None:
        self.born = asyncio.ensure_future(self.server.fork(cast(Any, SimpleNamespace(worker=worker)), []))
        await eventually(lambda: worker in self.server._requests)

    @property
    def has_forked(self) -> int | None:
        return self.born.result() if self.born is not None and self.born.done() else None

    def close(self) -> None:
        self.server.over()
        self._theirs.close()
        os.killpg(self.pid, 9)
        self._process.communicate()


@pytest.fixture
async def liar(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Liar]:
    monkeypatch.setattr("gpufaas_gpu_manager.forks._encode", lambda _: b"a spawn")
    liar = Liar()
    yield liar
    liar.close()


async def test_a_worker_that_was_asked_for_and_is_its_child_is_believed(liar: Liar) -> None:
    await liar.ask_for(5)
    liar.say(Forked(5, liar.child))
    await eventually(lambda: liar.has_forked == liar.child)
    os.kill(liar.child, 9)
    await eventually(lambda: state_of(liar.child) == "Z")
    liar.say(Exited(5, -9))
    await eventually(lambda: liar.heard == [(5, -9)])
    assert liar.failed == []


@pytest.mark.parametrize("lie", ["another's worker", "another's process", "an end", "no message"])
async def test_a_lie_is_its_end_and_changes_nothing_of_other_workers(liar: Liar, lie: str) -> None:
    await liar.ask_for(5)
    if lie == "another's worker":
        liar.say(Forked(6, liar.child))
    elif lie == "another's process":
        liar.say(Forked(5, os.getpid()))
    elif lie == "no message":
        liar.babble()
    else:
        liar.say(Forked(5, liar.child))
        liar.say(Exited(5, 0))
    await eventually(lambda: liar.failed)
    assert liar.has_forked == (liar.child if lie == "an end" else None)
    assert liar.heard == []

    liar.server.over()
    assert liar.heard[-1] == (5, -9), "only now it is known that nothing of it is left"


async def test_what_it_says_of_workers_that_are_not_its_own_is_not_heard(liar: Liar) -> None:
    liar.say(Exited(6, 0))
    await liar.ask_for(5)
    liar.say(Forked(5, liar.child))
    await eventually(lambda: liar.has_forked == liar.child)
    assert liar.failed == liar.heard == []
