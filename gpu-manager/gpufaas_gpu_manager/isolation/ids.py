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

UID_RANGE: Final = "1900000000-1900065535"
"""Above those that systemd gives to containers, and far above those of users."""
_LAST: Final = 2**32 - 2
"""The next one means: do not change it."""
_TRIES: Final = 16
_LOCKS: Final = Path("/run/gpufaas/uids")
"""A file in which each platform locks the bytes at its uids."""


def uid_range(text: str) -> range:
    """Return the uids that ``FIRST-LAST`` names. :raises InvalidSpec: it is malformed, or has uid 0"""
    found = re.fullmatch(r"([0-9]{1,10})-([0-9]{1,10})", text)
    uids = range(int(found[1]), int(found[2]) + 1) if found is not None else range(0)
    if not uids or uids[-1] > _LAST or 0 in uids:
        raise InvalidSpec(
            f"{text!r} is not FIRST-LAST, two uids from 1 (0 is root's) to {_LAST}: write for example {UID_RANGE}"
        )
    return uids


def worker_uids(asked: range | None = None) -> range:
    """Return the uids that workers of this machine may have, as `Uids` takes them. None: their node has the default."""
    asked = asked or uid_range(UID_RANGE)
    return range(asked.start, asked.start + _TRIES * len(asked))


def written(uids: range) -> str:
    """Return *uids* as `uid_range` reads them."""
    return f"{uids[0]}-{uids[-1]}"


class _Given(msgspec.Struct):
    """What is kept from run to run."""

    asked: str = ""
    uids: str = ""
    """The range in use, which is another than was asked for if somebody had that."""
    functions: dict[str, int] = {}
    """By ``name.namespace``: the place of its uid in the range."""


class Uids:
    """
    The uids of a platform's functions, in the order of their first start. That of a function that is gone is given
    again when there is no other. The range is its own until `close`. May be used from any thread.
    """

    def __init__(self, path: Path, asked: range, *, strict: bool = False, locks: Path = _LOCKS) -> None:
        """
        Take *asked*, or the next range of its size that nobody uses.

        :param path: of the file that says after a restart which function has which
        :param strict: take *asked* only
        :raises InvalidSpec: no such range is free
        :raises StorageFailed: *path* cannot be read, or is damaged
        """
        self.known: Callable[[], Collection[str]] | None = None
        """Returns the functions that are not gone; None: nobody knows yet."""
        self._path, self._lock, self._held = path, threading.Lock(), -1
        self._given = given = _read(path)
        given.functions = {name: at for name, at in given.functions.items() if at < len(asked)}
        ranges = [range(asked.start + n, asked.stop + n) for n in range(0, _TRIES * len(asked), len(asked))]
        if given.asked == written(asked):
            ranges.insert(0, uid_range(given.uids))  # what functions have compiled is theirs there
        self.note = ""
        """Why they are not those that were asked for; empty: they are."""
        for self.range in [asked] if strict else ranges:
            used = self._why_not(locks)
            if not used:
                break
            self.note = self.note or f"--uid-range {written(self.range)}: {used}"
        else:
            raise InvalidSpec(f"{self.note}: name {len(asked)} uids that nobody has")
        if self.range != asked:
            self.note = f"{self.note or 'as before'}: functions have the uids {written(self.range)}"
        given.asked, given.uids = written(asked), written(self.range)
        self._write()

    def of(self, function: str) -> int:
        """Return the uid of *function*, ``name.namespace``. :raises InvalidSpec: all belong to other functions"""
        with self._lock:
            functions = self._given.functions
            if function not in functions:
                functions[function] = self._free(functions)
                self._write()
            return self.range[functions[function]]

    def _free(self, functions: dict[str, int]) -> int:
        taken = set(functions.values())
        for at in range(len(self.range)):
            if at not in taken:
                return at
        known = self.known() if self.known is not None else functions
        for name in functions.keys() - known:
            return functions.pop(name)
        raise InvalidSpec(
            f"all {len(functions)} uids of --uid-range {written(self.range)} belong to functions: start the platform "
            "with a larger range, or remove functions"
        )

    def _why_not(self, locks: Path) -> str:
        """Return who else uses one of the range; empty: nobody, and now it is ours."""
        uids = self.range
        mapped = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if not any(first <= uids[0] and uids[-1] < min(first + count, _LAST + 1) for first, _, count in mapped):
            return "this machine, or container, has no such uids"
        for name, first, count in _accounts():
            if first < uids.stop and uids.start < first + count:
                return f"{name} has {max(first, uids.start)}"
        ours = {uids[at] for at in self._given.functions.values()}  # what an earlier run has left ends in a moment
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if (uid := os.stat(f"/proc/{pid}").st_uid) in uids and uid not in ours:
                    return f"process {pid} runs as {uid}"
        with contextlib.suppress(OSError):  # nobody else can say so either
            locks.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._held = os.open(locks, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # struct flock: l_type, l_whence, l_start, l_len, l_pid
                lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, uids.start, len(uids), 0)
                fcntl.fcntl(self._held, fcntl.F_OFD_SETLK, lock)
            except OSError:
                self.close()
                return "another platform on this machine has them"
        return ""

    def _write(self) -> None:
        aside = self._path.with_name(f"{self._path.name}~")
        with contextlib.suppress(OSError):  # on a full disk functions start, and it is written with the next one
            with aside.open("wb") as file:
                file.write(msgspec.json.encode(self._given))
                file.flush()
                os.fsync(file.fileno())
            aside.replace(self._path)

    def close(self) -> None:
        """From now on others may have the range."""
        if self._held >= 0:
            os.close(self._held)
        self._held = -1


def _read(path: Path) -> _Given:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Given) if path.exists() else _Given()
    except (OSError, msgspec.DecodeError) as exc:
        raise StorageFailed(
            f"{path}, which says what uid each function has, cannot be read ({exc}): restore it, or remove it: "
            "then each gets a new one"
        ) from exc


def _accounts() -> Iterator[tuple[str, int, int]]:
    """Yield who has which uids or gids on this machine: a name, the first, and how many."""
    for path, form in (("/etc/passwd", r"(.+?):.*?:(\d+)()"), ("/etc/group", r"(.+?):.*?:(\d+)()"),
                       ("/etc/subuid", r"(.+?):(\d+):(\d+)"), ("/etc/subgid", r"(.+?):(\d+):(\d+)")):  # fmt: skip
        with contextlib.suppress(OSError):
            for name, first, count in re.findall(f"(?m)^{form}", Path(path).read_text(errors="replace")):
                yield f"{name} in {path}", int(first), int(count or 1)
