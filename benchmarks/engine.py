"""
What one call costs the engine: arrival, start and completion, in microseconds, against queue length and devices.

    python benchmarks/engine.py [--json [FILE]] [--policy lalb-o3] [--calls 20000] [--base TREE]

The global queue is held at its length (calls arrive as others leave it), devices are all busy, functions are drawn by
Zipf's law, six or seven models are resident per device, and a scheduling run follows each completion. Durations are
drawn from the profiles of GPU-FaaS's table 1 and only their order matters: nothing waits for them here. The last rows
are the other path, CPU functions with slots, which meet no policy: one call at a time, as an echo benchmark makes them,
against the number of the function's copies on the device.

--base: the medians, and their mean, beside those of another working tree's engine (`_base.py`); each run is a process
of its own. A step waits for nothing, so its median is processor time: what the kernel cut in two is in the tail.
"""

import argparse
import contextlib
import functools
import gc
import platform
import random
import sys
from heapq import heappop, heappush
from itertools import accumulate, cycle
from pathlib import Path
from statistics import quantiles
from time import perf_counter_ns

from _base import aside, measure, options_of, pairs_of
from _pairs import CPU, Row, write_json
from _started import code
from rich.console import Console
from rich.table import Table

from gpufaas_cache_manager.replacement import Lru
from gpufaas_core.messages import (
    Arrived,
    Command,
    DeviceJoined,
    Finished,
    FunctionDeployed,
    Grant,
    LoadCopy,
    Loaded,
    Scaled,
    StartCall,
)
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Need, Profile
from gpufaas_core.units import GiB, MiB
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import POLICIES, make_policy

QUEUES = (100, 1_000, 10_000, 100_000)
DEVICES = (2, 100, 1_000)
FUNCTIONS_PER_DEVICE = {2: 30, 100: 300, 1_000: 1_000}
"""More than fit on few devices, so that there are misses; on 1,000 the popular ones have hundreds of copies."""
SEED = 7
COPIES = (1, 10, 100)
TARGET_US = {2: 20.0, 1_000: 50.0}
FLAT = 1.5


class Bench:
    """A cluster that is always busy, and a queue that is always as long."""

    def __init__(self, policy: str, queue: int, devices: int) -> None:
        self.rng = random.Random(SEED)
        self.engine = Engine(policy=make_policy(policy), replacement=Lru(), max_queue=1 << 30, learn=True)
        self.queue = queue
        functions = FUNCTIONS_PER_DEVICE[devices]
        # Sizes and times about those of table 1: 1.3 to 3.9 GB, 2.3 to 4.4 s to load, 1.3 s to serve.
        self.profiles = {
            FunctionId(f"f{i}"): Profile(
                2.3 + 2.1 * self.rng.random(), 1.2 + 0.2 * self.rng.random(), self.rng.randrange(1300, 3900) * MiB
            )
            for i in range(functions)
        }
        names = list(self.profiles)
        weights = list(accumulate((i + 1) ** -0.9 for i in range(functions)))
        self.drawn = cycle(self.rng.choices(names, cum_weights=weights, k=200_000))
        for name, profile in self.profiles.items():
            function = Function(name, "", profiles={"*": profile}, max_queue=1 << 30)
            self.engine.handle(FunctionDeployed(function), 0.0)
        for i in range(devices):
            self.engine.handle(DeviceJoined(Device(DeviceId(f"n{i}/cuda:0"), "gpu", 16 * GiB)), 0.0)
        self.number = 0
        self.running: list[tuple[float, int, Grant | LoadCopy]] = []
        self.cold = 0
        while len(self.running) < devices or self.engine.queue_length < queue:
            self.arrive(0.0)

    def arrive(self, now: float) -> int:
        """Return the nanoseconds that it took."""
        self.number += 1
        event = Arrived(CallId(f"c{self.number}"), next(self.drawn))
        before = perf_counter_ns()
        commands = self.engine.handle(event, now)
        took = perf_counter_ns() - before
        self.obey(commands, now)
        return took

    def finish(self) -> tuple[int, float]:
        """End the call that ends next; return the nanoseconds that it took, and when that was."""
        now, _, grant = heappop(self.running)
        while isinstance(grant, LoadCopy):  # a policy's own: in no call's life, so not in the figure
            load_s = self.profiles[grant.function].load_s
            self.obey(self.engine.handle(Loaded(grant.function, grant.device, load_s, 0, grant.copy), now), now)
            now, _, grant = heappop(self.running)
        profile = self.profiles[grant.function]
        if grant.cold:  # not in every call's life, so not in the figure
            self.obey(self.engine.handle(Loaded(grant.function, grant.device, profile.load_s, 0, grant.copy), now), now)
        # Fields, not properties: what is counted here is the engine.
        event = Finished(grant.calls[0], grant.parts[0].device, profile.service_s)
        before = perf_counter_ns()
        commands = self.engine.handle(event, now)
        took = perf_counter_ns() - before
        self.obey(commands, now)
        return took, now

    def obey(self, commands: list[Command], now: float) -> None:
        for command in commands:
            if isinstance(command, LoadCopy):
                heappush(self.running, (now + self.profiles[command.function].load_s, command.number, command))
                continue
            assert isinstance(command, StartCall)
            grant = command.grant
            profile = self.profiles[grant.function]
            took = profile.service_s * (0.9 + 0.2 * self.rng.random()) + (profile.load_s if grant.cold else 0.0)
            heappush(self.running, (now + took, grant.number, grant))
            self.cold += grant.cold

    def measure(self, calls: int) -> tuple[list[float], float]:
        """Return the microseconds of each of *calls*, arrival and completion together, and the share of misses."""
        arrivals: list[int] = []
        completions: list[int] = []
        self.cold = 0
        while len(arrivals) < calls or len(completions) < calls:
            took, now = self.finish()
            completions.append(took)
            while self.engine.queue_length < self.queue:
                arrivals.append(self.arrive(now))
        took_us = [(a + c) / 1000 for a, c in zip(arrivals, completions, strict=False)]
        return took_us, self.cold / len(completions)


def shared_path(calls: int, copies: int = 1) -> list[float]:
    """A CPU function with slots, resident in so many *copies*: arrival and completion of one call at a time."""
    engine = Engine(policy=make_policy("lalb-o3"), replacement=Lru())
    echo = FunctionId("echo.default@1")
    device = DeviceId("n/cpu:0")
    engine.handle(DeviceJoined(Device(device, "cpu", 8 * GiB)), 0.0)
    profile = Profile(0.1, 0.001, 64 * MiB)
    engine.handle(FunctionDeployed(Function(echo, "", need=Need(0, slots=16), profiles={"*": profile})), 0.0)
    engine.handle(Arrived(CallId("first"), echo), 0.0)
    engine.handle(Loaded(echo, device, 0.1, 0), 0.1)
    engine.handle(Finished(CallId("first"), device, 0.001), 0.1)
    loads = engine.handle(Scaled(echo, copies), 0.1)
    while loads:
        load = loads.pop()
        assert isinstance(load, LoadCopy)
        loads += engine.handle(Loaded(echo, device, 0.1, 0, load.copy), 0.1)
    assert len(engine.status(0.1).devices[0].resident) == copies
    took = []
    for i in range(calls):
        call = CallId(f"c{i}")
        before = perf_counter_ns()
        engine.handle(Arrived(call, echo, 1e9), 1.0)
        engine.handle(Finished(call, device, 0.001), 1.0)
        took.append((perf_counter_ns() - before) / 1000)
    return took


def medians(tree: Path, options: argparse.Namespace) -> Row:
    """Return the median of each cell by the engine of *tree*, and their mean."""
    found = aside(tree, "--policy", options.policy, "--calls", str(options.calls))
    cells = {f"{row['devices']} devices, queue of {row['queue']}": row["median_us"] for row in found["rows"]}
    cells |= {f"a CPU function, {row['copies']} copies": row["median_us"] for row in found["shared"]}
    return {CPU: sum(cells.values()) / len(cells), **cells}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", nargs="?", const=True, type=Path, metavar="FILE", help="instead of a table")
    arguments.add_argument("--policy", choices=sorted(POLICIES), default="lalb-o3")
    arguments.add_argument("--calls", type=int, default=20_000, help="calls measured per row")
    options = options_of(arguments)
    if options.base:
        pairs = pairs_of(options)
        part = functools.partial(medians, options=options)
        measure(pairs, options, {f"{options.policy}, a call": part}, contextlib.nullcontext)
        return pairs.finish(options)
    rows = []
    gc.disable()  # as the service does on its hot path: collect between, not during
    for devices in DEVICES:
        for queue in QUEUES:
            bench = Bench(options.policy, queue, devices)
            bench.measure(options.calls // 4)
            took, cold = bench.measure(options.calls)
            cuts = quantiles(took, n=100)
            rows.append(
                {
                    "devices": devices, "queue": queue, "median_us": cuts[49], "p99_us": cuts[98],
                    "mean_us": sum(took) / len(took), "miss_ratio": cold,
                }
            )  # fmt: skip
            del bench
            gc.collect()
    shared = {copies: quantiles(shared_path(options.calls, copies), n=100) for copies in COPIES}
    flat = {
        devices: max(mine) / min(mine)
        for devices in DEVICES
        for mine in [[row["median_us"] for row in rows if row["devices"] == devices]]
    }
    if options.json:
        machine = {"machine": platform.machine(), "python": platform.python_version(), "seed": SEED}
        shared_rows = [{"copies": n, "median_us": cuts[49], "p99_us": cuts[98]} for n, cuts in shared.items()]
        found = {**machine, "code": code(), "policy": options.policy, "rows": rows, "flat": flat, "shared": shared_rows}
        write_json(found, options.json)
    else:
        table = Table("devices", "queue", "median µs", "p99 µs", "mean µs", "misses", title=f"{options.policy}, a call")
        for row in rows:
            table.add_row(
                f"{row['devices']:,}", f"{row['queue']:,}", f"{row['median_us']:.1f}", f"{row['p99_us']:.1f}",
                f"{row['mean_us']:.1f}", f"{row['miss_ratio']:.1%}",
            )  # fmt: skip
        table.add_section()
        for copies, cuts in shared.items():
            what = f"{copies} {'copy' if copies == 1 else 'copies'}"
            table.add_row(what, "0", f"{cuts[49]:.1f}", f"{cuts[98]:.1f}", "", "0.0%")
        Console().print(table)
        for devices in DEVICES:
            worst = max(row["median_us"] for row in rows if row["devices"] == devices)
            target = TARGET_US.get(devices)
            said = "" if target is None else f", target {target:.0f}: {'met' if worst <= target else 'MISSED'}"
            print(
                f"{devices:>5,} devices: worst median {worst:.1f} µs{said}; longest against shortest queue "
                f"{flat[devices]:.2f}x, target {FLAT}x: {'met' if flat[devices] <= FLAT else 'MISSED'}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
