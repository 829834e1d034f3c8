"""Whether a server is ready and well: what its probes ask, when, and what they say of the answer."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LIMIT_S, eventually

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.model import FunctionId, Need
from gpufaas_gpu_manager.http_slots import connected
from gpufaas_gpu_manager.isolation.walls import Own
from gpufaas_gpu_manager.launch import served
from gpufaas_gpu_manager.launch.served import Served, probe

SILENCE = b""
READY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 13\r\n\r\n"


class Server:
    """Answers each request with the next of `answers`, one write a piece; then with the last one again."""

    def __init__(self) -> None:
        self.answers: list[list[bytes]] = [[READY]]
        self.asked: list[str] = []
        self.port = 0
        self.over = asyncio.Event()
        self.tasks: set[asyncio.Task[Any]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        with contextlib.suppress(OSError):
            if line := await reader.readline():
                self.asked.append(line.decode().split(" ")[1])
                for piece in self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]:
                    if piece is SILENCE:
                        await self.over.wait()
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
            writer.close()
            await writer.wait_closed()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = listening.sockets[0].getsockname()[1]
    async with listening:
        yield made
        made.over.set()
        await asyncio.gather(*made.tasks)


class Run(Served):
    waits_for = "to listen on port 8080"

    def __init__(self, worker: "Worker") -> None:
        self.worker = worker  # type: ignore[assignment]


class Worker:
    """A worker of a server with probes *asked*, which has its slots elsewhere."""

    def __init__(self, **asked: Any) -> None:
        self.spec = WorkerSpec(FunctionId("f"), "f", "ns", "d", "server", Need(0, slots=0), **asked)
        self.run = Run(self)
        self.own = Own()
        self.memory = 1
        self.ready = 0
        self.killed = ""
        self.device = self.calls = self
        self.loop = asyncio.get_running_loop()

    def on_slots(self, slots: object) -> None: ...

    def on_ready(self, head: object) -> None:  # noqa: ARG002 - the port's
        self.ready += 1

    def kill(self, reason: str) -> None:
        self.killed = reason


@pytest.fixture
async def opened(server: Server) -> AsyncIterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def opened(**asked: Any) -> Worker:
        worker = Worker(**asked)
        workers.append(worker)
        worker.run.serve("127.0.0.1", server.port)
        return worker

    yield opened
    for each in workers:
        each.run.close()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([READY], ""),
        ([b"HTTP/1.0 302 Found\r\n\r\n"], ""),
        ([BUSY + b"still loading"], "GET /r was answered '503 Service Unavailable' with 'still loading'"),
        ([BUSY, b"still loading"], "GET /r was answered '503 Service Unavailable' with 'still loading'"),
        ([BUSY, SILENCE], "GET /r was answered '503 Service Unavailable'"),
        ([BUSY + b"\x1b[2J\xff\n"], r"GET /r was answered '503 Service Unavailable' with '\x1b[2J�'"),
        ([BUSY + b"x" * 100_000], f"GET /r was answered '503 Service Unavailable' with '{'x' * 200}'"),
        ([b"HTTP/1.1 404 Not Found\r\n\r\n"], "GET /r was answered '404 Not Found'"),
        ([b"SMTP ready\r\n\r\n"], "GET /r was answered 'SMTP ready'"),
        ([], "GET /r was answered ''"),
    ],
)
async def test_an_answer_is_said_as_it_is(server: Server, answer: list[bytes], said: str) -> None:
    server.answers = [answer]

    async with asyncio.timeout(LIMIT_S):  # a body that does not come is not awaited as an answer is
        assert await probe("127.0.0.1", server.port, "/r", timeout_s=600.0) == said


async def test_no_answer_and_no_server_are_told_apart(server: Server) -> None:
    server.answers = [[SILENCE]]

    assert await probe("127.0.0.1", server.port, "/r", timeout_s=0.05) == "GET /r: no answer within 0.05 s"
    assert (await probe("127.0.0.1", 1, "/r")).startswith("Connect call failed")


async def test_what_a_start_waits_for_is_the_answer(server: Server, opened: Callable[..., Worker]) -> None:
    server.answers = [[BUSY + b"still loading"]]
    worker = opened(ready_path="/ready")

    why = "to be ready: GET /ready was answered '503 Service Unavailable' with 'still loading'"
    await eventually(lambda: worker.run.waits_for == why)
    assert worker.ready == 0
    server.answers = [[READY]]
    await eventually(lambda: worker.ready)


async def test_a_port_that_another_function_has_taken_is_not_called(
    server: Server, opened: Callable[..., Worker]
) -> None:
    server.answers = [[READY]]
    worker = opened()
    worker.own = Own(uid=os.geteuid() + 1)

    await eventually(lambda: worker.killed)
    assert worker.killed.endswith(f"was taken by uid {os.geteuid()}, which is not its function's")
    assert worker.ready == 0


async def test_the_socket_of_a_server_is_followed_nowhere_else(tmp_path: Path) -> None:
    place, others = tmp_path / "s", str(tmp_path / "others")
    with socket.create_server(others, family=socket.AF_UNIX):
        place.symlink_to(others)
        with pytest.raises(OSError):
            await connected(str(place))
        place.unlink()
        with socket.create_server(str(place), family=socket.AF_UNIX) as own:
            (await connected(str(place))).close()
            own.accept()[0].close()


async def test_it_is_ready_after_the_asked_number_of_good_answers_in_a_row(
    server: Server, opened: Callable[..., Worker]
) -> None:
    server.answers = [[READY], [BUSY], [READY], [READY], [READY], [BUSY]]
    worker = opened(ready_path="/ready", ready_successes=3, ready_delay_s=0.01, ready_period_s=0.01)

    await eventually(lambda: worker.ready)
    assert server.asked == ["/ready"] * 5


async def test_a_port_that_does_not_listen_yet_is_looked_at_more_often_than_the_period(
    opened: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = iter(["Connect call failed", "Connect call failed", ""])

    async def asked(*_: object) -> str:
        return next(reasons)

    monkeypatch.setattr(served, "probe", asked)
    worker = opened(ready_path="/ready", ready_period_s=600.0)

    await eventually(lambda: worker.ready)


async def test_it_is_killed_after_the_asked_number_of_bad_health_checks_in_a_row(
    server: Server, opened: Callable[..., Worker]
) -> None:
    server.answers = [[READY], [BUSY], [READY], [BUSY], [BUSY + b"no GPU"]]
    worker = opened(health_path="/health", health_period_s=0.001, health_failures=2, health_delay_s=0.01)

    await eventually(lambda: worker.killed)
    assert "failed 2 times: GET /health was answered '503 Service Unavailable' with 'no GPU'" in worker.killed
    assert len(server.asked) == 5


@pytest.mark.parametrize(
    ("asked", "kinds"),
    [({"ready_delay_s": 600.0, "ready_path": "/r"}, 0), ({"health_delay_s": 600.0, "health_path": "/h"}, 1)],
)
async def test_nothing_is_asked_before_the_initial_delay(
    server: Server, opened: Callable[..., Worker], asked: dict[str, Any], kinds: int
) -> None:
    worker = opened(health_period_s=0.0, **asked)
    other = opened(ready_path="/other", ready_successes=20, ready_period_s=0.001)

    await eventually(lambda: other.ready)
    assert (worker.ready, len(set(server.asked) - {"/other"})) == (kinds, kinds)
    assert server.asked.count("/h") == kinds
