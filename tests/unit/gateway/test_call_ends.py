"""Whatever a call waits for (`call_state`), its end from outside reaches it there."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.test_calls import Leaving, Refusing, Streaming, Waiting
from tests.unit.gateway.test_contract_checklist import Exchange, Functions
from tests.waiting import LIMIT_S, eventually

from gpufaas_core.errors import GpufaasError, LoadFailed
from gpufaas_core.messages import Grant
from gpufaas_core.wire.heads import AnswerHead
from gpufaas_gateway.answer_stream import BrokenAnswer
from gpufaas_gateway.answering import Answer
from gpufaas_gateway.request import Request


class Silent(Exchange):
    """Answers nothing until it is failed."""

    def __init__(self, grant: Grant) -> None:
        super().__init__(grant, b"", AnswerHead(200, []), True)
        self._failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def answer(self) -> tuple[AnswerHead, bytes, bool]:
        await self._failed
        raise AssertionError

    def fail(self, error: GpufaasError) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)


class Running(Functions):
    def call(self, grant: Grant, *_: object) -> Exchange:
        return Silent(grant)


@pytest.fixture(autouse=True)
async def every_task_ends() -> AsyncIterator[None]:
    yield
    await eventually(lambda: len(asyncio.all_tasks()) == 1)


async def run_of(gateway: Gateway, functions: Functions, request: Request) -> Answer:
    """Run a call whose time is up in 60 ms."""
    calls = await gateway.calls(functions, timeout="60ms")
    async with asyncio.timeout(LIMIT_S):
        return await calls.run(request)


async def stuck(answer: Answer) -> None:
    """Read an answer as a front does whose connection has no room."""
    assert answer.stream is not None
    async with asyncio.timeout(LIMIT_S):
        with answer.stream as stream:
            assert await stream.chunk() == b"one"
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("functions", "body", "said"),
    [
        (Functions, None, b"the body for echo did not arrive within 0.06 s, its time limit"),
        (Waiting, b"", b"echo did not answer within 0.06 s, its time limit"),
        (Running, b"", b"echo did not answer within 0.06 s, its time limit"),
    ],
    ids=["for its body", "for a grant", "for the answer"],
)
async def test_a_call_whose_time_is_up_says_what_it_waited_for(
    gateway: Gateway, functions: type[Functions], body: bytes | None, said: bytes
) -> None:
    answer = await run_of(gateway, functions(), Request("echo", body=body, caller=Leaving()))

    assert answer.status == 504
    assert bytes(answer.body).startswith(said)


async def test_a_caller_who_takes_no_more_of_an_answer_is_cut_off_where_its_front_waits_for_it(
    gateway: Gateway,
) -> None:
    answer = await run_of(gateway, Streaming(), Request("echo", body=b""))

    with pytest.raises(BrokenAnswer, match=r"echo did not answer within 0\.06 s"):
        await stuck(answer)

    current = asyncio.current_task()
    assert current is not None
    assert not current.cancelling(), "who cuts it off takes the cancellation back"
    assert gateway.found("echo.openfaas-fn").stats.by_code.keys() == {504}


async def test_a_call_whose_time_is_up_while_it_looks_for_another_revision_is_not_placed_there(
    gateway: Gateway,
) -> None:
    functions = Refusing(LoadFailed("it does not load"))
    calls = await gateway.calls(functions, timeout="60ms")
    moved = asyncio.Event()

    async def trial(_: str) -> None:
        await asyncio.sleep(0.2)  # longer than its time
        gateway.found().trial = None
        await gateway.client.put("/system/functions", json=gateway.body(labels={"a": "b"}))
        moved.set()

    gateway.found().trial = trial
    async with asyncio.timeout(LIMIT_S):
        answer = await calls.run(Request("echo", body=b""))

    assert moved.is_set()
    assert answer.status == 504
    assert not functions.waiting
