"""What code leaves for the end of its process (`atexit`, `weakref.finalize`): a worker does what its author left."""

import atexit
import contextlib
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from multiprocessing import util
from typing import Any, Final, NoReturn
from weakref import finalize

from gpufaas_core.model import Seconds
from gpufaas_functions.author_modules import found

EXIT_S: Final[Seconds] = 1.5
"""The longest that a worker's tasks and hooks may take in all. Then it ends, and the log says where its threads are."""
kept: Final[list[Any]] = []
"""Holds the model to the end of its process: to free it piece by piece takes longer than to end."""
limit: Final = cache(lambda: faulthandler.dump_traceback_later(EXIT_S, exit=True, file=2))
"""Begin the time of `EXIT_S`; a second call does nothing."""


def forget() -> None:
    """Drop the hooks of this process, but for Python's own: its forks begin without them."""
    for each in list(finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False  # it is called when its object is gone, as before
    atexit._clear()
    for own in (logging.shutdown, util._exit_function, finalize._exitfunc):  # type: ignore[attr-defined]
        atexit.register(own)


def run() -> None:
    """Run the hooks, then each `__del__` of the model and of objects in the author's modules. Waits for no threads."""
    limit()
    for each in threading._threading_atexits:  # type: ignore[attr-defined]
        atexit.register(each)  # the last ones come first
    atexit._run_exitfuncs()
    for each in kept:
        if hasattr(type(each), "__del__"):
            atexit.register(each.__del__)
    atexit._run_exitfuncs()
    for names in [vars(sys.modules[each]) for each in found if each in sys.modules]:  # to look at all takes 6 ms
        for name in [each for each in reversed(names) if hasattr(type(names[each]), "__del__")]:
            del names[name]


def flush_at_exit(flush: Callable[[], None]) -> None:
    """If the author's code ends this process by `os._exit`, *flush* first: it sends answers of calls that ended."""
    serves, leave = os.getpid(), os._exit

    def leave_at_once(status: int) -> NoReturn:
        if os.getpid() == serves:  # and no process that the author's code has forked
            with contextlib.suppress(Exception):
                flush()
        leave(status)

    os._exit = leave_at_once


def end_process(status: int = 0) -> NoReturn:
    """End at once, with what was printed."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
