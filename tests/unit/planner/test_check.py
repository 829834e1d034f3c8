"""What a plan cannot ask for: each gets one line that says which replica, and why."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpufaas_core.constraints import COMPUTE, NOT_CAPPED, TIME_SLICING, Constraint
from gpufaas_core.errors import BadPlan
from gpufaas_core.model import Device, DeviceId, Function, FunctionId, Need, Profile, Replica
from gpufaas_core.units import GiB
from gpufaas_planner.check import check

A, B = DeviceId("n1/a"), DeviceId("n1/b")
DEVICES = (
    Device(A, "gpu", 8 * GiB, {"zone": "east"}),
    Device(B, "gpu", 8 * GiB, {COMPUTE: NOT_CAPPED}, compute=80),
)
AUTO = Need(sharing="auto", slots=4, batch_max=8, batch_wait_s=0.01)


def _function(name: str, need: Need = AUTO, size: int = 2 * GiB, **more: Any) -> Function:
    return Function(FunctionId(f"{name}@1"), "d", need, {"*": Profile(1.0, 0.1, size)}, **more)


FUNCTIONS = {
    each.id.partition("@")[0]: each
    for each in (
        _function("one.ns"),
        _function("two.ns"),
        _function("large.ns", size=7 * GiB),
        _function("spatial.ns", Need(compute=50, sharing="spatial")),
        _function("exclusive.ns", Need(slots=2)),
        _function("time.ns", Need(sharing="time", slots=2)),
        _function("held.ns", Need(compute=20, sharing="share")),
        _function("cpu.ns", Need(compute=0)),
        _function("east.ns", constraints=(Constraint("zone", "east"),)),
        _function("twice.ns", Need(compute=50), min_copies=2),
        _function("once.ns", Need(compute=50), max_copies=1),
    )
}


def _check(*replicas: Replica) -> None:
    check(replicas, FUNCTIONS, DEVICES)


@pytest.mark.parametrize(
    "plan",
    [
        (),
        (Replica("one.ns", A, 40, slots=2, batch=4, wait_s=0.02), Replica("two.ns", A, 60)),
        (Replica("one.ns", A, wait_s=0.0), Replica("one.ns", B, reserve=80, wait_s=0.0)),
        (Replica("spatial.ns", A, reserve=100), Replica("spatial.ns", B)),
        (Replica("exclusive.ns", A, slots=2),),
        (Replica("east.ns", A), Replica("twice.ns", A), Replica("twice.ns", B), Replica("once.ns", B)),
    ],
)
def test_plans_that_can_be(plan: tuple[Replica, ...]) -> None:
    _check(*plan)


@pytest.mark.parametrize(
    ("replica", "why"),
    [
        (Replica("on.ns", A), "there is no such function: did you mean one.ns?"),
        (Replica("no.ns", A), "there is no such function: deploy it first"),
        (Replica("zebra", A), "there is no such function: deploy it first"),
        (Replica("one.ns", DeviceId("n9/a")), "there is no such device: there are n1/a, n1/b"),
        (Replica("held.ns", A), "its calls are not placed"),
        (Replica("cpu.ns", A), "its calls are not placed"),
        (Replica("one.ns", A, share=-1), "share -1 is not within 0 and 100, the compute of the device"),
        (Replica("one.ns", A, share=101), "share 101 is not within 0 and 100"),
        (Replica("one.ns", B, reserve=81), "reserve 81 is not within 0 and 80"),
        (Replica("one.ns", A, slots=5), r"slots 5 is not within 0 and 4, what the function declares \(gpufaas.slots\)"),
        (Replica("one.ns", A, batch=9), r"batch 9 is not within 0 and 8"),
        (Replica("time.ns", A, slots=2), "slots 2 is not within 0 and 1"),
        (Replica("one.ns", A, share=40, reserve=40), "share and reserve exclude each other"),
        (Replica("spatial.ns", A, share=40), "only functions with gpufaas.sharing auto may have a share"),
        (Replica("exclusive.ns", A, share=40), "its function is exclusive"),
        (Replica("exclusive.ns", A, reserve=40), "its function is exclusive"),
        (Replica("time.ns", A, reserve=40), "its function is time"),
        (Replica("one.ns", B, share=40), "cannot hold a copy to its share"),
        (Replica("exclusive.ns", B), "needs 100 % of the compute, and the device has 80 %"),
        (Replica("spatial.ns", A, wait_s=0.1), "wait is for batches"),
        (Replica("one.ns", A, batch=1, wait_s=0.1), "wait is for batches"),
        (Replica("one.ns", A, wait_s=-1.0), "wait -1 s is not within 0 and 10 s"),
        (Replica("one.ns", A, wait_s=float("inf")), "wait inf s is not within"),
        (Replica("one.ns", A, wait_s=float("nan")), "wait nan s is not within"),
        (Replica("east.ns", B, reserve=10), "asks for devices with zone=east"),
    ],
)
def test_a_replica_that_cannot_be(replica: Replica, why: str) -> None:
    with pytest.raises(BadPlan, match=rf"^replica 2, {replica.function} on {replica.device}: .*{why}"):
        _check(Replica("two.ns", B, reserve=1), replica)


def test_a_gpu_whose_processes_take_turns_holds_nobody_to_a_share() -> None:
    turns = replace(DEVICES[0], labels={COMPUTE: TIME_SLICING})

    with pytest.raises(BadPlan, match="cannot hold a copy to its share"):
        check([Replica("one.ns", A, share=40)], FUNCTIONS, [turns])


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ((Replica("one.ns", A), Replica("one.ns", A)), "^replica 2, one.ns on n1/a: it is there twice"),
        (
            (Replica("one.ns", A, wait_s=0.1), Replica("one.ns", B, reserve=1, wait_s=0.2)),
            "^replica 2, .* its wait is not that on n1/a",
        ),
        (
            (Replica("one.ns", A, 60), Replica("two.ns", A, 41)),
            "^the shares on n1/a are 101 % together, over its 100 %: 60 of one.ns [+] 41 of two.ns$",
        ),
        (
            (Replica("one.ns", A, 40), Replica("two.ns", A, reserve=61)),
            "^two.ns needs 61 % of n1/a while it runs, and shares hold 40 % of its 100 % for good: give it",
        ),
        (
            (Replica("one.ns", A), Replica("large.ns", A)),
            "^the replicas on n1/a need 9.0 GiB together, over its 8.0 GiB: 2.0 GiB of one.ns [+] 7.0 GiB of large.ns$",
        ),
        ((Replica("twice.ns", A),), "^twice.ns has 1 replicas, and com.openfaas.scale.min asks for 2"),
        (
            (Replica("once.ns", A), Replica("once.ns", B)),
            "^once.ns has 2 replicas, and com.openfaas.scale.max allows 1",
        ),
    ],
)
def test_replicas_that_cannot_be_together(plan: tuple[Replica, ...], why: str) -> None:
    with pytest.raises(BadPlan, match=why):
        _check(*plan)


def test_reserves_may_be_over_the_compute_together_since_their_calls_take_turns() -> None:
    _check(Replica("one.ns", A, reserve=60), Replica("two.ns", A, reserve=60))


def test_memory_counts_as_measured_and_not_below_what_is_declared() -> None:
    declared = {"one.ns": replace(FUNCTIONS["one.ns"], floor=9 * GiB)}

    with pytest.raises(BadPlan, match=r"need 9\.0 GiB together"):
        check([Replica("one.ns", A)], declared, DEVICES)


def test_a_replica_whose_device_has_gone_counts_for_the_bounds_of_its_function() -> None:
    away = Replica("twice.ns", DeviceId("n9/a"))

    check([away, Replica("twice.ns", A)], FUNCTIONS, DEVICES, in_force=[away])
    with pytest.raises(BadPlan, match=r"^replica 1, twice\.ns on n9/a: there is no such device"):
        check([away, Replica("twice.ns", A)], FUNCTIONS, DEVICES)


def test_a_function_that_was_removed_keeps_nobody_from_planning_others() -> None:
    removed = Replica("removed.ns", A)

    check([removed, Replica("one.ns", A)], FUNCTIONS, DEVICES, in_force=[removed])
