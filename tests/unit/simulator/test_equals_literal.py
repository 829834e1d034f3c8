"""
`gpufaas simulate --decisions` writes what the published scheduler decides, scanned literally, on any workload, also
where calls take other times than the scheduler is told.
"""

import json
import math
from heapq import heappop, heappush
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.scheduler import literal
from tests.unit.scheduler.world import limited

from gpufaas_cli.main import cli

TICK = 1 / 1024
"""All times are multiples of it, so that sums of floats are exact and ties are ties on both sides."""


def literally(workload: dict[str, Any], policy: str, limit: int) -> list[dict[str, Any]]:
    """The decision log by a calendar of its own and the literal scheduler."""
    functions = {
        name: literal.LiteralFunction(name, each["occupation_mb"], each["load_s"], each["infer_s"])
        for name, each in workload["functions"].items()
    }
    scheduler = literal.Literal(list(functions.values()), "lb" if policy == "lb" else "lalb", limit)
    for each in workload["devices"]:
        scheduler.join(each["id"], each["memory_mb"])
    arrivals = list(enumerate(workload["arrivals"]))
    running: list[tuple[float, int, str, str]] = []
    """When, in which order at one time, on which device, and the function that is loaded then; empty: a call ends."""
    done = 0
    while running or arrivals:
        ends, arrives = running[0][0] if running else math.inf, arrivals[0][1][0] if arrivals else math.inf
        overdue = min((scheduler.overdue_at(each) for each in scheduler.devices), default=math.inf)
        if overdue < min(ends, arrives):
            scheduler.tell(overdue)
        elif ends <= arrives:
            now, _, device, loaded = heappop(running)
            scheduler.tell(now)
            if loaded:
                scheduler.loaded(device, loaded)
            else:
                scheduler.finish(device)
        else:
            number, (now, name, *_) = arrivals.pop(0)
            scheduler.tell(now)
            scheduler.arrive(str(number), name)
        scheduler.settle()
        for decision in scheduler.decisions[done:]:
            _, name, *true_s = workload["arrivals"][int(decision.call)]
            function = functions[name]
            ready = decision.time
            if not decision.hit:
                ready += function.load_s
                heappush(running, (ready, 2 * done, decision.device, name))
            takes = true_s[0] if true_s else function.service_s
            heappush(running, (ready + takes, 2 * done + 1, decision.device, ""))
            done += 1
    return [
        {
            "t": each.time, "call": int(each.call), "device": each.device, "hit": each.hit,
            "victims": list(each.victims), "via": "local" if each.local else "global",
        }
        for each in scheduler.decisions
    ]  # fmt: skip


def simulated(workload: dict[str, Any], policy: str, limit: int) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        given, decisions = Path(folder, "w.json"), Path(folder, "d.jsonl")
        given.write_text(json.dumps(workload))
        spec = limited(policy, limit)
        args = ["simulate", "--workload", given, "--policy", spec, "--decisions", decisions, "--json"]
        result = CliRunner().invoke(cli, [*map(str, args)])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["completed"] == len(workload["arrivals"])
        return [json.loads(line) for line in decisions.read_text().splitlines()]


FUNCTIONS = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=8)
DEVICES = st.lists(st.integers(2, 16), min_size=1, max_size=6)
TRUE_TIMES = st.one_of(st.none(), st.integers(0, 20), st.integers(0, 200))
"""Of a call; None: as its function says."""
CALLS = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 1, 2, 4, 8, 16]), st.integers(0, 99), TRUE_TIMES), min_size=1, max_size=80
)


@example(  # a device is late at the moment in which one is loaded and another call ends
    functions=[(1, 26, 19), (1, 24, 20), (1, 4, 17)],
    devices=[2, 2, 2, 2, 2],
    calls=[
        (0, 1, 45), (2, 1, None), (2, 0, None), (0, 0, None), (0, 2, None), (0, 0, None), (0, 0, None), (0, 1, None),
        (0, 2, None), (0, 0, None), (0, 0, None),
    ],
    policy="lalb",
    limit=0,
)  # fmt: skip
@examples(300)
@given(FUNCTIONS, DEVICES, CALLS, st.sampled_from(["lb", "lalb", "lalb-o3"]), st.sampled_from([0, 1, 2, 5, 25]))
def test_decisions_are_those_of_the_literal_scan(
    functions: list[tuple[int, int, int]],
    devices: list[int],
    calls: list[tuple[int, int, int | None]],
    policy: str,
    limit: int,
) -> None:
    largest = max(devices)
    now = 0.0
    arrivals = []
    for gap, function, true in calls:
        now += gap * TICK
        arrivals.append([now, f"f{function % len(functions)}", *([] if true is None else [true * TICK])])
    workload = {
        "devices": [{"id": f"g{i}", "memory_mb": memory} for i, memory in enumerate(devices)],
        "functions": {
            f"f{i}": {"occupation_mb": min(size, largest), "load_s": load * TICK, "infer_s": service * TICK}
            for i, (size, load, service) in enumerate(functions)
        },
        "arrivals": arrivals,
    }

    expected = literally(workload, policy, limit if policy == "lalb-o3" else 0)

    assert simulated(workload, policy, limit) == expected
