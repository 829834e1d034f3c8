"""What goes to a function that speaks WebSocket."""

import asyncio
import json
from typing import Any, cast

from tests.waiting import eventually
from websockets.frames import Frame, Opcode
from websockets.protocol import SERVER, Protocol

from gpufaas_core.errors import TooLate
from gpufaas_core.units import KiB
from gpufaas_gateway.answering import Answer, refusal
from gpufaas_gateway.catalogue import Catalogue
from gpufaas_gateway.fronts.websocket import WebSocketCalls, _WebSocketCaller
from gpufaas_gateway.request import Request


class Function:
    """Its connection: what is sent there in parts, as to a node elsewhere, and what it says."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.room = asyncio.Event()
        self.said: asyncio.Queue[bytes] = asyncio.Queue()
        self.waits = 0
        """How often it was waited for what it says."""

    async def send(self, data: bytes) -> None:
        self.sent.append(data[: 256 * KiB])
        await self.room.wait()
        self.sent.append(data[256 * KiB :])

    async def chunk(self) -> bytes:
        self.waits += 1
        return await self.said.get()


async def test_the_answer_to_a_ping_does_not_come_in_the_middle_of_a_message() -> None:
    function, from_caller = Function(), asyncio.Queue[dict[str, Any]]()
    connection = _WebSocketCaller(cast(Any, from_caller.get), cast(Any, None))
    connection._stream, connection._timeout_s = cast(Any, function), 60.0
    message = b"x" * 600 * KiB
    async with asyncio.TaskGroup() as group:
        connection.begin(group)
        pump = group.create_task(connection.pump())
        from_caller.put_nowait({"type": "websocket.receive", "bytes": message})
        await eventually(lambda: len(function.sent) == 1)
        function.said.put_nowait(Frame(Opcode.PING, b"are you there").serialize(mask=False))
        await eventually(lambda: function.waits == 2)
        await asyncio.sleep(0)  # a task answers it

        function.room.set()
        await eventually(lambda: len(function.sent) == 4)
        pump.cancel()
        connection.end()

    read = Protocol(SERVER)
    read.receive_data(b"".join(function.sent))
    frames = cast(list[Frame], read.events_received())
    assert [(each.opcode, bytes(each.data)) for each in frames] == [
        (Opcode.BINARY, message), (Opcode.PONG, b"are you there"),
    ]  # fmt: skip


async def test_a_handshake_that_a_policy_refuses_is_answered_with_what_it_says() -> None:
    async def run(_: Request) -> Answer:
        return refusal(TooLate("too late", 2.0, {"goal_s": 1.0}), [])

    came, sent = asyncio.Queue[dict[str, Any]](), list[Any]()
    came.put_nowait({"type": "websocket.connect"})
    scope = {"raw_path": b"/function/chat/room", "query_string": b"", "headers": [], "subprotocols": []}

    async def send(message: Any) -> None:
        sent.append(message)

    await WebSocketCalls(run, Catalogue())(scope, came.get, send)

    start, body = sent
    assert (start["status"], dict(start["headers"])[b"retry-after"]) == (503, b"2")
    assert dict(start["headers"])[b"content-type"] == b"application/json"
    assert json.loads(body["body"]) == {"error": "too late", "goal_s": 1.0}
