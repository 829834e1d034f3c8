"""
Areas: parts of the memory that a worker shares with its node, for large bodies and answers. The worker's side.

The node lends an area to a call, until the answer of that has ended (`wire`: AREA, LAID). So a large body is copied
once into memory that is there and mapped, and once out of it. A socket copies it twice, in pieces, and new memory costs
ten times as much as the copy: the kernel makes each page of it.
"""

import contextlib
import ctypes
import resource
from typing import Final
from weakref import WeakValueDictionary

from gpufaas_core.model import Bytes
from gpufaas_core.wire.heads import AreaHead
from gpufaas_functions.begun import AREAS_AT
from gpufaas_functions.connection import Absent, Body

MIN: Final[Bytes] = 64 * 1024
"""Smaller bodies and answers are sent in their frames."""
_EAGER: Final[Bytes] = 1024 * 1024
"""The largest body, in bytes, that is there for as long as its event. A larger one goes with its call."""
_GRANULE: Final[Bytes] = 256 * 1024


class _Used:
    """What this process has used of the shared memory. Its resident set has it, and it is the node's."""

    def __init__(self) -> None:
        self._granules: set[int] = set()
        self._peak: Bytes = 0
        """Of its resident set, without that memory, before it used the last of that."""

    def add(self, at: Bytes, size: Bytes) -> None:
        granules = set(range(at // _GRANULE, -(-(at + size) // _GRANULE)))
        if not granules <= self._granules:
            self._peak = self.peak_without(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
            self._granules |= granules

    def peak_without(self, peak: Bytes) -> Bytes:
        """Return how much of *peak*, the largest that the resident set was, was not that memory."""
        return max(self._peak, peak - len(self._granules) * _GRANULE)


used: Final = _Used()


class Area:
    """What a call has of the memory, until its answer has ended."""

    __slots__ = ("__weakref__", "_at", "_body", "_kept", "_whole", "size")

    def __init__(self, whole: "ctypes.Array[ctypes.c_char]", head: AreaHead) -> None:
        self._whole = whole
        self._at = ctypes.addressof(whole) + AREAS_AT + head.at
        self._body = head.body
        self._kept: bytes | None = None
        """A copy of the body: what a process that was forked reads."""
        self.size = head.size
        if head.body > _EAGER:
            _in_place[id(self)] = self
        used.add(head.at, head.size)

    @property
    def body(self) -> "Body | Area | None":
        """The body of the call; itself, if that is read where it lies. None: it is in its frame."""
        if not self._body or self._body > _EAGER:
            return self if self._body else None
        try:
            return self.read(0, self._body)
        except MemoryError:
            return Absent(self._body)

    def __len__(self) -> Bytes:
        return self._body

    def read(self, at: Bytes, size: Bytes) -> bytes:
        """Return a part of the body. :raises FileNotFoundError: its call has ended"""
        if self._kept is not None:
            return self._kept[at : at + size]
        if not (begin := self._at):
            raise FileNotFoundError
        found = ctypes.string_at(begin + at, max(0, min(size, self._body - at)))
        if not self._at:  # another thread has ended the call: these may be bytes of the next one
            raise FileNotFoundError
        return found

    def takes(self, size: Bytes) -> bool:
        """Whether an answer of *size* bytes lies here, and not in its frame."""
        return MIN < size <= self.size

    def lay(self, answer: bytes) -> None:
        """Put *answer* here. The body is gone."""
        at = self._at
        self.end()
        ctypes.memmove(at, answer, len(answer))

    def end(self) -> None:
        """The call has ended."""
        self._at = 0

    def keep(self) -> None:
        """Have a copy of the body, if there is memory for it."""
        with contextlib.suppress(FileNotFoundError, MemoryError):
            self._kept = self.read(0, self._body)


_in_place: "Final[WeakValueDictionary[int, Area]]" = WeakValueDictionary()
"""Those whose bodies are read where they lie."""


def keep_bodies() -> None:
    """The author's code forks: the child must not read what the node puts there when the call has ended here."""
    for area in [each() for each in _in_place.valuerefs()]:
        if area is not None:
            area.keep()


def leave_areas() -> None:
    """Called in the child: it has copies, or nothing."""
    for area in list(_in_place.values()):
        area.end()
