"""The room that parked workers have in the host tier of a node. They give way to weights."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from gpufaas_core.model import Bytes, Seconds

_LEAVE_S: Final[Seconds] = 2.0
"""How long weights wait for the memory of parked workers that end."""


class RoomKeeper(Protocol):
    """Counts what parked workers hold (gpufaas_cache_manager.host_tier)."""

    @property
    def parked(self) -> Mapping[int, Bytes]: ...

    def park(self, worker: int, size: Bytes) -> bool: ...

    def repark(self, worker: int, size: Bytes) -> None: ...

    def unpark(self, worker: int) -> None: ...

    def crowding(self, size: Bytes, apart: int = 0) -> list[int]: ...

    def set_aside(self, size: Bytes) -> bool: ...


class ParkedRoom:
    """See module. Used on the event loop."""

    def __init__(self, keeper: RoomKeeper) -> None:
        self.end: Callable[[list[int]], None] = lambda _: None
        """Called with parked workers whose memory is needed."""
        self.keeper = keeper
        self._leaving: dict[int, asyncio.Future[None]] = {}
        """Parked workers whose memory somebody waits for."""

    def unpark(self, worker: int) -> None:
        self.keeper.unpark(worker)
        if (waits := self._leaving.pop(worker, None)) is not None and not waits.done():
            waits.set_result(None)

    def set_aside(self, size: Bytes) -> bool:
        """Charge what a layer holds, for which parked workers give way; less than 0: it is gone. False: no room."""
        if not self.keeper.set_aside(size):
            return False
        self.end(self.keeper.crowding(0))
        return True

    async def crowd_out(self, size: Bytes) -> None:
        """Parked workers give way to weights of *size* bytes; return when they have, or soon after."""
        numbers = self.keeper.crowding(size)
        if not numbers:
            return
        waits = [self._leaving.setdefault(each, asyncio.get_running_loop().create_future()) for each in numbers]
        self.end(numbers)
        await asyncio.wait(waits, timeout=_LEAVE_S)
