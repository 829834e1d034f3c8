"""
Does the simulator do what the platform does? The same calls, live on CPU devices, and simulated from what was learnt.

    python benchmarks/live_agreement.py [--minutes 4] [--load 0.15] [--seed 1] [--out docs/evaluation.md]

Two CPU devices with one torch thread each, on which not all of the models fit. First two callers keep both devices
busy, each going through the functions in an order of its own: what that costs is in the journal. Then the platform is
started again on the same data, with empty devices, and Poisson calls are sent to it, open loop; the simulator gets the
same calls, the sizes that the scheduler knew by then, and the mean times of the first part. Compared are hit or miss,
call by call, and the mean latency, over HTTP and of the whole.
"""

import argparse
import asyncio
import json
import os
import platform as machine
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
from _document import table, write_part
from _platform import ROOT, gpufaas, platform
from rich.console import Console

from gpufaas import Client
from gpufaas_core import local_login
from gpufaas_core.cost import Cost
from gpufaas_core.files import remove_tree
from gpufaas_scheduler.policies import DEFAULT_POLICY
from gpufaas_simulator import synthetic
from gpufaas_simulator.record import COMPLETED, HIT, Record
from gpufaas_simulator.recorded import Recorded, read_journal
from gpufaas_simulator.replay import Endpoint, Replayed, replay
from gpufaas_simulator.report import Report
from gpufaas_simulator.run import simulate
from gpufaas_simulator.workload import SimulatedFunction, Workload, arrivals

MODELS = ("resnet50", "densenet121", "resnet18", "vgg11", "vgg16")
"""Most called first. All of them fit the two devices, and not one of them."""
MEMORY_MIB = 1000
SIZE = 256
"""Pixels, so that the quickest model takes over 50 ms on one thread."""
ROUNDS = 5
AGREE, WITHIN = 0.95, 0.20


@contextmanager
def served(home: Path, journal: Path, policy: str) -> Iterator[str]:
    devices = [part for number in (0, 1) for part in ("--device", f"cpu:{number}={MEMORY_MIB}MiB")]
    with platform("--journal", str(journal), "--policy", policy, *devices, home=home) as (url, *_):
        yield url


def deploy(url: str, home: Path) -> None:
    examples = home / "examples"
    shutil.copytree(ROOT / "functions" / "examples", examples, ignore=shutil.ignore_patterns("build"))
    for model in MODELS:
        gpufaas(url, "up", "-f", str(examples / "stack.yaml"), "--filter", model, cwd=examples)


def keep_busy(url: str, body: bytes, rounds: int) -> None:
    """Two callers, each with one call at a time: both devices are busy, and models come and go."""

    def caller(seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=url, auth=local_login.find(url), timeout=120) as http:
            for _ in range(rounds):
                for model in rng.sample(MODELS, len(MODELS)):
                    for _ in range(2):  # a miss, perhaps, and a hit
                        http.post(f"/function/{model}", content=body).raise_for_status()

    callers = [threading.Thread(target=caller, args=(seed,)) for seed in (1, 2)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()


def named_costs(recorded: Recorded) -> dict[str, Cost]:
    """What was measured on the CPU devices, by the name of the function."""
    return {
        each.name.partition(".")[0]: cost
        for each in recorded.workload.functions
        if (cost := each.cost("cpu")) is not None
    }


def drawn(costs: dict[str, Cost], load: float, minutes: float, seed: int, devices: Workload) -> Workload:
    """Poisson calls, so many that inference alone keeps the devices busy for *load*."""
    rng = random.Random(seed)
    weights = synthetic.popularity(len(MODELS), synthetic.DEFAULT_SKEW)
    service_s = sum(w * costs[model].service_s for w, model in zip(weights, MODELS, strict=True)) / sum(weights)
    per_s = load * len(devices.devices) / service_s
    pairs: list[tuple[float, int]] = []
    time = rng.expovariate(per_s)
    while time < 60 * minutes:
        pairs.append((time, rng.choices(range(len(MODELS)), weights=weights)[0]))
        time += rng.expovariate(per_s)
    times, calls = arrivals(pairs)
    functions = [SimulatedFunction(model, {"*": costs[model]}) for model in MODELS]
    return replace(devices, functions=functions, times=times, calls=calls, changes=(), name="live agreement")


def compare(live: Record, simulated: Record) -> tuple[float, list[list[str]], int]:
    """Return the share of calls with the same fate, rows by function, and how many calls were compared."""
    names = [each.name for each in live.workload.functions]
    both = [
        index
        for index in range(len(live.workload))
        if live.outcome[index] == simulated.outcome[index] == COMPLETED
    ]  # fmt: skip

    def hit(record: Record, index: int) -> bool:
        return record.start[index] == HIT

    def mean_ms(record: Record, of: list[int]) -> float:
        return 1000 * sum(record.ended[index] - live.workload.times[index] for index in of) / max(1, len(of))

    rows = []
    for function, name in enumerate(names):
        mine = [index for index in both if live.workload.calls[index] == function]
        same = sum(hit(live, index) == hit(simulated, index) for index in mine)
        rows.append([
            name, str(len(mine)), f"{sum(not hit(live, index) for index in mine)}",
            f"{sum(not hit(simulated, index) for index in mine)}", f"{100 * same / max(1, len(mine)):.1f} %",
            f"{mean_ms(live, mine):.0f}", f"{mean_ms(simulated, mine):.0f}",
        ])  # fmt: skip
    same = sum(hit(live, index) == hit(simulated, index) for index in both)
    return same / max(1, len(both)), rows, len(both)


def document(
    workload: Workload, costs: dict[str, Cost], live: Replayed, simulated: Report, agree: float, rows: list[list[str]],
    policy: str, busy_before: float,
) -> str:  # fmt: skip
    live_ms, simulated_ms = 1000 * live.report.latency.mean, 1000 * simulated.latency.mean
    off = simulated_ms / live_ms - 1
    verdict = "met" if agree >= AGREE and abs(off) <= WITHIN else "**not met**"
    profiles = [
        [model, f"{cost.occupation / 2**20:.0f}", f"{1000 * cost.load_s:.0f}", f"{1000 * cost.service_s:.0f}"]
        for model, cost in costs.items()
    ]
    totals = [[
        "all", str(live.report.completed), str(live.report.misses), str(simulated.misses),
        f"**{100 * agree:.1f} %**", f"**{live_ms:.0f}**", f"**{simulated_ms:.0f}** ({100 * off:+.1f} %)",
    ]]  # fmt: skip
    others = "" if busy_before <= 2 * (os.cpu_count() or 1) else (
        "\n\nOther programs kept the machine busy at times: what a call took differs by more than the\n"
        "simulator is told, and where calls overlap otherwise, other models stay. To be repeated on a quiet machine."
    )  # fmt: skip
    headings = [
        "function",
        "calls",
        "misses, live",
        "simulated",
        "hit or miss agrees",
        "mean latency, ms, live",
        "simulated",
    ]
    return f"""
## Live agreement

```console
$ python benchmarks/live_agreement.py
```

The same {len(workload)} calls, sent over HTTP to `gpufaas serve` with two CPU devices of {MEMORY_MIB} MiB, and
simulated from profiles that were learnt there beforehand, while both devices were busy. One torch thread per worker;
Poisson calls over {workload.times[-1]:.0f} s; policy `{policy}`; empty devices at the start of both. Devices were busy
for {100 * live.report.busy_ratio:.0f} % of the time live, {100 * simulated.busy_ratio:.0f} % simulated. Python
{machine.python_version()}, {os.cpu_count()} cores; the load average was {busy_before:.1f} when the calls began, and
they were sent at most {1000 * live.late_s:.0f} ms late.

{table(headings, rows + totals)}

At least 95 % of hits and misses the same, and mean latency within 20 %: {verdict}. The live p99 is
{live.report.latency.p99:.2f} s, the simulated one {simulated.latency.p99:.2f} s.{others}

The profiles that were learnt, means of the first part:

{table(["function", "reservation, MiB", "load, ms", "call, ms"], profiles)}
"""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--minutes", type=float, default=4.0)
    arguments.add_argument("--load", type=float, default=0.15, help="share of device time for inference")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--policy", default=DEFAULT_POLICY)
    arguments.add_argument("--out", type=Path, default=ROOT / "docs" / "evaluation.md")
    options = arguments.parse_args()

    console = Console(stderr=True)
    body = json.dumps({"seed": 7, "size": SIZE}).encode()
    home = Path(tempfile.mkdtemp(prefix="gpufaas-agreement-"))
    try:
        first, second = home / "first.jsonl", home / "second.jsonl"
        with served(home, first, options.policy) as url:
            with console.status("building and deploying"):
                deploy(url, home)
            with console.status("learning profiles"):
                keep_busy(url, body, 1)  # what each needs is measured in its first calls
                keep_busy(url, body, ROUNDS)
        learnt = read_journal(first)
        costs = named_costs(learnt)
        busy_before = os.getloadavg()[0]
        with served(home, second, options.policy) as url:
            # The devices are those of the platform; sizes are what its scheduler knows by now.
            workload = drawn(costs, options.load, options.minutes, options.seed, learnt.workload)
            with console.status(f"replaying {len(workload)} calls over {workload.times[-1]:.0f} s"):
                live = asyncio.run(replay(workload, Endpoint(url, body, authorization=Client(url).authorization)))
        recorded = read_journal(second)
        sizes = {name: cost.occupation for name, cost in named_costs(recorded).items()}
        functions = [
            replace(each, costs={"*": replace(each.costs["*"], occupation=sizes[each.name])})
            for each in workload.functions
        ]  # fmt: skip
        record, simulated = simulate(replace(workload, functions=functions), recorded.header)
        agree, rows, compared = compare(live.record, record)
        text = document(workload, costs, live, simulated, agree, rows, options.policy, busy_before)
        write_part(options.out, "benchmarks/live_agreement.py", text)
        off = simulated.latency.mean / live.report.latency.mean - 1
        print(
            f"{compared} of {len(workload)} calls compared: hit or miss agrees for {agree:.1%}, mean latency "
            f"{live.report.latency.mean:.3f} s live, {simulated.latency.mean:.3f} s simulated ({off:+.1%})"
        )
        for what, count in live.errors.items():
            print(f"{count} calls: {what}")
        return 0 if agree >= AGREE and abs(off) <= WITHIN else 1
    finally:
        remove_tree(home)


if __name__ == "__main__":
    sys.exit(main())
