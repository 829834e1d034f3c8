"""A call that ran out of memory and may run twice: the second run is placed as the first was."""

import pytest
from tests.unit.gateway.conftest import DEVICE, Gateway, calling
from tests.unit.gateway.test_contract_checklist import Exchange, Functions

from gpufaas_core.errors import OutOfMemory
from gpufaas_core.messages import Grant, Outer
from gpufaas_core.model import CallId, FunctionId, Seconds
from gpufaas_core.origin import Origins
from gpufaas_core.wire.heads import AnswerHead, CallHead

OUTER = Outer(DEVICE.id, FunctionId("outer.openfaas-fn@1"))


class RanOut(Exchange):
    async def answer(self) -> tuple[AnswerHead, bytes, bool]:
        raise OutOfMemory("it may use 100 MiB")


class Starving(Functions):
    """The first so many runs of a call run out of memory."""

    def __init__(self, runs: int) -> None:
        super().__init__()
        self.runs = runs
        self.placed: list[tuple[float, object]] = []

    def place(
        self, call: CallId, function: FunctionId, timeout_s: Seconds, size: float = 0.0, *more: object, **_: object
    ) -> Grant:
        self.placed.append((size, more[0] if more else None))
        return super().place(call, function, timeout_s, size)

    def call(self, grant: Grant, head: CallHead, body: bytes | memoryview) -> Exchange:
        exchange = super().call(grant, head, body)
        self.runs -= 1
        return RanOut(exchange.grant, b"", self.answer, False) if self.runs >= 0 else exchange


@pytest.mark.parametrize(
    ("idempotent", "runs", "status", "placed"),
    [("true", 1, 200, 2), ("true", 2, 507, 2), ("false", 1, 507, 1)],
)
async def test_it_runs_once_more_with_its_size_and_as_a_call_of_its_outer_call(
    gateway: Gateway, idempotent: str, runs: int, status: int, placed: int
) -> None:
    functions, origins = Starving(runs), Origins()

    async with calling((await gateway.calls(functions, idempotent=idempotent)).run, origins) as client:
        url = origins.address("http://gateway/", OUTER).removeprefix("http://gateway")
        answer = await client.post(f"{url}/function/echo", content=b"x", headers={"X-Gpufaas-Size": "7"})

    assert answer.status_code == status
    assert functions.placed == [(7.0, OUTER)] * placed
