"""`Blocking`: the way from a thread that may block to the event loop that owns an `Etcd`."""

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from gpufaas_adapters.etcd.client import Etcd
from gpufaas_core.errors import StorageFailed
from gpufaas_core.units import Seconds

_T = TypeVar("_T")

# Each request has its own, shorter limit; this one is for a loop that is blocked.
_LOOP_S: Final[Seconds] = 60.0


class Blocking:
    """
    Runs coroutines on the loop of *etcd*, and waits for them.

    :raises RuntimeError: at the call: made on that loop's own thread, which would wait for itself
    :raises StorageFailed: at the call: the loop is closed, or stands still
    """

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd

    def __call__(self, work: Coroutine[Any, Any, _T]) -> _T:
        loop = self._etcd.loop
        try:
            if loop is None:
                raise RuntimeError("the connection to etcd was never opened: enter it on the loop that shall own it")
            if _running_here() is loop:
                raise RuntimeError("this call blocks the loop that it waits for: make it by asyncio.to_thread")
            try:
                future = asyncio.run_coroutine_threadsafe(work, loop)
            except RuntimeError as exc:
                raise StorageFailed(f"etcd at {self._etcd.endpoint} is not asked any more: {exc}") from exc
        except BaseException:
            work.close()
            raise
        try:
            return future.result(_LOOP_S)
        except concurrent.futures.CancelledError:
            raise StorageFailed(
                f"etcd at {self._etcd.endpoint} is not asked any more: this process is stopping"
            ) from None
        except concurrent.futures.TimeoutError:
            if future.done():  # an error of the work itself
                raise
            future.cancel()
            raise StorageFailed(
                f"the process did not get to ask etcd at {self._etcd.endpoint}: it is overloaded"
            ) from None


def _running_here() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
