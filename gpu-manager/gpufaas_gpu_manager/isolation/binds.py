"""What the operator opens to all functions with ``--bind``."""

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpufaas_core.errors import InvalidSpec
from gpufaas_gpu_manager.isolation.levels import Walls

_MACHINE: Final = ("/", "/proc", "/sys", "/dev", "/run", "/etc", "/tmp")


def checked(binds: Sequence[str], data: Path) -> tuple[str, ...]:
    """
    Return *binds*, ``PATH`` or ``PATH:rw``, without what is said twice.

    :param data: the directory of the platform, which no function sees
    :raises InvalidSpec: one is not there, is no directory, or shows more than data
    """
    return tuple(dict.fromkeys(_checked(each, data) for each in binds))


def _checked(bind: str, data: Path) -> str:
    text = bind.removesuffix(":rw")
    path, real = Path(text), Path(text).resolve()
    if not path.is_absolute() or not real.is_dir():
        what = "is not there" if path.is_absolute() and not real.exists() else "is no absolute path of a directory"
        raise InvalidSpec(f"--bind {bind}: {text!r} {what}: write for example --bind /data or --bind /data:rw")
    if str(real) in _MACHINE or real.is_relative_to("/proc") or real.is_relative_to("/sys"):
        raise InvalidSpec(
            f"--bind {bind}: each worker has a {real} of its own: bind a directory with your data instead"
        )
    data = data.resolve()
    if real.is_relative_to(data) or data.is_relative_to(real):
        raise InvalidSpec(
            f"--bind {bind}: it would show functions what the platform keeps in {data}: bind another one, or "
            "move that with --data"
        )
    return f"{path}{bind[len(text) :]}"


def advice(failure: str, walls: Walls) -> str:
    """
    Return what opens the file of which *failure* of a load says that it is not there, or may not be read; empty: it is
    not on this machine either, or not for everybody.
    """
    error = "FileNotFoundError" if walls.root else "PermissionError"
    if (not walls.root and not walls.landlock) or not failure.startswith(error):
        return ""
    for path in map(os.path.normpath, re.findall(r"(?<![\w.])/[^\s':,]+", failure)):
        try:
            place = path if stat.S_ISDIR(os.stat(path).st_mode) else os.path.dirname(path)
            if place not in _MACHINE and all(os.stat(each).st_mode & stat.S_IXOTH for each in Path(path).parents):
                return f" ({path} is on this node: gpufaas serve --bind {place} shows it to functions)"
        except (OSError, ValueError):
            continue
    return ""
