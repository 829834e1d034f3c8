"""What code leaves for the end of its process (`atexit`, `weakref.finalize`): a worker does what its author left."""

import atexit
import faulthandler
import logging
import sys
import threading
from multiprocessing import util
from typing import Final
from weakref import finalize

from gpufaas_core.model import Seconds
from gpufaas_functions.author_modules import AuthorSpec

EXIT_S: Final[Seconds] = 1.5
"""A worker has so long for it. Then it ends, and the log says where its threads were."""


def forget() -> None:
    """Drop what this process would do, but for Python's own part: its forks begin without."""
    finalize._registry.clear()  # type: ignore[attr-defined]
    atexit._clear()
    for each in (logging.shutdown, util._exit_function, finalize._exitfunc):  # type: ignore[attr-defined]
        atexit.register(each)


def run() -> None:
    """Do it, then drop the objects of the author's modules that have something to do. Threads are not waited for."""
    faulthandler.dump_traceback_later(EXIT_S, exit=True, file=2)
    for each in reversed(threading._threading_atexits):  # type: ignore[attr-defined]
        each()
    atexit._run_exitfuncs()
    modules = [each for each in list(sys.modules.values()) if isinstance(getattr(each, "__spec__", None), AuthorSpec)]
    for names in map(vars, modules):
        for name in [each for each in reversed(names) if hasattr(type(names[each]), "__del__")]:
            del names[name]
