"""Which function handles which event, in each phase of an engine."""

from collections.abc import Mapping
from typing import Final

from gpufaas_core import messages as m
from gpufaas_scheduler.handle import agenda, calls, copies, fleet, joins, parking, staging, takeover, workers
from gpufaas_scheduler.world.world import Handler, World


def _serving(world: World, _event: m.Serving) -> None:
    world.handlers = handlers = handlers_of(world)
    takeover.serving(world, lambda event: handlers[type(event)](world, event))


def _restored(world: World, event: m.Restored) -> None:
    takeover.restored(world, event)
    if world.older.left is not None:
        world.handlers = _LISTENING


HANDLERS: Final[dict[type[m.Event], Handler]] = {
    m.Arrived: calls.arrived,
    m.Finished: calls.finished,
    m.CallerLeft: calls.cancelled,
    m.Loaded: workers.loaded,
    m.CopyFailed: workers.load_failed,
    m.Measured: workers.measured,
    m.Resized: workers.resized,
    m.ShareKept: workers.share_kept,
    m.WorkerExited: workers.worker_exited,
    m.CopySilent: workers.silent,
    m.NodeRefused: calls.refused,
    m.Staged: staging.staged,
    m.Unstaged: staging.unstaged,
    m.Parked: parking.parked,
    m.Unparked: parking.unparked,
    m.Woken: calls.woken,
    m.DeviceJoined: joins.device_joined,
    m.DeviceLeft: fleet.device_left,
    m.DeviceDrained: fleet.device_drained,
    m.FunctionDeployed: fleet.function_deployed,
    m.FunctionRemoved: fleet.function_removed,
    m.Scaled: copies.scaled,
    m.Planned: agenda.planned,
    m.Profiled: workers.profiled,
    m.Offered: agenda.offered,
    m.OrderFailed: agenda.order_failed,
    m.Restored: _restored,
    m.Serving: _serving,
}

_LISTENING: Final = {
    each: handler if each in (m.FunctionDeployed, m.Restored, m.Serving) else takeover.defer
    for each, handler in HANDLERS.items()
}
"""The handlers between `Restored` and `Serving`."""


def handlers_of(world: World) -> Mapping[type[m.Event], Handler]:
    """Return the handlers of an engine that decides. Some policies are told each event before it is handled."""
    observe = world.observe
    if observe is None:
        return HANDLERS

    def after(handler: Handler) -> Handler:
        def handle(world: World, event: m.Event) -> None:
            observe(event, world.now)
            handler(world, event)

        return handle

    return {kind: after(handler) for kind, handler in HANDLERS.items()}


TANGLING: Final = frozenset((
    m.DeviceLeft, m.DeviceDrained, m.Measured, m.Resized, m.ShareKept, m.CopyFailed, m.WorkerExited,
    m.CopySilent, m.NodeRefused, m.FunctionDeployed, m.Scaled, m.Serving,
))  # fmt: skip
"""Events that may take the place that a nested call waits for."""
