"""What a worker said before its end may still wait in its sockets when it is gone: it is read first."""

from collections.abc import Callable
from typing import Final

from gpufaas_gpu_manager.running import Running
from gpufaas_gpu_manager.timers import Timers

_LOOK_S: Final = 0.25
_LOOKS: Final = 20


class LastWords:
    """Those of one worker. :param over: called with how it ended, once nothing more is heard of it"""

    def __init__(self, timers: Timers, over: Callable[[str], None]) -> None:
        self._timers = timers
        self._over = over
        self._run: Running | None = None
        """How the worker ran, from its end until nothing more is heard of it."""
        self._how = ""

    def begin(self, run: Running, how: str) -> None:
        """The process or container of *run* is gone: *how*."""
        self._run, self._how = run, how
        self._hear_out(_LOOKS)
        self.on_lost()

    def _hear_out(self, times: int) -> None:
        """Wait as long as the worker has left something to read, but for no grandchild that holds a socket open."""
        more = self._run is not None and self._run.hear_out()
        if times == _LOOKS or (more and times):
            self._timers.later("last words", _LOOK_S, lambda: self._hear_out(times - 1))
        else:
            self.on_lost(waited=True)

    def on_lost(self, *, waited: bool = False) -> None:
        """A slot, or a stream of its output, has ended. When all have, or we have *waited*, the worker is over."""
        if self._run is not None and (waited or self._run.said_all()):
            self._run = None
            self._over(self._how)
