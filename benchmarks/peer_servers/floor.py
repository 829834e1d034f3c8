"""
The least that a server can do for calls that two workers compute, in three ways: for busy.py.

    floor.py raw|uvloop|starlette PORT
    floor.py worker DESCRIPTOR

*raw*: an epoll loop that reads a request without a look at it, writes fixed bytes to a worker's unix socket, reads the
worker's answer, and writes fixed bytes to the caller. *uvloop*: the same, as protocols. *starlette*: an application on
uvicorn whose requests wait for the worker. Each worker has one call at a time; the others wait in one queue. The worker
computes the convnet of peers.py for each message that comes, whatever it says.
"""

import asyncio
import collections
import contextlib
import select
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

CALL: Final = b"x" * 64
BODY: Final = b'{"arch": "resnet18", "top": [], "size": 64}'
HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY)
WORKERS: Final = 2


def work(descriptor: int) -> None:
    import convnet

    model = convnet.load()
    with socket.socket(fileno=descriptor) as there:
        while there.recv(65536):
            convnet.answer(model, {"seed": 7, "size": 64})
            there.sendall(BODY)


def workers() -> list[socket.socket]:
    """Start the workers; return this side of their sockets."""
    made = []
    for _ in range(WORKERS):
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, __file__, "worker", str(there.fileno())]
            subprocess.Popen(command, pass_fds=[there.fileno()])
        made.append(here)
    return made


def listener(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), backlog=256)


def raw(port: int) -> None:
    there = {each.fileno(): each for each in workers()}
    idle, waiting = list(there.values()), collections.deque[socket.socket]()
    serves: dict[int, socket.socket] = {}
    callers: dict[int, socket.socket] = {}
    accepts, poll = listener(port), select.epoll()
    for each in (accepts, *there.values()):
        poll.register(each, select.EPOLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in there:
                worker = there[descriptor]
                worker.recv(65536)
                with contextlib.suppress(OSError):  # the caller has left
                    serves.pop(descriptor).send(HEAD + BODY)
                if waiting:
                    serves[descriptor] = waiting.popleft()
                    worker.send(CALL)
                else:
                    idle.append(worker)
            elif descriptor in callers:
                caller, request = callers[descriptor], b""
                with contextlib.suppress(ConnectionResetError):
                    request = caller.recv(65536)
                if not request:
                    with contextlib.suppress(ValueError):
                        waiting.remove(caller)
                    callers.pop(descriptor).close()
                elif idle:
                    worker = idle.pop()
                    serves[worker.fileno()] = caller
                    worker.send(CALL)
                else:
                    waiting.append(caller)
            else:
                caller, _ = accepts.accept()
                caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                callers[caller.fileno()] = caller
                poll.register(caller, select.EPOLLIN)


class Pool:
    """The workers of an event loop: a call is an object whose `answer` is called."""

    def __init__(self) -> None:
        self.idle: list[Line] = []
        self.waiting = collections.deque[Caller | Call]()

    async def start(self) -> None:
        for each in workers():
            await asyncio.get_running_loop().create_unix_connection(lambda: Line(self), sock=each)

    def call(self, caller: "Caller | Call") -> None:
        if self.idle:
            self.idle.pop().call(caller)
        else:
            self.waiting.append(caller)


class Line(asyncio.Protocol):
    """The socket of a worker."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def connection_made(self, transport: Any) -> None:
        self._send = transport.write
        self._pool.idle.append(self)

    def call(self, caller: "Caller | Call") -> None:
        self._caller = caller
        self._send(CALL)

    def data_received(self, data: bytes) -> None:
        self._caller.answer(data)
        if waiting := self._pool.waiting:
            self.call(waiting.popleft())
        else:
            self._pool.idle.append(self)


class Caller(asyncio.Protocol):
    """The connection of a client: each piece that comes is a request."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def connection_made(self, transport: Any) -> None:
        self._send = transport.write

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's
        self._send = lambda _: None
        with contextlib.suppress(ValueError):
            self._pool.waiting.remove(self)

    def data_received(self, data: bytes) -> None:  # noqa: ARG002 - the protocol's
        self._pool.call(self)

    def answer(self, _: bytes) -> None:
        self._send(HEAD + BODY)


async def protocols(port: int) -> None:
    pool = Pool()
    await pool.start()
    server = await asyncio.get_running_loop().create_server(lambda: Caller(pool), sock=listener(port))
    await server.serve_forever()


class Call(asyncio.Future[bytes]):
    """A request that waits for its answer."""

    def answer(self, data: bytes) -> None:
        if not self.done():
            self.set_result(data)


def starlette(port: int) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    pool = Pool()

    @contextlib.asynccontextmanager
    async def begin(app: Starlette) -> AsyncIterator[None]:  # noqa: ARG001 - Starlette's
        await pool.start()
        yield

    async def compute(request: Request) -> Response:
        await request.body()
        call = Call()
        pool.call(call)
        return Response(await call, media_type="application/json")

    app = Starlette(routes=[Route("/", compute, methods=["GET", "POST"])], lifespan=begin)
    uvicorn.run(app, port=port, loop="uvloop", http="httptools", access_log=False, log_level="error")


def main(kind: str, number: int) -> None:
    if kind == "worker":
        work(number)
    elif kind == "raw":
        raw(number)
    elif kind == "starlette":
        starlette(number)
    else:
        import uvloop

        uvloop.run(protocols(number))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
