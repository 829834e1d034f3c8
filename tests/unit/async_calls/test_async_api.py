"""Accepting asynchronous calls: what is answered when something is in the way, and that nothing is left of it."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.async_calls.fakes import FakeCallbacks, MemoryAsyncQueue
from tests.waiting import LIMIT_S, eventually

from gpufaas_async_calls import callbacks
from gpufaas_async_calls.api import AsyncInvocations
from gpufaas_async_calls.call import INLINE_BODY
from gpufaas_async_calls.callbacks import HttpCallbacks
from gpufaas_async_calls.calls import AsyncCalls
from gpufaas_async_calls.retry import RetryPolicy
from gpufaas_core.model import Function, FunctionId
from gpufaas_gateway.catalogue import Catalogue


class OneFunction(Catalogue):
    """`f`."""

    def __init__(self) -> None:
        self.loaded = True
        self.f = SimpleNamespace(
            name="f",
            full_name="f.openfaas-fn",
            max_body=1_000_000,
            timeout_s=5.0,
            unavailable=None,
            function=Function(FunctionId("f.openfaas-fn@1"), "d"),
        )
        self._called = {"f": self.f, "f.openfaas-fn": self.f}  # type: ignore[dict-item]


async def never_invoked(*_: Any) -> None:
    raise AssertionError("nothing is executed: `begin` was not called")


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.queue = MemoryAsyncQueue(folder)
        self.catalogue = OneFunction()
        self.calls = AsyncCalls(self.queue, never_invoked, FakeCallbacks(), lambda _: RetryPolicy())
        self.callbacks = HttpCallbacks("gpufaas/1", gateway="http://127.0.0.1:80", resolver=self.resolve)
        self.app = AsyncInvocations(self.catalogue, self.calls, served_by="gpufaas/1", callbacks=self.callbacks)
        self.asked: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def resolve(self, host: str, _port: int, _family: int = 0) -> list[tuple[int, str]]:
        """DNS, which knows one name."""
        self.asked.append(host)
        await self.answers.wait()
        if host != "receiver.example":
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, "10.0.0.9")]

    async def post(self, path: str = "f", *pieces: bytes | None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Send a call whose body comes in *pieces*; None: the caller goes away. After the last one, nothing comes."""
        messages: list[dict[str, Any]] = [
            {"type": "http.disconnect"}
            if piece is None
            else {"type": "http.request", "body": piece, "more_body": number < len(pieces) - 1}
            for number, piece in enumerate(pieces or (b"",))
        ]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if not messages:
                await asyncio.get_running_loop().create_future()
            return messages.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "raw_path": b"/async-function/" + path.encode(), "query_string": b"",
            "client": ("10.0.0.1", 1234),
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
        }  # fmt: skip
        await self.app(scope, receive, send)
        if not sent:
            return 0, {}, b""
        names = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], names, b"".join(message["body"] for message in sent[1:])

    def nothing_is_left(self) -> bool:
        return self.calls.backlog.counts() == {} and self.queue.waiting() == [] and list(self.folder.iterdir()) == []


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    running = asyncio.create_task(made.calls.run())
    yield made
    made.calls.finish()
    async with asyncio.timeout(LIMIT_S):
        await running


async def test_a_call_is_accepted_with_what_openfaas_says(rig: Rig) -> None:
    status, headers, body = await rig.post(
        "f/x%2Fy", b"hello", accept="*/*", expect="100-continue", connection="x-leg", x_leg="1"
    )

    assert (status, body) == (202, b"")
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", headers["x-call-id"])
    assert headers["x-served-by"] == "gpufaas/1"
    ((claimed,), _) = rig.queue.claim("queued", "f.openfaas-fn", float("inf"), 5)
    assert (claimed.call.path, claimed.call.body) == (b"/x%2Fy", b"hello")
    assert str(claimed.call.start_ns) == headers["x-start-time"]
    assert claimed.call.headers == ((b"accept", b"*/*"), (b"x-forwarded-for", b"10.0.0.1:1234"))


async def test_a_size_that_is_none_is_refused_before_the_call_is_accepted(rig: Rig) -> None:
    status, _, text = await rig.post("f", b"hello", x_gpufaas_size="large")

    assert (status, b"X-Gpufaas-Size is a number" in text) == (400, True)
    assert rig.queue.claim("queued", "f.openfaas-fn", float("inf"), 5)[0] == []


async def test_a_goal_that_is_none_is_refused_before_the_call_is_accepted(rig: Rig) -> None:
    status, _, text = await rig.post("f", b"hello", x_latency_goal="soon")

    assert (status, text.startswith(b"X-Latency-Goal: 'soon' is not a duration")) == (400, True)
    assert rig.queue.claim("queued", "f.openfaas-fn", float("inf"), 5)[0] == []


async def test_a_call_that_asks_for_what_its_function_is_not_is_refused_before_it_is_accepted(rig: Rig) -> None:
    status, headers, text = await rig.post("f", b"hello", x_min_accuracy="80")

    assert (status, headers["x-gpufaas-error"], headers["content-type"]) == (422, "unsatisfiable", "application/json")
    assert b'"has":{"accuracy":null}' in text
    assert rig.queue.claim("queued", "f.openfaas-fn", float("inf"), 5)[0] == []


async def test_a_callback_that_would_not_arrive_is_said_with_the_202(rig: Rig) -> None:
    async def warning(url: str) -> str | None:
        status, headers, _ = await rig.post("f", b"", x_callback_url=url)
        assert status == 202
        return headers.get("x-callback-warning")

    unknown = "nowhere.example: [Errno -2] Name or service not known"
    assert await warning("http://nowhere.example/a") == unknown
    assert await warning("http://nowhere.example/b") == unknown
    assert await warning("http://receiver.example/") is None
    assert rig.asked == ["nowhere.example", "receiver.example"], "each host is looked up once"
    assert await warning("http://gateway.openfaas:8080/function/nobody?a=1") == "there is no function nobody"
    assert await warning("http://gateway:8080/from/token/async-function/f/x") is None


async def test_a_name_server_that_does_not_answer_holds_up_two_calls_at_most(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those behind them with the same host, either."""
    monkeypatch.setattr(callbacks, "_LOOKUP_S", LIMIT_S)
    rig.answers.clear()

    async def send(number: int) -> str | None:
        status, headers, _ = await rig.post("f", b"", x_callback_url=f"http://{number}.example/")
        assert status == 202
        return headers.get("x-callback-warning")

    held = [asyncio.create_task(send(number)) for number in range(2)]
    await eventually(lambda: len(rig.asked) == 2)
    assert [await send(number) for number in range(10)] == [None] * 10
    assert not any(each.done() for each in held)
    assert rig.asked == ["0.example", "1.example"], "threads look names up, of which others need some"

    rig.answers.set()
    assert all(await asyncio.gather(*held, send(0), send(2)))


async def test_a_full_disk_is_507_and_nothing_is_left_of_the_call(rig: Rig) -> None:
    rig.queue.failure = "the disk is full"

    for body in (b"small", b"x" * (INLINE_BODY + 1)):
        status, _, text = await rig.post("f", body)
        assert (status, text) == (507, b"the disk is full")

    assert rig.nothing_is_left()


async def test_a_body_that_cannot_be_spooled_is_507(rig: Rig) -> None:
    rig.queue._folder = rig.folder / "gone"

    status, _, text = await rig.post("f", b"x" * (INLINE_BODY + 1))

    assert (status, b"make room there" in text) == (507, True)
    assert rig.nothing_is_left()


@pytest.mark.parametrize("pieces", [(b"x" * 300_000, None), (b"x", None), (None,)])
async def test_a_caller_who_goes_away_before_the_end_of_the_body_has_sent_nothing(
    rig: Rig, pieces: tuple[bytes | None, ...]
) -> None:
    assert (await rig.post("f", *pieces))[0] == 0

    assert rig.nothing_is_left()


async def test_a_body_that_never_ends_is_504_after_the_functions_time_limit(rig: Rig) -> None:
    rig.catalogue.f.timeout_s = 0.01

    async def stuck() -> dict[str, Any]:
        if first:
            return first.pop()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    first = [{"type": "http.request", "body": b"x" * 300_000, "more_body": True}]
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "raw_path": b"/async-function/f", "query_string": b"", "headers": []}
    await rig.app(scope, stuck, send)  # type: ignore[arg-type]

    assert sent[0]["status"] == 504
    assert rig.nothing_is_left()


async def test_too_large_a_body_is_413_by_its_length_or_as_it_comes(rig: Rig) -> None:
    assert (await rig.post("f", b"", content_length="2000000"))[0] == 413
    assert (await rig.post("f", b"x" * 600_000, b"x" * 600_000))[0] == 413

    assert rig.nothing_is_left()


async def test_while_the_platform_starts_an_unknown_function_may_still_come(rig: Rig) -> None:
    assert (await rig.post("other"))[0] == 404
    rig.catalogue.loaded = False
    assert (await rig.post("other"))[0] == 503
    rig.catalogue.f.unavailable = "its bundle is damaged"
    assert (await rig.post("f"))[0] == 503
