"""
What the author's code has set for the thread that loads, for the other threads that run its code.

Python and torch keep some settings for each thread: ``torch.set_grad_enabled(False)`` in ``load`` says nothing about
another one. Objects that look at their thread, and `threading.local`, stay what they are.
"""

import asyncio
import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

_here: Final = threading.local()


class ThreadState:
    """Make it in the thread that has loaded, after the load."""

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        """The context variables (numpy's ``errstate``, decimal, settings of ``torch.compile``). Run code in a copy."""
        self._modes = _modes()
        _here.modes = None

    def begin(self) -> None:
        """Set in this thread what was set in the one that loaded, but for context variables. Only once."""
        if not hasattr(_here, "modes"):
            _here.modes = stack = contextlib.ExitStack()  # torch ends a mode that nobody keeps
            for each in self._modes:
                stack.enter_context(each())

    def run(self, call: Callable[..., object], *arguments: object) -> None:
        """*call* what runs the author's code in this thread, with all that was set."""
        self.begin()
        context = self.context.copy()
        if decimal := sys.modules.get("decimal"):  # its variable holds an object, which code changes in place
            context.run(lambda: decimal.setcontext(decimal.getcontext().copy()))
        context.run(call, *arguments)

    def executor(self) -> ThreadPoolExecutor:
        """Return what runs ``asyncio.to_thread``."""
        return ThreadPoolExecutor(thread_name_prefix="asyncio", initializer=self.begin)


def _modes() -> list[Callable[[], Any]]:
    """Return what makes the modes of torch that this thread is in. To ask takes 0.1 ms of a cold start."""
    found: list[Callable[[], Any]] = []
    torch: Any = sys.modules.get("torch")
    with contextlib.suppress(AttributeError):  # there is no torch, or what stands in for it
        if torch.is_inference_mode_enabled():
            found.append(torch.inference_mode)
        if not torch.is_grad_enabled():
            found.append(partial(torch.set_grad_enabled, False))
        # Who has set a device has imported this, which takes 0.2 ms; a mode slows each function of torch.
        if "torch.utils._device" in sys.modules and (device := torch.get_default_device()).type != "cpu":
            found.append(lambda: device)
        if torch._C._is_any_autocast_enabled():  # to ask for one kind takes 0.1 ms more
            kinds = [each for each in ("cpu", "cuda") if torch.is_autocast_enabled(each)]
            found += [partial(torch.autocast, each, torch.get_autocast_dtype(each)) for each in kinds]
    return found


class _Loops(asyncio.DefaultEventLoopPolicy):
    """
    Makes a loop for each thread that asks for one, as Python does for the main thread. Until then none has any: 32
    loops would be 96 open files.
    """

    def get_event_loop(self) -> asyncio.AbstractEventLoop:
        try:
            return super().get_event_loop()
        except RuntimeError:
            self.set_event_loop(self.new_event_loop())
            return super().get_event_loop()


def give_loops() -> None:
    """Let each thread have an event loop. Called before the author's code, which may have a policy of its own."""
    asyncio.set_event_loop_policy(_Loops())
