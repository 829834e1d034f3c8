"""The two ends of a connection between gateway and node, frame by frame."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.gpu_manager.world import exchange_of
from tests.waiting import eventually

from gpufaas_cluster.call_connection import CallConnection, CallLane
from gpufaas_cluster.call_heads import BODY_WINDOW, ErrorHead, NodeAnswerHead, NodeCallHead, QueryHead
from gpufaas_cluster.lane_connection import LaneConnection
from gpufaas_cluster.remote_exchange import RemoteExchange
from gpufaas_cluster.served_connection import ServedConnection
from gpufaas_core.errors import CallCancelled, GrantRefused
from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, DeviceId, FunctionId, NodeId, Part
from gpufaas_core.units import MiB
from gpufaas_core.wire.bodies import FILE, STREAM
from gpufaas_core.wire.credit import PIECE_COST, WINDOW
from gpufaas_core.wire.heads import AnswerHead, CallHead, EndHead, RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import KIND, LANE, LANES, FrameReader, encode_frame
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.node_call import END

HEAD = NodeAnswerHead(AnswerHead(200, []))
GRANT = Grant(1, 1, (CallId("c"),), FunctionId("f.ns@1"), "digest", (Part(DeviceId("n/cpu:0"), MiB),), False)


class Transport:
    def __init__(self) -> None:
        self.sent = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def set_write_buffer_limits(self, high: int) -> None: ...


class User:
    """A call that takes what comes."""

    gone = False
    brief = True

    def __init__(self, *, pauses: bool = False) -> None:
        self.got: list[int] = []
        self.lost = self.refused = ""
        self.lane: CallLane
        self._pauses = pauses

    def sent_on(self, lane: CallLane) -> None:
        self.lane = lane
        lane.send(Kind.CALL)
        if self._pauses:
            lane.pause()

    def not_sent(self, reason: str) -> None:
        self.refused = reason

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:  # noqa: ARG002
        self.got.append(kind)

    def go_on(self) -> None: ...

    def on_lost(self, reason: str) -> None:
        self.lost = reason


class Gateway:
    """A gateway's end, and a hand that is its node."""

    def __init__(self) -> None:
        self.connection = CallConnection(NodeId("n"), WINDOW, lambda _: None)
        self.transport = Transport()
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    def begin(self, **how: bool) -> User:
        user = User(**how)
        self.connection.begin(user)
        return user

    def says(self, kind: int, head: Any = None, body: bytes = b"", lane: int = 0) -> None:
        self.connection.data_received(encode_frame(kind, head, body, lane))

    def sent(self) -> list[tuple[int, int]]:
        """Kind and lane of all that it has sent."""
        return [(kind & KIND, kind >> LANE) for kind, _, _ in FrameReader(lanes=LANES).feed(self.transport.sent)]


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def test_a_lane_is_used_again_and_the_last_one_first(gateway: Gateway) -> None:
    first = gateway.begin()
    gateway.says(Kind.ANSWER, HEAD)
    second = gateway.begin()

    assert (first.got, second.lane) == ([Kind.ANSWER], first.lane)
    assert gateway.sent() == [(Kind.CALL, 0)] * 2


@pytest.mark.parametrize(
    ("frames", "match"),
    [
        ([(Kind.CHUNK, None, b"x")], "CHUNK on a lane that waits for an answer"),
        ([(Kind.HEAD, HEAD), (Kind.ANSWER, HEAD)], "ANSWER on a lane that is in an answer"),
        ([(Kind.ANSWER, HEAD), (Kind.END, EndHead(0.0))], "END on a lane that has no call"),
        ([(Kind.LAID, None)], "LAID, which a node never says"),
        ([(Kind.HEAD, HEAD), *[(Kind.CHUNK, None, b"x" * (WINDOW // 4))] * 5], "no room"),
    ],
)
async def test_a_node_that_is_out_of_step_loses_its_connection_and_all_calls_know(
    gateway: Gateway, frames: list[tuple[Any, ...]], match: str
) -> None:
    users = [gateway.begin(pauses=True), gateway.begin()]
    assert not gateway.transport.aborted
    for frame in frames:
        gateway.says(*frame)

    assert gateway.transport.aborted
    assert match in users[1].lost
    assert users[0].lost == ("" if Kind.ANSWER in users[0].got else users[1].lost)


def test_a_frame_of_a_lane_that_had_no_call_is_out_of_step(gateway: Gateway) -> None:
    user = gateway.begin()
    gateway.says(Kind.ANSWER, HEAD, lane=1)

    assert "lane 1, which has had no call" in user.lost


def test_room_is_given_while_the_reader_takes_and_once_he_goes_on(gateway: Gateway) -> None:
    for pauses in (False, True):
        user = gateway.begin(pauses=pauses)
        gateway.transport.sent = b""
        gateway.says(Kind.HEAD, HEAD)
        gateway.says(Kind.CHUNK, None, b"x" * (WINDOW // 2))
        assert gateway.sent() == ([] if pauses else [(Kind.ROOM, 0)])
        user.lane.resume()
        ((_, header, _),) = FrameReader().feed(gateway.transport.sent)
        assert msgspec.msgpack.decode(header, type=RoomHead) == RoomHead(WINDOW // 2 + PIECE_COST)
        gateway.says(Kind.END, EndHead(0.0))


# --- bodies in pieces ---


async def test_room_for_a_body_that_came_with_its_call_is_out_of_step(gateway: Gateway, tmp_path: Path) -> None:
    Caller(gateway, tmp_path / "body")
    gateway.says(Kind.ROOM, RoomHead(BODY_WINDOW))
    gateway.says(Kind.REFUSED, ErrorHead("GrantRefused", "it is full"))
    user = gateway.begin()
    gateway.says(Kind.ROOM, RoomHead(1))

    assert "room for 1 bytes more" in user.lost


class Caller:
    """A call whose body is a file of 3 MiB."""

    def __init__(self, gateway: Gateway, path: Path) -> None:
        path.write_bytes(b"x" * 3 * MiB)
        head = CallHead("c", "POST", "/", b"", [], FILE, str(path))
        self.exchange = RemoteExchange(asyncio.get_running_loop(), lambda *_: None, GRANT, head, b"")
        self._transport = gateway.transport
        gateway.connection.begin(self.exchange)

    def sent(self) -> list[tuple[int, int]]:
        """The kinds that were sent, and how much of a body each has."""
        return [(kind, len(body)) for kind, _, body in FrameReader(lanes=LANES).feed(self._transport.sent)]

    async def sends(self, size: int) -> None:
        """Return once so much of the body was sent, and no more is on its way."""
        await eventually(lambda: sum(size for _, size in self.sent()) >= size)
        for _ in range(20):
            await asyncio.sleep(0)
        assert sum(size for _, size in self.sent()) == size


async def test_a_file_waits_until_its_node_has_taken_the_call_and_then_for_room(
    gateway: Gateway, tmp_path: Path
) -> None:
    caller = Caller(gateway, tmp_path / "body")
    await caller.sends(0)
    assert caller.sent() == [(Kind.CALL, 0)]

    gateway.says(Kind.ROOM, RoomHead(BODY_WINDOW))
    await caller.sends(BODY_WINDOW)
    gateway.says(Kind.ROOM, RoomHead(BODY_WINDOW // 2))
    await caller.sends(BODY_WINDOW + BODY_WINDOW // 2)
    gateway.connection.pause_writing()  # the socket is full
    gateway.says(Kind.ROOM, RoomHead(BODY_WINDOW))
    await caller.sends(BODY_WINDOW + BODY_WINDOW // 2)
    gateway.connection.resume_writing()
    await caller.sends(2 * BODY_WINDOW + BODY_WINDOW // 2)
    gateway.says(Kind.ROOM, RoomHead(BODY_WINDOW))
    await caller.sends(3 * MiB)
    await eventually(lambda: caller.sent()[-1] == (Kind.BODY_END, 0))


@pytest.mark.parametrize("room", [0, BODY_WINDOW])
async def test_a_call_that_is_cancelled_says_so_behind_nothing_of_its_body(
    gateway: Gateway, tmp_path: Path, room: int
) -> None:
    caller = Caller(gateway, tmp_path / "body")
    if room:
        gateway.says(Kind.ROOM, RoomHead(room))
    await caller.sends(room)
    caller.exchange.fail(CallCancelled("the caller went away"))
    gateway.says(Kind.ROOM, RoomHead(BODY_WINDOW))
    await caller.sends(room)

    assert caller.sent()[-1] == (Kind.CANCEL, 0)


async def test_a_node_that_refuses_a_call_gets_nothing_of_its_file(gateway: Gateway, tmp_path: Path) -> None:
    caller = Caller(gateway, tmp_path / "body")
    gateway.says(Kind.REFUSED, ErrorHead("GrantRefused", "it is full"))

    with pytest.raises(GrantRefused, match="it is full"):
        await caller.exchange.answer()
    await caller.sends(0)


# --- a node's end ---


class Server:
    """A node that thinks about each query for ever."""

    closing = False

    def __init__(self) -> None:
        self.queries = self
        self.asked: list[str] = []

    async def answer(self, what: str, _: bytes) -> bytes:
        self.asked.append(what)
        await asyncio.get_running_loop().create_future()
        return b""

    def call_ended(self) -> None: ...


class Node:
    """A node's end, and a hand that is its gateway."""

    def __init__(self) -> None:
        self.server = Server()
        self.closed: list[ServedConnection] = []
        self.connection = ServedConnection(self.server, "g", WINDOW, self.closed.append)  # type: ignore[arg-type]
        self.transport = Transport()
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    def hears(self, kind: int, head: Any = None, body: bytes = b"", lane: int = 0) -> None:
        self.connection.data_received(encode_frame(kind, head, body, lane))


async def test_a_node_that_stops_waits_for_calls_and_not_for_those_who_ask() -> None:
    node = Node()
    node.hears(Kind.ASK, QueryHead("follow"))
    await eventually(lambda: node.server.asked == ["follow"])
    assert not node.connection.busy
    assert node.connection.running == 1

    node.hears(Kind.CANCEL)
    assert node.connection.running == 0
    ((kind, _, _),) = FrameReader().feed(node.transport.sent)
    assert kind == Kind.ERROR


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([(Kind.ASK, QueryHead("usage")), (Kind.ASK, QueryHead("usage"))], "ASK on a lane that waits for a reply"),
        ([(Kind.ASK, QueryHead("usage")), (Kind.BODY, None, b"x")], "BODY on a lane that waits for a reply"),
        ([(Kind.ROOM, RoomHead(1))], "room for 1 bytes more"),
        ([(Kind.ANSWER, HEAD)], "ANSWER, which a gateway never says"),
        ([(Kind.CALL, QueryHead("usage"))], "no frame, or none that comes now"),
    ],
)
async def test_a_gateway_that_is_out_of_step_loses_its_connection_and_the_log_says_why(
    frames: list[tuple[Any, ...]], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node()
    for frame in frames:
        assert not node.transport.aborted
        node.hears(*frame)

    assert node.transport.aborted
    assert "gateway g sent what is no frame" in caplog.text
    assert said in caplog.text


async def test_what_comes_late_for_a_call_that_has_ended_is_skipped() -> None:
    node = Node()
    for kind in (Kind.BODY, Kind.BODY_END, Kind.CANCEL):
        node.hears(kind)

    assert not node.transport.aborted


class Slot:
    """Takes a call, and pieces of its body."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def begin(self, *_: object) -> None: ...

    async def send_body(self, piece: bytes) -> None:
        self.pieces.append(piece)


class Waiting:
    """A node with a call whose body streams, and which waits for its worker."""

    def __init__(self) -> None:
        self.node = Node()
        self.exchange = exchange_of("c", None)
        self.node.server.node = self.node.server.grants = self  # type: ignore[attr-defined]
        self.grants = self
        self.node.hears(Kind.CALL, NodeCallHead(GRANT, CallHead("c", "POST", "/", b"", [], STREAM)), b"first")

    def call(self, _: Grant, head: CallHead, body: bytes, __: int) -> Exchange:
        self.exchange.arrive(head, body)
        return self.exchange

    @property
    def said(self) -> list[int]:
        return [kind & KIND for kind, _, _ in FrameReader().feed(self.node.transport.sent)]


async def test_a_body_that_streams_comes_once_a_worker_has_its_call() -> None:
    rig, slot = Waiting(), Slot()
    assert rig.said == []

    rig.exchange.bind(slot, 0.0, 1)  # type: ignore[arg-type]
    rig.node.hears(Kind.BODY, None, b"more")

    assert rig.said == [Kind.ROOM]
    await eventually(lambda: slot.pieces == [b"more"])


async def test_a_call_that_waited_for_its_worker_can_be_placed_again_as_nothing_of_its_body_came() -> None:
    rig = Waiting()
    rig.exchange.step(END)
    rig.exchange.fail(GrantRefused("its worker gives no sign of life"))

    assert rig.said == [Kind.REFUSED]


async def test_a_piece_of_a_body_that_comes_with_the_refusal_of_its_grant_goes_under_the_next_one(
    gateway: Gateway,
) -> None:
    head = CallHead("c", "POST", "/", b"", [], STREAM)
    exchange = RemoteExchange(asyncio.get_running_loop(), lambda *_: None, GRANT, head, b"")
    gateway.connection.begin(exchange)
    gateway.says(Kind.ROOM, RoomHead(BODY_WINDOW))
    gateway.says(Kind.REFUSED, ErrorHead("GrantRefused", "its worker gives no sign of life"))

    with pytest.raises(GrantRefused):
        await exchange.send_body(b"piece")


class Greedy:
    """A lane that fills the connection each time."""

    def __init__(self, connection: "LaneConnection[Greedy]", number: int) -> None:
        self.connection = connection
        self.turns = 0
        connection.add(number, self)

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None: ...

    def lose(self, why: str) -> None: ...

    def go_on(self) -> None:
        self.turns += 1
        self.connection.pause_writing()


def test_lanes_go_on_in_turn_so_that_none_has_the_connection_to_itself() -> None:
    connection = LaneConnection[Greedy]("node n", WINDOW)
    lanes = [Greedy(connection, number) for number in range(3)]
    for _ in range(9):
        connection.resume_writing()

    assert [lane.turns for lane in lanes] == [3, 3, 3]
