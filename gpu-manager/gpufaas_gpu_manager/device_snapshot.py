"""What a device of a node has, for a scheduler that takes over or has lost track."""

from gpufaas_core.model import Seconds
from gpufaas_core.snapshot import DeviceSnapshot, ParkedSnapshot, ResidentSnapshot, RunningCall
from gpufaas_gpu_manager.room import WorkerDevice
from gpufaas_gpu_manager.worker_state import PARKED_STATES, WorkerState


def snapshot_of(device: WorkerDevice, now: Seconds) -> DeviceSnapshot:
    """Return what is in memory and what runs, ordered by last use and by begin."""
    living = (WorkerState.WAITING, WorkerState.STARTING, WorkerState.READY, *PARKED_STATES)
    workers = sorted((each for each in device.workers.values() if each.state in living), key=lambda each: each.used_at)
    calls = [each for worker in (*workers, *device.successions.replaced) for each in worker.calls.exchanges.values()]
    running = sorted((each for each in calls if not each.finished), key=lambda each: each.opened_at)
    return DeviceSnapshot(
        device.source.device,
        tuple(
            ResidentSnapshot(
                function=each.spec.function,
                digest=each.spec.digest,
                memory=each.wanted,
                copy=each.copy,
                idle_s=now - each.used_at,
                loading=each.state is not WorkerState.READY,
                load_age_s=now - each.load.asked_at if each.state is not WorkerState.READY else 0.0,
                tier=each.load.tier,
                silent=each.calls.watch.silent,
            )
            for each in workers
        ),
        tuple(
            RunningCall(
                call=each.grant.call,
                function=each.grant.function,
                copy=each.grant.copy,
                age_s=now - (each.opened_at if each.slot is None else each.bound_at),
                begun=each.slot is not None,
                cold=each.grant.cold,
                abandoned=each.abandoned,
                grant=each.grant.number if len(each.grant.calls) > 1 else 0,
                batch=len(each.grant.calls),
            )
            for each in running
        ),
        tuple(
            ParkedSnapshot(each.spec.function, each.spec.digest, each.copy, device.ledger.reserved.get(each.number, 0))
            for each in device.parked.values()
            if each.state in PARKED_STATES
        ),
    )
