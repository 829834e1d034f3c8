"""The functions that the scheduler that leads knows, and that its nodes are told of."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from gpufaas_cluster import control
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.model import Function, FunctionId
from gpufaas_scheduler.service import SchedulerService

_REMOVED_KEPT: Final = 10_000


class Deployed:
    """
    Revisions, which do not change: one that is known, or was removed, stays as it is however often it is deployed.

    :param tell: sends a message to all nodes
    """

    def __init__(self, service: SchedulerService, tell: Callable[[control.Message], None]) -> None:
        self.workers: dict[FunctionId, WorkerSpec] = {}
        self._service = service
        self._tell = tell
        self._removed: OrderedDict[FunctionId, None] = OrderedDict()

    def deploy(self, function: Function, worker: WorkerSpec) -> None:
        if function.id in self.workers or function.id in self._removed:
            return
        self.workers[function.id] = worker
        self._tell(control.DefineFunction(worker, fetch=True))
        self._service.deploy(function)

    def remove(self, function: FunctionId, drain: bool) -> None:
        if function in self._removed:
            return
        self._removed[function] = None
        if len(self._removed) > _REMOVED_KEPT:
            self._removed.popitem(last=False)
        if self.workers.pop(function, None) is not None:
            self._service.remove(function, drain)
            self._tell(control.ForgetFunction(function))
