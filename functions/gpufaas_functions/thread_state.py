"""
What the author's code has set for the thread that loads, for the other threads that run its code.

Python and torch keep some settings for each thread: ``torch.set_grad_enabled(False)`` in ``load`` says nothing about
another one. Objects that look at their thread, and `threading.local`, stay what they are.
"""

import asyncio
import contextlib
import contextvars
import operator
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

_OF_TORCH: Final = (
    ("is_inference_mode_enabled", "inference_mode", ()),  # before the next one, which it sets
    ("is_grad_enabled", "set_grad_enabled", ()),
    *(("is_autocast_enabled", "set_autocast_enabled", (each,)) for each in ("cpu", "cuda")),
    *(("get_autocast_dtype", "set_autocast_dtype", (each,)) for each in ("cpu", "cuda")),
    ("is_autocast_cache_enabled", "set_autocast_cache_enabled", ()),
    ("_C._is_multithreading_enabled", "autograd.set_multithreading_enabled", ()),
)
"""What reads each of its settings of a thread, what sets it, and arguments of both."""
_OF_DEVICES: Final = (("get_default_device", "set_default_device", ()),)
"""To ask imports `torch.utils._device`, which takes 0.2 ms of a cold start. Who has set one has imported it."""
_OF_CUDA: Final = (("cuda.current_device", "cuda.set_device", ()), ("cuda.current_stream", "cuda.set_stream", ()))
_thread: Final = threading.local()


class ThreadState:
    """Make it in the thread that has loaded, after the load."""

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        """The context variables (numpy's ``errstate``, decimal, settings of ``torch.compile``). Run code in a copy."""
        self._settings: list[tuple[Callable[..., Any], Callable[..., Any], tuple[str, ...], Any]] = []
        torch: Any = sys.modules.get("torch")
        devices = _OF_DEVICES if "torch.utils._device" in sys.modules else ()
        cuda = _OF_CUDA if hasattr(torch, "cuda") and torch.cuda.is_initialized() else ()
        for read, change, about in (*_OF_TORCH, *devices, *cuda):
            with contextlib.suppress(AttributeError, TypeError):  # there is no torch, or an older one
                reads, changes = (operator.attrgetter(each)(torch) for each in (read, change))
                self._settings.append((reads, changes, about, reads(*about)))
        _give_loops()
        _thread.serves = True

    def begin(self) -> None:
        """Set in this thread what was set in the one that loaded, but for context variables."""
        _thread.serves = True
        _thread.kept = kept = contextlib.ExitStack()
        for reads, changes, about, value in self._settings:
            if reads(*about) != value and hasattr(done := changes(*about, value), "__enter__"):
                kept.enter_context(done)

    def run(self, call: Callable[[], object]) -> None:
        """*call* what runs the author's code in this thread, with all that was set."""
        self.begin()
        self.context.copy().run(call)

    def executor(self) -> ThreadPoolExecutor:
        """Return what runs ``asyncio.to_thread``."""
        return ThreadPoolExecutor(thread_name_prefix="asyncio", initializer=self.begin)


def _give_loops() -> None:
    """
    Let threads that serve have an event loop once they ask for one, as Python 3.11 does for the main thread. Until then
    it costs nothing: 32 loops would be 96 open files. The policy may be the author's.
    """
    policy = asyncio.get_event_loop_policy()
    ask = policy.get_event_loop

    def get_event_loop() -> asyncio.AbstractEventLoop:
        try:
            return ask()
        except RuntimeError:
            if not getattr(_thread, "serves", False):  # a thread of the author's own
                raise
            policy.set_event_loop(policy.new_event_loop())
            return ask()

    policy.get_event_loop = get_event_loop  # type: ignore[method-assign]


asyncio.get_event_loop_policy()  # makes one, which takes 0.2 ms: before workers are forked
