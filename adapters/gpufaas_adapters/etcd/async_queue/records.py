"""
Asynchronous calls as etcd has them: keys and values.

::

    v1/async/gateways/OWNER             GatewayRecord, under a lease: this process is there
    v1/async/calls/ID/KEY               CallRecord that has not ended, with its owner
    v1/async/bodies/KEY/request/0000    its body in pieces; .../answer/0000: its answer's
    v1/async/dead/ID/KEY                CallRecord of a dead letter
    v1/async/ended/ID/KEY               CallStatus; under a lease: etcd forgets it
    v1/async/cancelled/OWNER/KEY        tells the owner of a call that another gateway cancelled it
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias
from urllib.parse import quote

import msgspec
from msgspec import Struct

from gpufaas_adapters.etcd.client import Item
from gpufaas_async_calls.call import AcceptedCall, Body, CallStatus, ClaimedCall, Header, KeptAnswer, Phase
from gpufaas_core.errors import BodyTooLarge, StorageFailed
from gpufaas_core.units import Bytes, KiB, MiB, Seconds, format_bytes

log = logging.getLogger(__name__)

ROOT: Final = "v1/async/"
GATEWAYS: Final = f"{ROOT}gateways/"
CALLS: Final = f"{ROOT}calls/"
BODIES: Final = f"{ROOT}bodies/"
DEAD: Final = f"{ROOT}dead/"
ENDED: Final = f"{ROOT}ended/"
CANCELLED: Final = f"{ROOT}cancelled/"

MAX_BODY: Final[Bytes] = 8 * MiB
"""The most bytes of a request, and of an answer: etcd is a store for small things, and keeps all of it in memory."""
PIECE: Final[Bytes] = 512 * KiB

Part: TypeAlias = Literal["request", "answer"]
encode: Final = msgspec.json.encode


class BodyTooLargeForEtcd(BodyTooLarge, StorageFailed):
    """413 to a caller; an execution whose answer is that large has failed."""

    def __init__(self) -> None:
        super().__init__(
            f"the body of an asynchronous call may have {format_bytes(MAX_BODY)} in a cluster, and its answer too: "
            "send less, or send where it can be fetched from"
        )


class GatewayRecord(Struct, frozen=True, omit_defaults=True):
    id: str
    base: int = 0
    """What the keys of its calls begin with; 0 in its first moment."""


class BodyRecord(Struct, frozen=True):
    bytes: int = 0
    count: int = 0
    """The number of its pieces."""


class AnswerRecord(Struct, frozen=True):
    status: int
    headers: tuple[tuple[str, str], ...]
    duration_s: Seconds
    attempts_allowed: int
    body: BodyRecord

    @staticmethod
    def of(answer: KeptAnswer, body: BodyRecord) -> "AnswerRecord":
        return AnswerRecord(answer.status, _text(answer.headers), answer.duration_s, answer.attempts_allowed, body)


class CallRecord(Struct, frozen=True, omit_defaults=True):
    """A call, but for its bodies. Bytes of HTTP are text here, as latin-1."""

    id: str
    function: str
    name: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    callback_url: str | None
    start_ns: int
    owner: str
    phase: Literal["queued", "callback", "dead"] = "queued"
    due_at: float | None = None
    ended_at: float | None = None
    attempts: int = 0
    deliveries: int = 0
    status: int | None = None
    reason: str | None = None
    exhausted: str | None = None
    body: BodyRecord = BodyRecord()
    answer: AnswerRecord | None = None

    @staticmethod
    def of(call: AcceptedCall, owner: str, body: BodyRecord) -> "CallRecord":
        return CallRecord(
            call.id, call.function, call.name, call.path.decode("latin-1"), call.query.decode("latin-1"),
            _text(call.headers), call.callback_url, call.start_ns, owner, due_at=call.accepted_at, body=body,
        )  # fmt: skip

    @property
    def bodies(self) -> list[tuple[Part, BodyRecord]]:
        """What is read when it is claimed."""
        answer = [] if self.phase != "callback" or self.answer is None else [("answer", self.answer.body)]
        return [("request", self.body), *answer]  # type: ignore[list-item]

    def seen(self, *, is_running: bool = False) -> CallStatus:
        state = "running" if is_running and self.phase == "queued" else self.phase
        return CallStatus(
            self.id, self.function, state, self.attempts, self.deliveries, self.status, self.reason,
            self.start_ns / 1e9, self.ended_at, self.due_at,
        )  # fmt: skip

    def claimed(self, key: int, body: Body, answered: Body) -> ClaimedCall:
        call = AcceptedCall(
            self.id, self.function, self.name, self.path.encode("latin-1"), self.query.encode("latin-1"),
            _raw(self.headers), self.callback_url, self.start_ns, body,
        )  # fmt: skip
        answer = None
        if (given := self.answer) is not None:
            answer = KeptAnswer(given.status, _raw(given.headers), answered, given.duration_s, given.attempts_allowed)
        return ClaimedCall(key, call, self.attempts, self.deliveries, answer, self.exhausted)


@dataclass(slots=True, eq=False)
class StoredCall:
    """A call in etcd."""

    key: int
    record: CallRecord
    revision: int
    """The revision at which it was last written, as far as we know."""
    is_claimed: bool = False
    """Its owner, who alone knows it, executes it."""

    def path(self, prefix: str = CALLS) -> str:
        return path_of(prefix, self.record.id, self.key)

    @property
    def lane(self) -> tuple[Phase, str]:
        assert self.record.phase != "dead"
        return self.record.phase, self.record.function

    @property
    def place(self) -> tuple[float, int]:
        """Its place in the order of its lane."""
        return self.record.due_at or 0.0, self.key


def read_calls(items: Iterable[Item]) -> list[StoredCall]:
    """Return the calls that can be read; one that cannot (changed by hand) is logged."""
    found: list[StoredCall] = []
    for item in items:
        try:
            record = msgspec.json.decode(item.value, type=CallRecord)
            found.append(StoredCall(key_of(item.key), record, item.mod_revision))
        except ValueError as exc:  # msgspec's are
            log.error("store.unreadable key=%s reason=%s", item.key, exc)
    return found


def by_name(prefix: str, name: str) -> str:
    """Return what the keys of all calls of this id begin with. Callers choose ids: a slash in one is quoted."""
    return f"{prefix}{quote(name, safe='')}/"


def path_of(prefix: str, name: str, key: int) -> str:
    return f"{by_name(prefix, name)}{key:024x}"


def bodies_of(key: int) -> str:
    return f"{BODIES}{key:024x}/"


def body_of(key: int, part: Part) -> str:
    return f"{bodies_of(key)}{part}/"


def key_of(path: str) -> int:
    return int(path.rpartition("/")[2], 16)


def _text(headers: Iterable[Header]) -> tuple[tuple[str, str], ...]:
    return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)


def _raw(headers: Iterable[tuple[str, str]]) -> tuple[Header, ...]:
    return tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers)
