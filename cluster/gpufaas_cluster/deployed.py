"""
The functions that a leading scheduler knows and tells its nodes of. It learns of them from etcd only.

A gateway may learn of a function from etcd before the scheduler does. What it asks for then waits until the scheduler
knows the function, `KNOWN_WITHIN_S` at most.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from gpufaas_cluster import control
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.model import Function, FunctionId, Seconds
from gpufaas_scheduler.service import SchedulerService

KNOWN_WITHIN_S: Final[Seconds] = 2.0
"""etcd tells all its watchers within milliseconds; after so long, the function does not exist."""
_REMOVED_KEPT: Final = 10_000


class KnownRevisions:
    """
    Revisions, which do not change: one that is known stays as it is however often it is deployed.

    :param tell: sends a message to all nodes
    """

    def __init__(self, service: SchedulerService, tell: Callable[[control.Message], None]) -> None:
        self.workers: dict[FunctionId, WorkerSpec] = {}
        self._service = service
        self._tell = tell
        self._removed: OrderedDict[FunctionId, None] = OrderedDict()
        self._held: dict[FunctionId, list[Callable[[], None]]] = {}
        """What waits for functions to be known."""

    def deploy(self, function: Function, worker: WorkerSpec, succeeds: FunctionId | None = None) -> None:
        if function.id in self.workers:
            return
        self._removed.pop(function.id, None)  # it takes its calls again: the revision after it did not load
        self.workers[function.id] = worker
        self._tell(control.DefineFunction(worker, fetch=True))
        self._service.deploy(function, succeeds=succeeds)
        self._release(function.id)

    def remove(self, function: FunctionId, drain: bool) -> None:
        if function in self._removed:
            return
        self._removed[function] = None
        if len(self._removed) > _REMOVED_KEPT:
            self._removed.popitem(last=False)
        if self.workers.pop(function, None) is not None:
            self._service.remove(function, drain)
            self._tell(control.ForgetFunction(function))

    def when_known(self, function: FunctionId, action: Callable[[], None]) -> None:
        """Do *action* when *function* is deployed, or was removed; at the latest after `KNOWN_WITHIN_S`."""
        if function in self.workers or function in self._removed:
            action()
        elif function in self._held:
            self._held[function].append(action)
        else:
            self._held[function] = [action]
            asyncio.get_running_loop().call_later(KNOWN_WITHIN_S, self._release, function)

    def _release(self, function: FunctionId) -> None:
        for action in self._held.pop(function, ()):
            action()
