"""
The callers: steady mixed load with service times of a heavy tail, callers that hang up (also on large bodies in
batches), that read slowly, that want a callback. A thread with an event loop of its own; `calls` is everything that was
sent.
"""

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.chaos.load import read_message
from tests.soak.functions import FUNCTIONS, Function
from tests.waiting import LIMIT_S

CUT: Final = 0
"""The status of a call whose connection broke."""
HUNG_S: Final = 90.0
"""A caller waits so long; the functions' time limit is 60 s."""
_TAIL: Final = 1.3
"""Of Pareto's law: the mean is a few times the median, and now and then one takes seconds."""
_SHORTEST_S: Final = 0.04
_LONGEST_S: Final = 6.0
LARGE_PIECES: Final = 96
"""Of 64 KiB: more than sockets and buffers hold."""
_BODY: Final = 2 << 20
"""Bytes of a call that shall join a batch: so many lie in a file."""
_TOGETHER: Final = 3
"""Callers of a batch; one of them hangs up."""


@dataclass(slots=True)
class Call:
    id: str
    function: str
    kind: str
    what: str
    service_s: float
    began: float
    oldest: int
    """The version of its function that was deployed when it began."""
    newest: int = 0
    """The last one that may have answered."""
    ended: float = 0.0
    status: int = -1
    """-1: not over; 0: the connection broke."""
    text: str = ""
    call_id: str = ""
    hangs_up: bool = False
    """Its caller will, unless it is answered first."""
    gave_up: bool = False
    """Its caller hung up."""
    callbacks: list[tuple[str, str, str]] = field(default_factory=list)
    """Status of the function, id of the call, and body, of each."""
    called_back: float = 0.0
    """The first time."""


class Load:
    """
    :param ports: of the gateways
    :param versions: of functions that are updated meanwhile: deployed, and being deployed
    """

    def __init__(
        self, ports: Sequence[int], rate: float, versions: Callable[[str], tuple[int, int]], seed: int
    ) -> None:
        self.calls: list[Call] = []
        self.strange: list[str] = []
        """Callbacks that are of no call of ours."""
        self._by_id: dict[str, Call] = {}
        self._ports = ports
        self._rate = rate
        self._versions = versions
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._callback = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop, self._closed, self._started = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(LIMIT_S)

    def stop(self, drain_s: float) -> None:
        """Send nothing more; return when all is answered and called back, or after *drain_s*."""
        self._stop.set()
        end = time.monotonic() + drain_s
        while time.monotonic() < end and any(map(is_open, self.calls)):
            time.sleep(0.1)
        self._closed.set()
        self._thread.join()

    # --- within ---

    async def _run(self) -> None:
        server = await asyncio.start_server(self._take_callback, "127.0.0.1", 0, backlog=1000)
        self._callback = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        self._started.set()
        weights = [each.rate for each in FUNCTIONS]
        due = time.monotonic()
        while not self._stop.is_set():
            while due <= time.monotonic():
                due += self._random.expovariate(self._rate)
                function = self._random.choices(FUNCTIONS, weights)[0]
                for number in range(_TOGETHER if function.kind == "batch" else 1):
                    self._send(function, hangs_up=function.kind == "cancel" or number == _TOGETHER - 1)
            await asyncio.sleep(0.01)
        while not self._closed.is_set():
            await asyncio.sleep(0.02)
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.1)  # transports that were aborted end in the next turns of the loop

    def _send(self, function: Function, *, hangs_up: bool) -> None:
        service_s = min(_LONGEST_S, _SHORTEST_S * self._random.paretovariate(_TAIL))
        what = "-"
        if function.kind == "cancel":
            service_s += 1.0
        elif function.kind == "batch":
            service_s = min(1.0, service_s + 0.1)
        elif function.kind == "large":
            what = str(LARGE_PIECES)
        elif function.kind == "hog" and self._random.random() < 0.3:
            what = "hog"
        elif function.name == "printer":
            service_s = min(1.0, service_s + 0.1)
        call = Call(
            f"c{next(self._numbers)}", function.name, function.kind, what, service_s, time.monotonic(),
            self._versions(function.name)[0], hangs_up=hangs_up,
        )  # fmt: skip
        self.calls.append(call)
        self._by_id[call.id] = call
        task = asyncio.get_running_loop().create_task(self._call(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, call: Call) -> None:
        status, limit_s = CUT, HUNG_S
        if call.hangs_up:
            limit_s = self._random.uniform(0.05, 1.5 if call.kind == "cancel" else 0.5)
        try:
            async with asyncio.timeout(limit_s):
                status = await self._exchange(call)
        except TimeoutError:
            call.gave_up = call.hangs_up
            status, call.text = (CUT, "") if call.gave_up else (999, f"no answer within {HUNG_S:g} s")
        except (OSError, EOFError, asyncio.LimitOverrunError) as exc:
            call.text = repr(exc)
        except asyncio.CancelledError:
            return
        call.ended = time.monotonic()
        call.newest = self._versions(call.function)[1]
        call.status = status

    async def _exchange(self, call: Call) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._random.choice(self._ports), limit=64 * 1024)
        try:
            kind, more = "function", ""
            if call.kind == "async":
                kind, more = "async-function", f"X-Callback-Url: {self._callback}\r\n"
            body = f"{call.id} {call.service_s:.3f} {call.what}".encode()
            if call.kind == "batch":
                body, more = body.ljust(_BODY), f"X-Id: {call.id}\r\nX-Seconds: {call.service_s:.3f}\r\n"
            writer.write(
                f"POST /{kind}/{call.function} HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n{more}"
                f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            if call.kind == "large":
                await asyncio.sleep(self._random.uniform(0, 8))  # a slow reader: the sockets are full long before
            headers, answer = await read_message(reader)
            call.text = answer.decode(errors="replace")
            call.call_id = headers.get("x-call-id", "")
            return int(headers[""].split()[1])
        finally:
            writer.transport.abort()

    async def _take_callback(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
            while True:
                headers, body = await read_message(reader)
                text, status = body.decode(errors="replace"), headers.get("x-function-status", "?")
                call = self._by_id.get([*text.split(), "", ""][1])
                if call is None:
                    self.strange.append(f"{status} {text[:200]!r} for {headers.get('x-call-id')}")
                else:
                    call.callbacks.append((status, headers.get("x-call-id", ""), text))
                    call.called_back = call.called_back or time.monotonic()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.transport.abort()


def is_open(call: Call) -> bool:
    return call.status == -1 or (call.kind == "async" and call.status == 202 and not call.callbacks)
