"""
Credit: how much of a body, or of an answer, may be on its way or wait at its reader's end.

One rule on both legs, for bodies and for answers. Each piece takes as much of the credit as it has bytes, and
`PIECE_COST`. It may be sent while any credit is left, so the last one may take more than there is. The reader gives
room back (frame ROOM) for what he has taken, in halves of the window. Nothing else is held up: so no call waits for the
reader of another one.
"""

from typing import Final

from gpufaas_core._types import Bytes
from gpufaas_core.wire.prefix import BrokenFrame

WINDOW: Final[Bytes] = 512 * 1024
PIECE_COST: Final[Bytes] = 64
"""Memory of each piece beside its bytes: single bytes may be sent."""


class Credit:
    """
    The sender's end. One thread may `spend` while another one `add`s: each counts by itself, and counts only grow.

    It outlives a call where calls follow each other on a lane, so room may come late.
    """

    __slots__ = ("_given", "_spent", "_window")

    def __init__(self, window: Bytes = WINDOW, given: Bytes | None = None) -> None:
        """:param given: so much of the window is there before the reader gives any; None: all of it"""
        self._window = window
        self._given = window if given is None else given
        self._spent = 0

    @property
    def is_left(self) -> bool:
        """Whether a piece may be sent."""
        return self._spent < self._given

    def spend(self, size: Bytes) -> None:
        """A piece of *size* bytes is sent."""
        self._spent += size + PIECE_COST

    def add(self, room: Bytes) -> None:
        """The reader gives *room*. :raises BrokenFrame: it is none, or more than was spent; nothing was changed"""
        if not 0 < room <= self._window - self._given + self._spent:
            raise BrokenFrame(f"room for {room} bytes more than the window of {self._window} has")
        self._given += room


class Window:
    """The reader's end."""

    __slots__ = ("_left", "_owed", "_paused", "_window")

    def __init__(self, window: Bytes = WINDOW) -> None:
        self._window = self._left = window
        self._owed = 0
        """The bytes that were taken and that the sender was not told of."""
        self._paused = False

    def came(self, size: Bytes) -> bool:
        """
        A piece of *size* bytes has come. Return whether there is `room` to give back once it is taken.

        :raises BrokenFrame: there was no room for it; nothing was changed
        """
        if self._left <= 0:
            raise BrokenFrame("a piece for which there is no room")
        self._left -= size + PIECE_COST
        self._owed += size + PIECE_COST
        return self._owed >= self._window // 2

    def room(self) -> Bytes:
        """Return the room to give back now, which counts as given; 0: none yet."""
        owed = self._owed
        if owed < self._window // 2 or self._paused:
            return 0
        self._owed = 0
        self._left += owed
        return owed

    def pause(self) -> None:
        """The reader is slow: give no room back until `resume`."""
        self._paused = True

    def resume(self) -> Bytes:
        """Return as `room`."""
        self._paused = False
        return self.room()
