"""`Calls.run`, which runs the calls of all fronts: without a protocol, and without a server."""

import asyncio
import gc
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.gateway.conftest import DEVICE, Gateway
from tests.unit.gateway.test_contract_checklist import Exchange, Functions
from tests.waiting import LIMIT_S, eventually

from gpufaas_core.errors import (
    CallCancelled,
    DeadlineExceeded,
    GpufaasError,
    GrantRefused,
    OutOfMemory,
    Overloaded,
    WorkerCrashed,
)
from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId
from gpufaas_core.wire.bodies import STREAM
from gpufaas_core.wire.heads import AnswerHead, CallHead
from gpufaas_gateway.answer_stream import BrokenAnswer
from gpufaas_gateway.call_body import Body
from gpufaas_gateway.request import Request


class Leaving:
    """A caller who goes away when `gone` is set; his body is there at once."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)
        self.gone = asyncio.Event()

    async def receive(self) -> tuple[bytes, bool]:
        if self._pieces:
            return self._pieces.pop(0), bool(self._pieces)
        await self.gone.wait()
        raise CallCancelled("the caller went away")

    def on_gone(self, _: object) -> bool:
        return False


class Waiting(Functions):
    """Every call waits for its grant."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[asyncio.Future[Grant]] = []
        self.cancelled: list[CallId] = []
        self.over_: list[CallId] = []
        self.begins: dict[CallId, Callable[[Grant], None]] = {}

    def on_grant(self, call: CallId, begin: Callable[[Grant], None]) -> None:
        self.begins[call] = begin

    def place(self, *_: object, **__: object) -> "asyncio.Future[Grant]":  # type: ignore[override]
        self.waiting.append(asyncio.get_running_loop().create_future())
        return self.waiting[-1]

    def cancel(self, call: CallId) -> None:
        self.cancelled.append(call)

    def over(self, call: CallId) -> None:
        self.over_.append(call)


class InPieces(Exchange):
    """Answers with a head, then *pieces*; then `fail` ends it, or it breaks off with *error*."""

    def __init__(self, grant: Grant, pieces: list[bytes], error: GpufaasError | None = None) -> None:
        super().__init__(grant, b"", AnswerHead(200, []), False)
        self._pieces, self._error = pieces, error

    async def answer(self) -> tuple[AnswerHead, bytes, bool]:
        return AnswerHead(200, []), b"", False

    async def chunk(self) -> bytes | None:
        if not self._pieces and self._error is not None:
            raise self._error
        return self._pieces.pop(0)


class Streaming(Functions):
    error: GpufaasError | None = None
    cancelled = 0

    def call(self, grant: Grant, head: CallHead, body: bytes | memoryview) -> Exchange:  # noqa: ARG002 - the port's
        return InPieces(grant, [b"one", b"two"], self.error)

    def cancel(self, call: CallId) -> None:  # noqa: ARG002 - the port's
        self.cancelled += 1


class Crashing(Functions):
    """Its worker is started from host memory, and crashes."""

    def place(self, *args: Any, **kwargs: Any) -> Grant:
        return replace(super().place(*args, **kwargs), cold=True)

    def call(self, grant: Grant, head: CallHead, body: bytes | memoryview) -> Exchange:
        exchange = super().call(grant, head, body)
        exchange.load_s, exchange.phases, exchange.tier = 0.5, (("read", 0.4),), "host"

        async def answer() -> tuple[AnswerHead, bytes, bool]:
            raise WorkerCrashed("it crashed")

        exchange.answer = answer  # type: ignore[method-assign]
        return exchange


async def test_a_call_that_fails_says_how_its_worker_was_started(gateway: Gateway) -> None:
    functions = Crashing()

    answer = await (await gateway.calls(functions)).run(Request("echo"))

    headers = dict(answer.headers)
    assert answer.status == 502
    assert headers[b"x-gpufaas-start"] == b"host"
    assert b"load;dur=500.000, run;dur=0.000, load-read;dur=400.000" in headers[b"server-timing"]


async def test_a_call_is_a_request_and_an_answer(gateway: Gateway) -> None:
    functions = Functions()

    answer = await (await gateway.calls(functions)).run(Request("echo", body=b"hello"))

    assert (answer.status, answer.body, answer.error) == (200, b"hello", None)
    assert (b"x-gpufaas-device", DEVICE.id.encode()) in answer.headers


async def test_what_cannot_be_called_is_an_answer_too(gateway: Gateway) -> None:
    answer = await (await gateway.calls(Functions())).run(Request("nobody"))

    assert answer.status == 404
    assert b"there is no function 'nobody'" in answer.body
    assert (b"x-openfaas-internal", b"gateway") in answer.headers


async def test_a_body_in_hand_is_held_to_the_functions_limit(gateway: Gateway) -> None:
    functions = Functions()

    answer = await (await gateway.calls(functions, max_body="1Ki")).run(Request("echo", body=b"x" * 1025))

    assert answer.status == 413
    assert not functions.called


class Telling(Leaving):
    """A caller of whom we are told when he goes, without a task."""

    def __init__(self) -> None:
        super().__init__()
        self.tell: Callable[[], None] | None = None

    def on_gone(self, tell: Callable[[], None] | None) -> bool:  # type: ignore[override]
        self.tell = tell
        return True


async def test_a_call_that_waits_begins_with_its_grant_before_any_task_runs(gateway: Gateway) -> None:
    functions = Waiting()
    calls = await gateway.calls(functions)
    running = asyncio.create_task(calls.run(Request("echo", body=b"hello")))
    await eventually(lambda: functions.begins)

    ((call, begin),) = functions.begins.items()
    grant = Functions.place(functions, call, gateway.catalogue.find("echo").function_id, 1.0)  # type: ignore[union-attr]
    begin(grant)
    assert len(functions.called) == 1, "at once"
    functions.waiting[0].set_result(grant)

    assert (await running).body == b"hello"
    assert len(functions.called) == 1


async def test_a_call_that_its_node_refuses_at_its_grant_is_placed_again(gateway: Gateway) -> None:
    class Refusing(Waiting):
        def call(self, grant: Grant, head: CallHead, body: bytes | memoryview) -> Exchange:
            if grant.number == 1:
                raise GrantRefused("not now")
            return super().call(grant, head, body)

        def again(self, call: CallId) -> "asyncio.Future[Grant]":  # noqa: ARG002 - the port's
            return self.place()

    functions = Refusing()
    calls = await gateway.calls(functions)
    running = asyncio.create_task(calls.run(Request("echo", body=b"hello")))
    await eventually(lambda: functions.begins)
    ((call, begin),) = functions.begins.items()
    grant = Functions.place(functions, call, gateway.catalogue.find("echo").function_id, 1.0)  # type: ignore[union-attr]
    begin(grant)
    functions.waiting[0].set_result(grant)
    await eventually(lambda: len(functions.waiting) == 2)
    assert not functions.called
    functions.waiting[1].set_result(replace(grant, number=2))  # this one is not told before its future

    assert (await running).body == b"hello"


async def test_a_caller_who_tells_that_he_goes_needs_no_task_to_listen_to_him(gateway: Gateway) -> None:
    functions, gone, stays = Waiting(), Telling(), Telling()
    calls = await gateway.calls(functions)
    before = len(asyncio.all_tasks())
    leaves, waits = (
        asyncio.create_task(calls.run(Request("echo", body=b"hello", caller=each))) for each in (gone, stays)
    )
    await eventually(lambda: gone.tell and stays.tell)
    assert len(asyncio.all_tasks()) == before + 2

    gone.tell()
    with pytest.raises(CallCancelled):
        await leaves
    call = list(functions.begins)[1]
    grant = Functions.place(functions, call, gateway.catalogue.find("echo").function_id, 1.0)  # type: ignore[union-attr]
    functions.waiting[1].set_result(grant)

    assert (await waits).status == 200
    assert (len(functions.cancelled), stays.tell) == (1, None)


async def test_a_caller_who_leaves_while_his_call_waits_gives_its_place_up(gateway: Gateway) -> None:
    functions, caller = Waiting(), Leaving(b"hello")
    calls = await gateway.calls(functions)

    running = asyncio.create_task(calls.run(Request("echo", body=None, caller=caller)))
    await eventually(lambda: functions.waiting)
    caller.gone.set()

    with pytest.raises(CallCancelled):
        await running
    assert functions.cancelled == functions.over_
    assert len(functions.cancelled) == 1
    assert gateway.found("echo.openfaas-fn").stats.by_code.keys() == {499}


class Slow(Leaving):
    """His body comes when `sends` is set."""

    def __init__(self) -> None:
        super().__init__(b"hello")
        self.sends = asyncio.Event()

    async def receive(self) -> tuple[bytes, bool]:
        await self.sends.wait()
        return await super().receive()


class Endless(Exchange):
    """Answers nothing until `fail` ends it."""

    def __init__(self, grant: Grant) -> None:
        super().__init__(grant, b"", AnswerHead(200, []), False)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answer(self) -> tuple[AnswerHead, bytes, bool]:
        await self._ended
        raise AssertionError

    def fail(self, error: GpufaasError) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)


class Working(Functions):
    """Every call runs without end."""

    def call(self, grant: Grant, head: CallHead, body: bytes | memoryview) -> Exchange:
        self.called.append((grant, head, bytes(body)))
        return Endless(grant)


async def test_a_caller_with_a_slow_body_who_leaves_while_his_call_runs_is_heard(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is watched before it is placed, and then placed at once: nothing else listens to its caller."""
    functions, caller = Working(), Slow()
    calls = await gateway.calls(functions)
    monkeypatch.setattr("gpufaas_gateway.call.WATCH_AFTER_S", 0.0)

    running = asyncio.create_task(calls.run(Request("echo", body=None, caller=caller)))
    for _ in range(10):  # more than two sweeps
        await asyncio.sleep(0)
    caller.sends.set()
    await eventually(lambda: functions.called)
    caller.gone.set()

    with pytest.raises(CallCancelled):
        await asyncio.wait_for(running, LIMIT_S)


async def test_a_call_that_waits_too_long_is_answered_504(gateway: Gateway) -> None:
    functions = Waiting()

    answer = await (await gateway.calls(functions, timeout="50ms")).run(Request("echo"))

    assert answer.status == 504
    assert isinstance(answer.error, DeadlineExceeded)
    assert b"echo did not answer within 0.05 s, its time limit" in answer.body
    assert functions.cancelled


class RunsLate(Working):
    """A node elsewhere begins to load, and says when the call runs."""

    def call(self, grant: Grant, head: CallHead, body: bytes | memoryview) -> Exchange:
        exchange = super().call(grant, head, body)
        exchange.when_runs = lambda _: None  # type: ignore[method-assign]
        return exchange


class Refusing(Waiting, Working):
    """A node that does not run the first grant to its end."""

    def __init__(self, error: GpufaasError) -> None:
        super().__init__()
        self.error = error

    def place(self, *args: Any, **kwargs: Any) -> Any:
        if self.called:
            return super().place(*args, **kwargs)
        self.grant = Functions.place(self, *args, **kwargs)
        return self.grant

    def call(self, grant: Grant, head: CallHead, body: bytes | memoryview) -> Exchange:
        exchange = Working.call(self, grant, head, body)
        if len(self.called) == 1:
            exchange.fail(self.error)
        return exchange

    def again(self, call: CallId) -> "asyncio.Future[Grant]":  # noqa: ARG002 - the port's
        self.waiting.append(asyncio.get_running_loop().create_future())
        return self.waiting[-1]


@pytest.mark.parametrize("functions", [Waiting, RunsLate])
async def test_a_call_that_does_not_run_in_time_is_told_how_to_wait_longer(
    gateway: Gateway, functions: type[Functions]
) -> None:
    calls = await gateway.calls(functions())
    found = gateway.found()
    found.timeout_s, found.exec_s, found.whole_s = 0.05, 1e-3, math.inf

    answer = await calls.run(Request("echo"))

    assert answer.status == 504
    assert b"within 0.05 s, the limit to wait and load (annotation gpufaas.timeout sets one" in answer.body


@pytest.mark.parametrize("error", [GrantRefused("no"), OutOfMemory("no")])
async def test_the_limit_of_a_run_begins_anew_where_its_call_runs_again(gateway: Gateway, error: GpufaasError) -> None:
    calls = await gateway.calls(functions := Refusing(error), idempotent="true")
    found = gateway.found()
    found.exec_s, found.whole_s = 0.02, math.inf
    running = asyncio.create_task(calls.run(Request("echo")))
    await eventually(lambda: functions.waiting)
    await asyncio.sleep(0.1)  # longer than it may run
    assert not running.done()
    functions.waiting[0].set_result(functions.grant)

    assert b"within 0.02 s, the limit of its run (environment exec_timeout)" in (await running).body


@pytest.mark.parametrize("short_s", [0.0, 1.0])
async def test_a_time_limit_ends_a_call_that_is_watched_from_its_beginning_or_later(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, short_s: float
) -> None:
    monkeypatch.setattr("gpufaas_gateway.call.WATCH_AFTER_S", 0.001)
    monkeypatch.setattr("gpufaas_gateway.calls.SHORT_S", short_s)
    functions = Waiting()

    answer = await asyncio.wait_for((await gateway.calls(functions, timeout="60ms")).run(Request("echo")), LIMIT_S)

    assert answer.status == 504
    assert functions.cancelled


async def test_what_the_scheduler_refuses_is_said_as_it_says_it(gateway: Gateway) -> None:
    functions = Waiting()
    running = asyncio.create_task((await gateway.calls(functions)).run(Request("echo")))
    await eventually(lambda: functions.waiting)

    functions.waiting[0].set_exception(Overloaded("the queue is full", 7.0))

    answer = await running
    assert (answer.status, answer.body) == (429, b"the queue is full")
    assert (b"retry-after", b"7") in answer.headers


async def test_what_is_not_read_of_an_answer_is_given_up(gateway: Gateway) -> None:
    functions = Streaming()
    answer = await (await gateway.calls(functions)).run(Request("echo"))
    stats = gateway.found("echo.openfaas-fn").stats

    assert answer.stream is not None
    with answer.stream as stream:
        assert await stream.chunk() == b"one"
        assert stats.inflight == 1

    assert functions.cancelled == 1
    assert stats.inflight == 0


async def test_a_call_that_is_over_keeps_no_body_and_is_kept_by_nobody(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def streams(first: bytes, *_: object) -> Body:
        return first, STREAM, "", 0

    monkeypatch.setattr("gpufaas_gateway.calls.read_rest", streams)
    functions, piece = Streaming(), bytes(100_000)
    gc.collect()
    gc.disable()
    try:
        caller = Leaving(piece, b"rest")
        left = weakref.ref(caller)
        answer = await (await gateway.calls(functions)).run(Request("echo", body=None, caller=caller))
        assert answer.stream is not None
        with answer.stream:
            assert sys.getrefcount(piece) > 2, "the call has it"
        del answer, caller
        for _ in range(3):
            await asyncio.sleep(0)
        assert sys.getrefcount(piece) == 2
        assert left() is None, "the call has it"
    finally:
        gc.enable()


async def test_an_answer_that_breaks_off_is_told_from_one_that_ends(gateway: Gateway) -> None:
    functions = Streaming()
    functions.error = GpufaasError("the function's answer broke off: it raised")
    answer = await (await gateway.calls(functions)).run(Request("echo"))

    async def read_all() -> None:
        assert answer.stream is not None
        with answer.stream as stream:
            while await stream.chunk() is not None:
                pass

    with pytest.raises(BrokenAnswer, match="it raised"):
        await read_all()
    assert gateway.found("echo.openfaas-fn").stats.by_code.keys() == {500}


async def test_a_quick_call_costs_no_task_and_no_timer_of_its_own(gateway: Gateway) -> None:
    functions = Functions()
    calls = await gateway.calls(functions)
    loop = asyncio.get_running_loop()
    before, timers = len(asyncio.all_tasks()), len(loop._scheduled)  # type: ignore[attr-defined]

    for _ in range(10):
        await calls.run(Request("echo", body=b"x", caller=Leaving()))

    assert len(asyncio.all_tasks()) == before
    assert len(loop._scheduled) == timers + 1  # type: ignore[attr-defined]
