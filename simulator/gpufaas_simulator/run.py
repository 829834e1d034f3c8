"""The short API of the simulator: from a workload and the name of a policy to a record and a report."""

from __future__ import annotations

from collections.abc import Callable

from gpufaas_core.model import CallId, Seconds
from gpufaas_scheduler.journal import Header
from gpufaas_scheduler.policies import DEFAULT_O3_LIMIT, DEFAULT_POLICY, DEFAULT_WAIT_BOUND_S
from gpufaas_simulator.nodes import Noise
from gpufaas_simulator.report import Report, report
from gpufaas_simulator.simulation import Observer, Record, Simulation
from gpufaas_simulator.workload import UNBOUNDED, Workload


def engine_header(
    policy: str = DEFAULT_POLICY, o3_limit: int = DEFAULT_O3_LIMIT, replacement: str = "lru", *, learn: bool = False,
    wait_bound_s: Seconds = DEFAULT_WAIT_BOUND_S,
) -> Header:  # fmt: skip
    """Return the options of an engine for simulations: unbounded queues, and constant profiles unless *learn*."""
    return Header(
        policy=policy, o3_limit=o3_limit, replacement=replacement, max_queue=UNBOUNDED, learn=learn,
        wait_bound_s=wait_bound_s,
    )  # fmt: skip


def simulate(
    workload: Workload,
    header: Header | None = None,
    *,
    noise: Noise | None = None,
    observer: Observer | None = None,
    progress: Callable[[int], object] | None = None,
    explain: int | None = None,
) -> tuple[Record, Report]:
    """
    Run *workload* through a new engine. *explain*: a call, by its index; see `Record.explanation`.

    :raises InvalidSpec: there is no such policy or replacement order
    """
    engine = (header or engine_header()).engine()
    if explain is not None:
        engine.remember(max(1, len(workload)))
    record = Simulation(workload, engine, noise=noise, observer=observer, progress=progress).run()
    if explain is not None:
        record.explanation = engine.explain(CallId(str(explain)), record.end_s)
    return record, report(record, engine.policy.name)
