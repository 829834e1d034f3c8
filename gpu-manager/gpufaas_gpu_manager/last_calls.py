"""What becomes of the calls of a worker that is gone, or of a connection that broke."""

from math import inf

from gpufaas_core.errors import WorkerCrashed
from gpufaas_core.messages import Finished
from gpufaas_gpu_manager.exchange import Exchange, Slot
from gpufaas_gpu_manager.worker_calls import WorkerCalls
from gpufaas_gpu_manager.worker_end import WorkerEnd


def conclude(calls: WorkerCalls, end: WorkerEnd, *, lives: bool, was_ready: bool) -> None:
    """
    The worker is gone, which the scheduler is told: fail its calls, or have them placed again.

    :param lives: its copy does, by another worker
    :param was_ready: calls that the worker has not touched can be placed again
    """
    report = calls.host.report
    running = len(list(calls.bound()))
    exchanges = list(calls.exchanges.values())
    calls.exchanges.clear()
    calls.waiting.clear()
    refused: list[Exchange] = []
    for exchange in exchanges:
        untouched = exchange.untouched
        calls.close(exchange)
        again = not lives and (end.place_again or (untouched and was_ready))
        if exchange.stopped or (again and not exchange.abandoned):
            refused.append(exchange)
        else:
            said = calls.worker.output.tail() if end.loading else _last_lines(calls, exchange, running)
            exchange.fail(end.error(said))
            if end.asked_for or lives:  # the engine expects no call on it
                report(Finished(exchange.grant.call, calls.worker.device.id, 0.0, ok=False))
    for fact in () if lives else end.facts:
        report(fact)
    for exchange in refused:
        calls.refuse(exchange, end.reason, blameless=len(refused) < len(exchanges))


def lose(calls: WorkerCalls, slot: Slot, exchange: Exchange, reason: str) -> None:
    """
    The connection of a call broke before its answer, or could not be made.

    If the worker lives on, a call that it has not touched is placed again, and another one fails with *reason*.
    """
    worker = calls.worker
    timer = f"call {exchange.grant.call}"

    def fail() -> None:
        worker.timers.cancel(timer)
        if calls.exchanges.get(exchange.grant.call) is not exchange:
            return
        if exchange.untouched and not exchange.abandoned:
            calls.free.append(slot)
            calls.close(exchange)
            calls.refuse(exchange, reason)
        else:
            lines = _last_lines(calls, exchange, len(list(calls.bound())))
            calls.on_done(slot, exchange, 0.0, 0, False, False)
            name = f"{worker.spec.name}.{worker.spec.namespace}"
            exchange.fail(WorkerCrashed(f"{name} gave no answer: {reason}{lines}"))

    worker.timers.later(timer, worker.run.death_known_s, fail)


def _last_lines(calls: WorkerCalls, exchange: Exchange, running: int) -> str:
    """
    Return the last lines of the worker that the caller of *exchange* may see. Those of other calls are not for them,
    and a line that no call is known to have written may be of any that ran then.

    :param running: the number of calls that ran when the worker died
    """
    since = max(exchange.bound_at, calls.others_until) if exchange.slot is not None and running == 1 else inf
    return calls.worker.output.tail(exchange.name, since)
