"""A streamed body whose node refuses the grant: the next node gets all of it."""

import asyncio
from collections.abc import AsyncIterator

from tests.unit.gateway.conftest import Gateway, calling
from tests.unit.gateway.test_contract_checklist import Exchange, Functions

from gpufaas_core.errors import GpufaasError, GrantRefused
from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, FunctionId
from gpufaas_core.wire.heads import AnswerHead, CallHead


class Refusing(Exchange):
    """As from afar: it learns that it is refused when a piece is on its way."""

    def __init__(self, grant: Grant) -> None:
        super().__init__(grant, b"", AnswerHead(200, []), True)
        self._refused = asyncio.Event()

    async def answer(self) -> tuple[AnswerHead, bytes, bool]:
        await self._refused.wait()
        raise GrantRefused("not here")

    async def send_body(self, piece: bytes) -> None:  # noqa: ARG002 - it is not taken
        self._refused.set()
        await asyncio.sleep(0)
        raise GrantRefused("not here")

    def fail(self, error: GpufaasError) -> None:
        pass


class RefusingFirst(Functions):
    """The first grant of a call is refused."""

    refused = 0

    def again(self, call: CallId) -> "asyncio.Future[Grant]":
        found: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        found.set_result(self.place(call, FunctionId("echo"), 1.0))
        return found

    def call(self, grant: Grant, head: CallHead, body: bytes | memoryview) -> Exchange:
        if not self.refused:
            self.refused += 1
            return Refusing(grant)
        return super().call(grant, head, body)


async def test_the_body_is_whole_under_the_next_grant(gateway: Gateway) -> None:
    gateway.workers.bundle(gateway.bundle, kind="http")
    functions = RefusingFirst()

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(4):
            yield b"piece %d;" % number

    async with calling((await gateway.calls(functions)).run) as client:
        answer = await client.post("/function/echo", content=pieces())

    assert functions.refused == 1
    assert answer.content == b"piece 0;piece 1;piece 2;piece 3;"
