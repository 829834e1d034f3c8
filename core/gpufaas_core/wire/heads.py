"""The headers of frames, in msgpack: arrays, whose order of fields is the protocol."""

from typing import Final

import msgspec

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.wire.bodies import INLINE


class CallHead(msgspec.Struct, array_like=True, frozen=True):
    """
    `headers` are the caller's, with names in lower case; `path` begins with ``/`` and is still percent-encoded.
    `body_path` is the file with the body. A worker gets that open, and no path: with one, the file does not come.
    """

    call: str
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body_mode: int = INLINE
    body_path: str = ""
    timeout_s: Seconds = 0.0
    """The time that it may run; 0.0: it is not known."""


class BatchHead(msgspec.Struct, array_like=True, frozen=True):
    """The next `calls` calls run together."""

    calls: int


class CancelHead(msgspec.Struct, array_like=True, frozen=True):
    """
    The caller of the call at `place` is gone: its place in its batch, else 0. `number` is that of the call or batch on
    its slot, from 1.
    """

    place: int
    number: int = 0


class DroppedHead(msgspec.Struct, array_like=True, frozen=True):
    """`number` is as in CANCEL."""

    number: int


class AreaHead(msgspec.Struct, array_like=True, frozen=True):
    """
    The call that follows has `size` bytes of the memory file of its worker, from `at` on, until its answer has ended.
    The first `body` bytes are its body, whose frame has none then; 0: its body is in its frame, as always.
    """

    at: Bytes
    size: Bytes
    body: Bytes


class RoomHead(msgspec.Struct, array_like=True, frozen=True):
    """The other end may send `room` bytes more of the body or the answer of its call."""

    room: Bytes


class LimitHead(msgspec.Struct, array_like=True, frozen=True):
    """From now on a worker on a GPU may occupy `memory` bytes there: its allocator holds it to that."""

    memory: Bytes


class AnswerHead(msgspec.Struct, array_like=True, frozen=True):
    """The head of ANSWER and HEAD. `run_s` and `peak` are those of the whole call in ANSWER, and 0 in HEAD."""

    status: int
    headers: list[tuple[bytes, bytes]]
    run_s: Seconds = 0.0
    peak: Bytes = 0
    """The worker's peak occupation if the call ran out of memory, else 0: MEASURED says it."""
    out_of_memory: bool = False
    failed: bool = False
    """The handler raised, and the answer shows its exception."""
    length: int = -1
    """Content-Length of a body that streams, or that an answer to HEAD leaves out. -1: the function did not declare
    it."""


class LaidHead(msgspec.Struct, array_like=True, frozen=True):
    """An answer whose body is the first `size` bytes of the area of its call. `head` is the header of an ANSWER."""

    size: Bytes
    head: msgspec.Raw


class AnswersHead(msgspec.Struct, array_like=True, frozen=True):
    """The head of ANSWERS, whose body is the bodies of all of them."""

    answers: list[tuple[int, Bytes, AnswerHead]]
    """For each: the place of its call, and the length of its body."""


class EndHead(msgspec.Struct, array_like=True, frozen=True):
    """`error` is set if the answer broke off after its head was sent."""

    run_s: Seconds
    peak: Bytes = 0
    error: str = ""
    out_of_memory: bool = False


class MeasuredHead(msgspec.Struct, array_like=True, frozen=True):
    """`peak` is the worker's peak occupation, which grew during the call before this frame; `held` as in READY."""

    peak: Bytes
    held: Bytes = 0


WARM: Final = "warm"
"""The phase of a load in which the author's ``warm_up`` ran: no part of what a load takes when a call waits for it."""


class Imported(msgspec.Struct, array_like=True, frozen=True):
    """What a new worker has imported but for the author's own modules, in order, and variables that these have set."""

    seconds: Seconds
    """What its imports took at most: that of the handler, with all of the load that is neither read nor transfer."""
    modules: list[str]
    env: dict[str, str]


class ReadyHead(msgspec.Struct, array_like=True, frozen=True):
    """`phases`: seconds by name (read, transfer, init, warm), in order."""

    occupation: Bytes
    phases: list[tuple[str, Seconds]]
    data_base: Bytes = 0
    """Private writable memory at the fork point. A limit is this plus the reservation."""
    loop: bool = False
    """It answers PING while calls run: its event loop does, or the thread that waits for calls."""
    held: Bytes = 0
    """What it holds now by its own account, `occupation` being the peak; 0: the device's driver says no more."""
    staged: int = 0
    """Files of weights that it has read from host memory."""
    parks: bool = False
    """Its model can leave the device, and come back (PARK, WAKE)."""
    imported: Imported | None = None
    """Where that took long."""


class ParkedHead(msgspec.Struct, array_like=True, frozen=True):
    """`held` is what it holds of its device yet, without what only the device's driver counts."""

    held: Bytes
    failed: str = ""
    """Why it could not give the rest back."""


class WakeHead(msgspec.Struct, array_like=True, frozen=True):
    """`moves`: the model moves to the device. False: the driver has brought it there."""

    moves: bool = True


class WokenHead(msgspec.Struct, array_like=True, frozen=True):
    """`failed`: why it cannot be used, or that its check answers otherwise now; empty: it can. `phases`: see READY."""

    failed: str
    phases: list[tuple[str, Seconds]]


class FailedHead(msgspec.Struct, array_like=True, frozen=True):
    """`text` is the whole traceback, `summary` the type and message of the exception."""

    summary: str
    text: str
    out_of_memory: bool = False
