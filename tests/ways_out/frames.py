"""Ways out by the socket that a worker has to its node: frames that it must not send. See `gpufaas_core.wire`."""

import contextlib
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator

from tests.ways_out.ways import Facts, way_out

_PREFIX = struct.Struct("<IIQ")
_SLOT = 16
_CALL, _ROOM, _READY, _ANSWER, _CHUNK, _ANSWERS, _LAID, _DROPPED = 1, 10, 16, 18, 20, 24, 27, 28
_OK = b"\x92\xcc\xc8\x90"
"""The head of an answer: 200, no headers."""


def _frame(kind: int, head: bytes = b"", body: bytes = b"", slot: int = 0) -> bytes:
    return _PREFIX.pack(kind | slot << _SLOT, len(head), len(body)) + head + body


_TWO_GIB = 1 << 31
FRAMES = {
    "a head of 2 GiB": _PREFIX.pack(_ANSWER, _TWO_GIB, 0),
    "a body of 2 GiB": _PREFIX.pack(_CHUNK, 0, _TWO_GIB),
    "a body of 2**64 - 1 bytes": _PREFIX.pack(_ANSWER, 0, 2**64 - 1),
    "a kind of frame that there is not": _frame(255),
    "a call, which only nodes send": _frame(_CALL, b"\x90"),
    "the answer to a call that it does not have": _frame(_ANSWER, _OK, slot=1),
    "the answer to a call of a worker that has more slots": _frame(_ANSWER, _OK, slot=0xFFFF),
    "answers to a batch that it does not have": _frame(_ANSWERS, b"\x91\x91\x93\x00\x00" + _OK),
    "a piece of an answer that has not begun": _frame(_CHUNK, body=b"x"),
    "an answer in memory that its call does not have": _frame(_LAID, b"\x92\xce\x7f\xff\xff\xff" + _OK),
    "that it gave back what was not asked back": _frame(_DROPPED, b"\x91\x01"),
    "room for a body that it was not sent": _frame(_ROOM, b"\x91\xce\x7f\xff\xff\xff"),
    "that it is ready, again": _frame(_READY, b"\x92\x00\x90"),
    "a head that nests 100,000 deep": _frame(_LAID, b"\x92\x01" + b"\x91" * 100_000),
}
"""What it says, in words, and the frame."""


def _connections() -> Iterator[socket.socket]:
    """Yield the stream sockets that this process has to another one, or to itself."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    if (found.family, found.type) == (socket.AF_UNIX, socket.SOCK_STREAM):
                        yield found


def _says(frame: bytes) -> str:
    for connection in _connections():
        with contextlib.suppress(OSError):
            connection.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    time.sleep(10)  # it is ended long before
    return "the node went on with it"


def _register(tells: str, frame: bytes) -> None:
    def tries(_: Facts) -> str:
        return _says(frame)

    tries.__name__ = "forged: " + tells
    way_out(f"says to its node {tells}", "went_on")(tries)


for _tells, _sent in FRAMES.items():
    _register(_tells, _sent)
