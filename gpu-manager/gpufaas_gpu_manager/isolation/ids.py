"""A uid, which is a gid, too, for each function: from a range that nobody else on this machine has."""

import contextlib
import fcntl
import logging
import os
import pwd
import re
import threading
import weakref
from pathlib import Path
from typing import Final

import msgspec

from gpufaas_core.errors import InvalidSpec, StorageFailed
from gpufaas_core.files import replace_file
from gpufaas_core.peers import LOCKS, WORKERS, lock_of

log = logging.getLogger("node")

_TRIES: Final = 16
UID_RANGE: Final = f"{WORKERS[0]}-{WORKERS[0] + len(WORKERS) // _TRIES - 1}"
"""Above those that systemd gives to containers, and far above those of users."""
_LAST: Final = 2**32 - 2
"""The next one means: do not change it."""


def uid_range(text: str) -> range:
    """Return the uids that ``FIRST-LAST`` names. :raises InvalidSpec: it is malformed, or has uid 0"""
    found = re.fullmatch(r"([0-9]{1,10})-([0-9]{1,10})", text)
    uids = range(int(found[1]), int(found[2]) + 1) if found is not None else range(0)
    if not uids or uids[-1] > _LAST or 0 in uids:
        raise InvalidSpec(
            f"{text!r} is not FIRST-LAST, two uids from 1 (0 is root's) to {_LAST}: write for example {UID_RANGE}"
        )
    return uids


def written(uids: range) -> str:
    """Return *uids* as `uid_range` reads them."""
    return f"{uids[0]}-{uids[-1]}"


class Uids:
    """
    The uids of a platform's functions, in the order of their first start. None is given a second time. The range is its
    own as long as this object lives. May be used from any thread.
    """

    def __init__(self, path: Path, asked: range, *, strict: bool = False, locks: Path = LOCKS) -> None:
        """
        Take *asked*, or the next range of its size that nobody uses, and log it.

        :param path: of the file that says after a restart which function has which
        :param strict: take *asked* only
        :raises InvalidSpec: no such range is free
        :raises StorageFailed: *path* cannot be read, or is damaged
        """
        self._path, self._lock = path, threading.Lock()
        known, why = _read(path), ""
        held: int | None = None
        with contextlib.suppress(OSError):  # where it cannot be opened, nobody else can say what is theirs either
            locks.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            held = os.open(locks, os.O_RDWR | os.O_CREAT, 0o600)
            weakref.finalize(self, os.close, held)
        tries = range(0, (1 if strict else _TRIES) * len(asked), len(asked))
        ranges = [range(asked.start + n, asked.stop + n) for n in tries]
        ranges.sort(key=lambda each: not all(uid in each for uid in known.values()))  # as before, if it can be
        for self.range in ranges:
            if not (used := _taken(self.range, held)):
                break
            why = why or f"--uid-range {written(self.range)}: {used}"
        else:
            raise InvalidSpec(f"{why}: name {len(asked)} uids that nobody has")
        if why:
            log.warning("%s: functions have the uids %s", why, written(self.range))
        self._uids = {name: uid for name, uid in known.items() if uid in self.range}

    def of(self, function: str) -> int:
        """Return the uid of *function*, ``name.namespace``. :raises InvalidSpec: all belong to other functions"""
        with self._lock:
            if function not in self._uids:
                taken = set(self._uids.values())
                uid = next((each for each in self.range if each not in taken), 0)
                if not uid:
                    raise InvalidSpec(
                        f"all {len(self.range)} uids of --uid-range {written(self.range)} belong to functions: start "
                        f"the platform with a larger range, or without {self._path}"
                    )
                self._uids[function] = uid
                with contextlib.suppress(OSError):  # on a full disk functions start, and the next one writes it
                    replace_file(self._path, msgspec.json.encode(self._uids))
            return self._uids[function]


def _taken(uids: range, locks: int | None) -> str:
    """Return who else uses one of *uids*; empty: nobody, and now they are locked."""
    mapped = (map(int, line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines())
    if not any(first <= uids[0] and uids[-1] < first + count for first, _, count in mapped):
        return "this machine, or container, has no such uids"
    for user in pwd.getpwall():
        if user.pw_uid in uids:
            return f"user {user.pw_name} has {user.pw_uid}"
    try:
        if locks is not None:
            fcntl.fcntl(locks, fcntl.F_OFD_SETLK, lock_of(uids))
    except OSError:
        return "another platform on this machine has them"
    return ""


def _read(path: Path) -> dict[str, int]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, int]) if path.exists() else {}
    except (OSError, msgspec.DecodeError) as exc:
        raise StorageFailed(
            f"{path}, which says what uid each function has, cannot be read ({exc}): restore it, or remove it: "
            "then each gets a new one"
        ) from exc
