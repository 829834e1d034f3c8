"""The short API of the simulator: from a workload and a policy to a record and a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpufaas_core.model import CallId
from gpufaas_scheduler.journal import Header
from gpufaas_scheduler.policies import DEFAULT_POLICY, PolicySpec, policy_spec
from gpufaas_simulator.nodes import Noise
from gpufaas_simulator.record import Record
from gpufaas_simulator.report import Report, report
from gpufaas_simulator.simulation import Simulation
from gpufaas_simulator.timeline import Observer
from gpufaas_simulator.workload import UNBOUNDED, Workload


def engine_header(policy: PolicySpec | str = DEFAULT_POLICY, *, learn: bool = False) -> Header:
    """Return the options of an engine for simulations: unbounded queues, and constant profiles unless *learn*."""
    spec = policy_spec(policy) if isinstance(policy, str) else policy
    return Header(policy=spec, max_queue=UNBOUNDED, learn=learn)


def simulate(
    workload: Workload,
    header: Header | None = None,
    *,
    noise: Noise | None = None,
    observers: Sequence[Observer] = (),
    progress: Callable[[int], object] | None = None,
    explain: int | None = None,
) -> tuple[Record, Report]:
    """
    Run *workload* through a new engine. *explain*: a call, by its index; see `Record.explanation`.

    :raises InvalidSpec: see `gpufaas_scheduler.policies.make_policy`
    """
    simulation = simulation_of(workload, header or engine_header(), noise, observers)
    engine = simulation.engine
    if explain is not None:
        engine.remember(max(1, len(workload)))
    record = simulation.run(progress)
    if explain is not None:
        record.explanation = engine.explain(CallId(str(explain)), record.end_s)
    return record, report(record, engine.policy.name)


def simulation_of(
    workload: Workload, header: Header, noise: Noise | None = None, observers: Sequence[Observer] = ()
) -> Simulation:
    """Return a simulation that has not begun, with a new engine."""
    solve = None
    if workload.planner is not None:
        from gpufaas_scheduler.solving import solver

        solve = solver(workload.planner.solver).solve
    return Simulation(workload, header.engine(), noise=noise, observers=observers, solve=solve)
