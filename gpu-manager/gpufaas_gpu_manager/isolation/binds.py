"""What the operator opens to all functions with ``--bind``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpufaas_core.errors import InvalidSpec

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
