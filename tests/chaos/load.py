"""
Steady load on a cluster, and the checker of what came of each call.

Every call carries a payload of its own, which the function answers and writes to a record (one write to a file opened
with O_APPEND). So it can be said of each call whether its caller got its own answer, and how often it was executed.
"""

import asyncio
import contextlib
import itertools
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.waiting import LIMIT_S

RECORDING_MODEL: Final = """
    import os

    FILE = os.open(os.environ["record"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def load(device):
        return None

    def handle(model, event, context):
        os.write(FILE, event.body + b"\\n")
        return event.body
"""
RECORDING: Final = RECORDING_MODEL.replace("def load(device):\n        return None", "").replace(
    "model, event", "event"
)

HUNG_S: Final = LIMIT_S
"""A caller waits so long for an answer."""
_TICK_S: Final = 0.01
CUT: Final = 0
"""The status of a call whose connection broke, or could not be made."""
ALLOWED: Final = frozenset((CUT, 502, 503, 504))


@dataclass(slots=True)
class Call:
    payload: str
    function: str
    gateway: int
    wanted_async: bool
    began: float
    ended: float = 0.0
    status: int = -1
    """-1: not over."""
    text: str = ""
    id: str = ""
    callbacks: list[tuple[str, str]] = field(default_factory=list)
    """Status of the function and body, of each callback."""
    called_back: float = 0.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """:param share: its part of all calls"""

    function: str
    share: float
    is_async: bool = False


class Load:
    """
    Calls per second, from now until `stop`, evenly over the gateways, whether or not earlier ones were answered.

    A thread of its own. `calls` is everything that was sent.
    """

    def __init__(self, gateways: Sequence[tuple[str, int]], traffic: Sequence[Traffic], rate: float, host: str) -> None:
        self.calls: list[Call] = []
        self.strange: list[str] = []
        """Callbacks that are of no call of ours."""
        self._by_payload: dict[str, Call] = {}
        self._gateways = list(gateways)
        self._traffic = list(traffic)
        self._rate = rate
        self._host = host
        self._idle: list[deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = [deque() for _ in gateways]
        self._stop = threading.Event()
        self._closed = threading.Event()
        self._name = secrets.token_hex(6)
        """Begins its payloads: loads one after another have the same record."""
        self._started = threading.Event()
        self._callback = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._main, name="load")

    def __enter__(self) -> "Load":
        self._thread.start()
        assert self._started.wait(LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._closed.set()
        self._thread.join()

    def stop(self, drain_s: float) -> None:
        """Send nothing more; return when all is answered and called back, or after *drain_s*."""
        self._stop.set()
        end = time.monotonic() + drain_s
        while time.monotonic() < end and self.open_calls():
            time.sleep(0.05)
        self._closed.set()
        self._thread.join()

    def open_calls(self) -> list[Call]:
        return [
            each for each in self.calls
            if each.status == -1 or (each.wanted_async and each.status == 202 and not each.callbacks)
        ]  # fmt: skip

    # --- within ---

    def _main(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        server = await asyncio.start_server(self._take_callback, self._host, 0, backlog=1000)
        self._callback = f"http://{self._host}:{server.sockets[0].getsockname()[1]}/"
        self._started.set()
        began, sent, numbers = time.monotonic(), 0, itertools.count()
        due = [0.0] * len(self._traffic)
        while not self._stop.is_set():
            while sent < (time.monotonic() - began) * self._rate:
                sent += 1
                for at, each in enumerate(self._traffic):
                    due[at] += each.share
                at = max(range(len(due)), key=due.__getitem__)
                due[at] -= sum(each.share for each in self._traffic)
                self._send(self._traffic[at], sent % len(self._gateways), next(numbers))
            await asyncio.sleep(_TICK_S)
        while not self._closed.is_set():
            await asyncio.sleep(0.02)
        server.close()
        for task in list(self._tasks):
            task.cancel()
        for idle in self._idle:
            for _, writer in idle:
                writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.1)  # transports that were aborted end in the next turns of the loop

    def _send(self, traffic: Traffic, gateway: int, number: int) -> None:
        call = Call(f"{self._name}.{number}", traffic.function, gateway, traffic.is_async, time.monotonic())
        self.calls.append(call)
        self._by_payload[call.payload] = call
        task = asyncio.get_running_loop().create_task(self._call(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, call: Call) -> None:
        status = CUT
        try:
            async with asyncio.timeout(HUNG_S):
                status, call.text, call.id = await self._exchange(call)
        except TimeoutError:
            status, call.text = 999, f"no answer within {HUNG_S:g} s"
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as exc:
            call.text = repr(exc)
        except asyncio.CancelledError:
            return
        call.ended = time.monotonic()
        call.status = status

    async def _exchange(self, call: Call) -> tuple[int, str, str]:
        idle = self._idle[call.gateway]
        connection = None
        while idle:
            connection = idle.pop()
            if not connection[0].at_eof() and connection[0].exception() is None:
                break
            connection[1].transport.abort()
            connection = None
        if connection is None:
            connection = await asyncio.open_connection(*self._gateways[call.gateway])
        reader, writer = connection
        kept = False
        try:
            kind, more = ("function", "")
            if call.wanted_async:
                kind, more = ("async-function", f"X-Callback-Url: {self._callback}\r\n")
            body = call.payload.encode()
            writer.write(
                f"POST /{kind}/{call.function} HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n{more}"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            headers, answer = await read_message(reader)
            kept = headers.get("connection") != "close"
            return int(headers[""].split()[1]), answer.decode(errors="replace"), headers.get("x-call-id", "")
        finally:
            if kept:
                idle.append(connection)
            else:
                writer.transport.abort()

    async def _take_callback(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                headers, body = await read_message(reader)
                call = self._by_payload.get(body.decode(errors="replace"))
                status = headers.get("x-function-status", "?")
                if call is None:
                    self.strange.append(f"{status} {body[:200]!r} for {headers.get('x-call-id')}")
                else:
                    call.callbacks.append((status, headers.get("x-call-id", "")))
                    call.called_back = call.called_back or time.monotonic()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.transport.abort()


async def read_message(reader: asyncio.StreamReader) -> tuple[dict[str, str], bytes]:
    """Return the headers, the first line as the one without a name, and the body, which has a length or is chunked."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {"": head[0]}
    for line in head[1:-2]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding") != "chunked":
        return headers, await reader.readexactly(int(headers.get("content-length", "0")))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return headers, body


@dataclass(slots=True)
class Verdict:
    """What came of the calls. `wrong` has what must not be; empty: all is well."""

    calls: int
    accepted: int
    failures: Counter[int]
    """Of synchronous calls, and of asynchronous ones that were not accepted, by status."""
    again: int
    """Asynchronous calls that were executed more than once, as is documented."""
    span_s: float
    """From the first failure to the last."""
    p99_s: float
    wrong: list[str]
    texts: Counter[str]


def judge(load: Load, record: Path, since: float, until: float) -> Verdict:
    """
    :param since: from then on parts were broken
    :param until: from then on calls must succeed again; times of `time.monotonic`
    """
    executed = Counter(record.read_text().split()) if record.exists() else Counter()
    wrong: list[str] = [f"a callback of no call: {each}" for each in load.strange[:3]]
    failures: Counter[int] = Counter()
    texts: Counter[str] = Counter()
    accepted = again = 0
    failed_at: list[float] = []
    took: list[float] = []

    def say(call: Call, what: str) -> None:
        times = (
            f"{call.began - since:+.2f} s to {call.ended - since:+.2f} s after the fault, over at {until - since:+.2f}"
        )
        wrong.append(f"{call.function} {call.payload} by gateway {call.gateway + 1}, {times}: {what}")

    for call in load.calls:
        count = executed[call.payload]
        expected = 202 if call.wanted_async else 200
        if call.status == expected:
            if call.wanted_async:
                accepted += 1
                again += count > 1
                if not call.callbacks:
                    say(call, f"accepted as {call.id}, but never called back; executed {count} times")
                elif not count:
                    say(call, f"called back {call.callbacks}, but never executed")
                elif {status for status, _ in call.callbacks} != {"200"} or {id_ for _, id_ in call.callbacks} != {
                    call.id
                }:
                    say(call, f"its callbacks are {call.callbacks}")
                elif count > 1 and not (call.began < until and call.called_back > since):
                    say(call, f"executed {count} times though nothing was broken")
            else:
                took.append(call.ended - call.began)
                if call.text != call.payload:
                    say(call, f"it got another answer: {call.text[:200]!r}")
                if count != 1:
                    say(call, f"answered, and executed {count} times")
            continue
        if call.status == -1:
            say(call, f"nothing came of it; executed {count} times")
            continue
        failures[call.status] += 1
        texts[f"{call.status} {call.text[:160]}"] += 1
        failed_at.append(call.ended)
        if call.status not in ALLOWED:
            say(call, f"it failed with {call.status}: {call.text[:200]}")
        elif not call.text.strip():
            say(call, f"it failed with {call.status} and no word why")
        elif not (since <= call.ended and call.began <= until):
            say(call, f"it failed though nothing was broken: {call.status} {call.text[:200]}")
        if not call.wanted_async and count > 1:
            say(call, f"executed {count} times")
    took.sort()
    return Verdict(
        len(load.calls), accepted, failures, again,
        max(failed_at) - min(failed_at) if failed_at else 0.0,
        took[int(len(took) * 0.99)] if took else 0.0, wrong, texts,
    )  # fmt: skip
