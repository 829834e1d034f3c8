"""What the operator opens to all functions with ``--bind``."""

import contextlib
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpufaas_core.errors import InvalidSpec
from gpufaas_gpu_manager.isolation.walls import Walls

_MACHINE: Final = ("/", "/proc", "/sys", "/dev", "/run", "/etc", "/tmp")


def checked(binds: Sequence[str], data: Path) -> tuple[str, ...]:
    """
    Return *binds*, ``PATH`` or ``PATH:rw``, without what is said twice.

    :param data: the directory of the platform, which no function sees
    :raises InvalidSpec: one is not there, is no directory, or shows more than data
    """
    data, found = data.resolve(), list[str]()
    for bind in binds:
        path = Path(bind.removesuffix(":rw"))
        real = path.resolve()
        found.append(f"{path}{':rw' * bind.endswith(':rw')}")
        if not path.is_absolute() or not real.is_dir():
            why = "no directory has this absolute path: write for example --bind /data or --bind /data:rw"
        elif str(real) in _MACHINE or real.is_relative_to("/proc") or real.is_relative_to("/sys"):
            why = f"each worker has a {real} of its own: bind a directory with your data instead"
        elif real.is_relative_to(data) or data.is_relative_to(real):
            why = f"it would show what the platform keeps in {data}: bind another one, or move that with --data"
        else:
            continue
        raise InvalidSpec(f"--bind {bind}: {why}")
    return tuple(dict.fromkeys(found))


def advice(failure: str, walls: Walls) -> str:
    """
    Return what opens the file of which *failure* of a load says that it is not there, or may not be read; empty: it is
    not on this machine either, or not for everybody.
    """
    if walls == Walls() or not failure.startswith("FileNotFoundError" if walls.root else "PermissionError"):
        return ""
    automatic = re.findall(r"(?m)^\S+ (\S+) autofs ", Path("/proc/self/mounts").read_text())  # a look may take minutes
    for path in map(os.path.normpath, re.findall(r"(?<![\w.])/[^\s':,]+", failure)):
        if any(Path(path).is_relative_to(each) for each in automatic):
            continue
        with contextlib.suppress(OSError, ValueError):
            real = Path(path).resolve(strict=True)  # by links a function would learn what it may not see
            place = path if real.is_dir() else os.path.dirname(path)
            if place not in _MACHINE and all(each.stat().st_mode & stat.S_IXOTH for each in real.parents):
                return f" ({path} is on this node: gpufaas serve --bind {place} shows it to functions)"
    return ""
