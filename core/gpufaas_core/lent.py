"""Parts of a memory that are lent, until nobody has them any more."""

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

from gpufaas_core.units import Bytes


def lend(memory: Any, at: Bytes, size: Bytes, give_back: Callable[..., object], *arguments: object) -> memoryview:
    """
    Return *size* bytes of *memory* from *at* on. When they and all parts of them are gone, *give_back* is called.

    :param memory: one that can be written to
    :param size: one of a few: each makes a type, which only the garbage collector can free
    """
    part = (ctypes.c_char * size).from_buffer(memory, at)
    weakref.finalize(part, give_back, *arguments).atexit = False
    return memoryview(part)
