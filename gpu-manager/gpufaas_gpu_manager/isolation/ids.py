"""A uid, which is a gid, too, for each function: from a range that nobody else on this machine has."""

import contextlib
import fcntl
import os
import re
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

import msgspec

from gpufaas_core.errors import InvalidSpec, StorageFailed

UID_RANGE: Final = range(1_900_000_000, 1_900_065_536)
"""Above those that containers of systemd get, and far above those of users."""
_LAST: Final = 2**32 - 2
"""The next one means: do not change it."""
_TRIES: Final = 16
LOCKS: Final = Path("/run/gpufaas/uids")
"""A file in which each platform locks the bytes at its uids."""


def uid_range(text: str) -> range:
    """Return the uids that ``FIRST-LAST`` names. :raises InvalidSpec: it is malformed, or has uid 0"""
    found = re.fullmatch(r"([0-9]{1,10})-([0-9]{1,10})", text)
    uids = range(int(found[1]), int(found[2]) + 1) if found is not None else range(0)
    if found is None or not uids or uids[-1] > _LAST:
        raise InvalidSpec(
            f"{text!r} is not FIRST-LAST, two uids up to {_LAST}: write for example 1900000000-1900065535"
        )
    if 0 in uids:
        raise InvalidSpec(f"{text!r} has uid 0, which may do all: begin with a uid that no user has")
    return uids


def written(uids: range) -> str:
    """Return *uids* as `uid_range` reads them."""
    return f"{uids[0]}-{uids[-1]}"


class _Given(msgspec.Struct):
    """What is kept from run to run."""

    asked: str
    uids: str
    """The range in use, which is another than was asked for if somebody had that."""
    functions: dict[str, int] = {}
    """By ``name.namespace``: the place of its uid in the range."""


class Uids:
    """
    The uids of a platform's functions, in the order of their first start. That of a function that is gone is given
    again when there is no other. May be used from any thread.
    """

    def __init__(self, path: Path, asked: range, *, strict: bool = False, locks: Path = LOCKS) -> None:
        """
        Take *asked*, or the next range of its size that nobody uses, until this process ends.

        :param path: of the file that says after a restart which function has which
        :param strict: take *asked* only
        :raises InvalidSpec: no such range is free
        :raises StorageFailed: *path* cannot be read or written, or is damaged
        """
        self.note = ""
        """Why they are not those that were asked for; empty: they are."""
        self.known: Callable[[], Collection[str]] | None = None
        """Returns the functions that are not gone; None: nobody knows yet."""
        self._path = path
        self._lock = threading.Lock()
        self._held: int | None = None
        self._given = self._read()
        at_last = self._given.uids if self._given.asked == written(asked) else written(asked)
        self._given.functions = {name: at for name, at in self._given.functions.items() if at < len(asked)}
        following = (range(asked.start + n * len(asked), asked.stop + n * len(asked)) for n in range(_TRIES))
        why = ""
        for self.range in [asked] if strict else [uid_range(at_last), *following]:
            used = self._why_not(self.range, locks)
            if not used:
                break
            why = why or f"--uid-range {written(self.range)}: {used}"
        else:
            raise InvalidSpec(f"{why}: name {len(asked)} uids that nobody has")
        if why or self.range != asked:
            self.note = f"{why or f'--uid-range {written(asked)} was taken'}: functions have {written(self.range)}"
        self._given.asked, self._given.uids = written(asked), written(self.range)
        self._write()

    def of(self, function: str) -> int:
        """
        Return the uid of *function*, ``name.namespace``.

        :raises InvalidSpec: all belong to other functions
        :raises StorageFailed: it cannot be written down
        """
        with self._lock:
            functions = self._given.functions
            if function not in functions:
                functions[function] = self._free(functions)
                self._write()
            return self.range[functions[function]]

    def close(self) -> None:
        """From now on others may have the range."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _free(self, functions: dict[str, int]) -> int:
        """Return the place of a uid that no function has."""
        if len(functions) < len(self.range):
            taken = set(functions.values())
            return next(at for at in range(len(self.range)) if at not in taken)
        known = self.known() if self.known is not None else functions
        for name in functions:
            if name not in known:
                return functions.pop(name)
        raise InvalidSpec(
            f"all {len(functions)} uids of --uid-range {written(self.range)} belong to functions: start the platform "
            "with a larger range, or remove functions"
        )

    def _why_not(self, uids: range, locks: Path) -> str:
        """Return who else uses one of *uids*; empty: nobody, and now they are ours."""
        if uids[-1] > _LAST:
            return f"there are none above {_LAST}"
        if not any(uids[0] >= inside and uids[-1] < inside + count for inside, count in _mapped()):
            return "this container has no such uids"
        for name, first, count in _accounts():
            if first < uids.stop and uids.start < first + count:
                return f"{name} has {max(first, uids.start)}"
        ours = {uids[at] for at in self._given.functions.values()}  # what an earlier run has left ends in a moment
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if (uid := os.stat(f"/proc/{pid}").st_uid) in uids and uid not in ours:
                    return f"process {pid} runs as {uid}"
        try:
            locks.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            file = os.open(locks, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return ""  # nobody else can say so either
        try:
            # struct flock: l_type, l_whence, l_start, l_len, l_pid
            asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, uids.start, len(uids), 0)
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, asked)
        except OSError:
            os.close(file)
            return "another platform on this machine has them"
        self._held = file
        return ""

    def _read(self) -> _Given:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Given)
        except FileNotFoundError:
            return _Given("", "")
        except OSError as exc:
            raise StorageFailed(f"{self._path} cannot be read ({exc.strerror}): make it readable") from exc
        except msgspec.DecodeError as exc:
            raise StorageFailed(
                f"{self._path} says which uid each function has, and is damaged ({exc}): restore it, or remove it, and "
                "what functions have compiled is made again"
            ) from exc

    def _write(self) -> None:
        aside = self._path.with_name(f"{self._path.name}~")
        try:
            with open(aside, "wb") as file:
                file.write(msgspec.json.encode(self._given))
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, self._path)
        except OSError as exc:
            raise StorageFailed(f"{self._path} cannot be written ({exc.strerror}): free space on its disk") from exc


def _mapped() -> Iterator[tuple[int, int]]:
    """Yield the uids that there are here, each time the first and how many."""
    with open("/proc/self/uid_map") as map_:
        for inside, _, count in map(str.split, map_):
            yield int(inside), int(count)


def _accounts() -> Iterator[tuple[str, int, int]]:
    """Yield who has which uids or gids on this machine: a name, the first, and how many."""
    for path in ("/etc/passwd", "/etc/group", "/etc/subuid", "/etc/subgid"):
        with contextlib.suppress(OSError), open(path, errors="replace") as file:
            for name, *fields in (line.strip().split(":") for line in file):
                with contextlib.suppress(ValueError, IndexError):
                    if "sub" in path:
                        yield f"{name} in {path}", int(fields[0]), int(fields[1])
                    else:
                        yield f"{name} in {path}", int(fields[1]), 1
