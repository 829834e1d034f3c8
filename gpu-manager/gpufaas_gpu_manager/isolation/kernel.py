"""System calls that Python has no function for."""

import ctypes
import os
from typing import Final

_PR_SET_NO_NEW_PRIVS: Final = 38
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def call(number: int, *args: int | bytes | None) -> int:
    """
    Make system call *number* (bytes: their address).

    :raises OSError: the kernel refuses it
    """
    result: int = _libc.syscall(
        ctypes.c_long(number), *(ctypes.c_long(each) if isinstance(each, int) else each for each in args)
    )
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def no_new_privs() -> None:
    """What this process and its children execute gives them no rights beyond those that they have: no SUID, no files'
    capabilities.
    """
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
