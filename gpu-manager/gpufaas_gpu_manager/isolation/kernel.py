"""System calls that Python has no function for."""

import ctypes
import os
from typing import Final

_PR_SET_NO_NEW_PRIVS: Final = 38
libc: Final = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def call(asked: int | str, *args: int | bytes | None, about: str = "") -> int:
    """
    Make a system call, by its number, or by the name that it has in the C library.

    :param args: bytes: their address
    :param about: what is named if it fails
    :raises OSError: the kernel refuses it
    """
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in args]
    result: int = libc.syscall(asked, *given) if isinstance(asked, int) else getattr(libc, asked)(*given)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{asked}{about and ' '}{about}: {os.strerror(code)}")
    return result


def no_new_privs() -> None:
    """What this process and its children execute gives them no rights beyond those that they have: no SUID, no files'
    capabilities.
    """
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
