"""
A swap storm: 20 models take turns on devices that have room for 8, with Poisson calls of Zipf popularity, open loop.

    python benchmarks/swap.py [--calls 400] [--rounds 2] [--load 0.65] [--skew 1] [--size 64] [--seed 1]
                              [--sleep MS] [--base TREE] [--serve OPTIONS] [--json]

Two CPU devices, each with room for four of the models and one torch thread for each worker. What it says:

- what a miss adds beyond load and forward: of its time, all but waiting in the queue, the load itself and the run;
- misses, beside those of an ideal LRU list of eight, which gets the same requests one by one, and those if it is known
  beforehand what is called most: each device keeps such models, and has one place for the others;
- the mean latency;
- memory: what the engine reserves, and what the kernel says that the workers hold, at most, against the devices'.

The rate: runs, and the loads of the ideal LRU's misses, as they take by hand in two forks of a process with torch at
once, would keep both devices busy for --load of the time. So it does not depend on the platform. --sleep: a run is so
many ms of sleep and one look at the weights, as where a device computes and leaves the processors free. --base: the
platform of another working tree, in turn with this one; same models, same requests. --serve: more
options of `gpufaas serve` for this tree's.
"""

import argparse
import asyncio
import contextlib
import json
import random
import shlex
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
from _base import working_tree
from _platform import ROOT, gpufaas, platform
from _starts import BODY, MiB, beyond_load_and_run, by_hand, phases, write_layers
from rich.console import Console
from rich.table import Table

from gpufaas_core import local_login

MODELS, DEVICES, ROOM = 20, 2, 4
ADDS_MS, MISSES = 25.0, 0.24
"""The bars. And: fewer misses than the ideal LRU, memory within the devices; against --base, 0.8 times the latency."""
WATCH_S = 1.0
NAMES: Final = [f"m{index:02}" for index in range(MODELS)]


def requests(calls: int, skew: float, rng: random.Random) -> list[int]:
    """Return the model of each call, by rank."""
    weights = list(accumulate((rank + 1) ** -skew for rank in range(MODELS)))
    return rng.choices(range(MODELS), cum_weights=weights, k=calls)


def lru_misses(sequence: Sequence[int], room: int, before: Sequence[int] = ()) -> int:
    """Return how often an LRU list of *room* models lacks the next one. *before* was called before, and not counted."""
    held: dict[int, None] = {}
    misses = 0
    for place, model in enumerate((*before, *sequence)):
        misses += model not in held and place >= len(before)
        held.pop(model, None)
        held[model] = None
        if len(held) > room:
            del held[next(iter(held))]
    return misses


def kept_misses(sequence: Sequence[int], devices: int, room: int) -> int:
    """Return how often the next model lacks if each device keeps the most called, and one place for the others."""
    kept = {model for model, _ in Counter(sequence).most_common(devices * (room - 1))}
    return lru_misses([model for model in sequence if model not in kept], devices)


@dataclass
class Replayed:
    """What came of one replay."""

    latencies: list[float] = field(default_factory=list)
    adds: list[float] = field(default_factory=list)
    """Of each miss: what it took beyond waiting, load and run."""
    starts: dict[str, int] = field(default_factory=dict)
    by_phase: dict[str, list[float]] = field(default_factory=dict)
    """The figures are those of the misses."""
    late_s: float = 0.0
    reserved: float = 0.0
    held: float = 0.0
    """The largest shares of a device's memory: by the engine, and by the kernel's account of the workers."""


async def replay(url: str, sequence: Sequence[int], times: Sequence[float]) -> Replayed:
    found = Replayed()
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, auth=local_login.find(url), timeout=120, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        began = time.perf_counter()

        async def call(model: int) -> None:
            sent = time.perf_counter()
            response = await client.post(f"/function/{NAMES[model]}", content=BODY)
            took = time.perf_counter() - sent
            assert response.status_code == 200, response.text
            start = response.headers["x-gpufaas-start"]
            found.latencies.append(took)
            found.starts[start] = found.starts.get(start, 0) + 1
            if start != "hit":
                by_phase = phases(response)
                found.adds.append(beyond_load_and_run(took, by_phase))
                for name, seconds in by_phase.items():
                    found.by_phase.setdefault(name, []).append(seconds)

        for model, at in zip(sequence, times, strict=True):
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            found.late_s = max(found.late_s, time.perf_counter() - began - at)
            group.create_task(call(model))
    return found


def held_by(pid: int) -> int:
    """Return the bytes of a worker: private pages that it wrote, and its pages of weights, mapped or staged."""
    held = 0
    weights = False
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps") as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                weights = "weights.safetensors" in rest or "/memfd:" in rest
            elif name == "Private_Dirty:" or (weights and name in ("Private_Clean:", "Shared_Clean:", "Shared_Dirty:")):
                held += 1024 * int(rest.split()[0])
    return held


def held_by_workers(pid: int) -> dict[str, int]:
    """Return the bytes that the workers of the platform with process *pid* hold, by device."""
    held: dict[str, int] = {}
    for each in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            device = each.name().partition(" ")[0]
            if device.startswith("cpu:") and each.status() != psutil.STATUS_STOPPED:  # parked: in the host tier
                held[device] = held.get(device, 0) + held_by(each.pid)
    return held


@contextlib.contextmanager
def watched(url: str, pid: int, memory: int, found: Replayed, held: Callable[[int], dict[str, int]]) -> Iterator[None]:
    """Watch the devices of a platform: what they hold of *memory*, by its engine and by the kernel or driver."""
    over = threading.Event()

    def look() -> None:
        with httpx.Client(base_url=url, auth=local_login.find(url), timeout=30) as client:
            while not over.wait(WATCH_S):
                status = client.get("/system/status").json()
                found.reserved = max(found.reserved, *(each["used"] / memory for each in status["devices"]))
                found.held = max([found.held, *(each / memory for each in held(pid).values())])

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def deploy(url: str, source: Path, names: Sequence[str], tree: Path) -> None:
    functions = {
        name: {
            "lang": "python3-torch", "handler": str(source / name), "image": f"{name}:latest",
        } for name in names
    }  # fmt: skip
    stack = {"version": "1.0", "provider": {"name": "openfaas"}, "functions": functions}
    with tempfile.TemporaryDirectory(prefix="gpufaas-swap-") as home:
        (Path(home) / "stack.yaml").write_text(json.dumps(stack))
        gpufaas(url, "up", cwd=Path(home), tree=tree)


def occupation(source: Path, tree: Path, options: Sequence[str], device: str = "cpu:0=2GiB") -> int:
    """Return what *tree* reserves for one of the models once it has run."""
    with platform("--device", device, *options, tree=tree) as (url, _, _):
        deploy(url, source, NAMES[:1], tree)
        for _ in range(3):
            httpx.post(f"{url}/function/{NAMES[0]}", content=BODY, timeout=120).raise_for_status()
            time.sleep(0.5)
        (resident,) = httpx.get(f"{url}/system/status", auth=local_login.find(url)).json()["devices"][0]["resident"]
        return int(resident["memory"])


@dataclass(frozen=True)
class Storm:
    """What all platforms get."""

    source: Path
    sequence: Sequence[int]
    times: Sequence[float]
    devices: int = DEVICES
    room: int = ROOM
    kind: str = "cpu"
    held: Callable[[int], dict[str, int]] = held_by_workers

    def over(self, tree: Path, options: Sequence[str], room: int) -> Replayed:
        """Have the platform of *tree* meet the storm, on devices with *room* bytes for each model that has room."""
        memory = room * self.room + room // 2
        devices = [
            part for index in range(self.devices) for part in ("--device", f"{self.kind}:{index}={memory // MiB}MiB")
        ]
        with platform(*devices, *options, tree=tree) as (url, child, _):
            deploy(url, self.source, NAMES, tree)
            for name in reversed(NAMES):  # what each needs is measured, and the first ones are there
                httpx.post(f"{url}/function/{name}", content=BODY, timeout=120).raise_for_status()
            time.sleep(2.0)
            watch = Replayed()
            with watched(url, child.pid, memory // MiB * MiB, watch, self.held):
                found = asyncio.run(replay(url, self.sequence, self.times))
        found.reserved, found.held = watch.reserved, watch.held
        return found


def storm(
    source: Path, options: argparse.Namespace, devices: int = DEVICES, room: int = ROOM, device: str = "cpu"
) -> tuple[Storm, dict[str, float]]:
    """Write the models, measure them by hand, and draw the requests."""
    for index, name in enumerate(NAMES):
        rows = 1 if options.sleep else 128
        write_layers(source / name, options.size, width=2048, rows=rows, seed=index, sleep_s=options.sleep / 1e3)
        handler = source / name / "handler.py"
        handler.write_text(f"import torch\n\ntorch.set_num_threads(1)\n{handler.read_text()}")
    with by_hand(1, device) as one, by_hand(1, device) as other, ThreadPoolExecutor(2) as at_once:
        halves = at_once.map(
            lambda hand, names: [hand.start(source / name)[0] for name in names],
            (one, other),
            (NAMES[::2], NAMES[1::2]),
        )
        every = [each for half in halves for each in half]
    quick = {key: statistics.median(each[key] for each in every) for key in every[0]}
    rng = random.Random(options.seed)
    sequence = requests(options.calls, options.skew, rng)
    ideal = lru_misses(sequence, devices * room, range(MODELS - 1, -1, -1)) / len(sequence)
    busy_s = quick["again"] + ideal * (quick["all"] - quick["again"])
    rate = options.load * devices / busy_s
    times = list(accumulate(rng.expovariate(rate) for _ in sequence))
    kept = kept_misses(sequence, devices, room) / len(sequence)
    facts = {
        "ideal_lru": ideal,
        "most_called_kept": kept,
        "by_hand_all_ms": 1e3 * quick["all"],
        "by_hand_run_ms": 1e3 * quick["again"],
    }
    return Storm(source, sequence, times, devices, room), {**facts, "calls_per_s": rate}


def summary(replayed: list[Replayed]) -> dict[str, Any]:
    latencies = [each for of in replayed for each in of.latencies]
    adds = [each for of in replayed for each in of.adds]
    names = list(dict.fromkeys(name for of in replayed for name in of.by_phase))
    starts: dict[str, int] = {}
    for of in replayed:
        for start, count in of.starts.items():
            starts[start] = starts.get(start, 0) + count
    return {
        "calls": len(latencies), "misses": len(adds) / len(latencies), "starts": starts,
        "adds_ms": 1e3 * statistics.median(adds), "adds_mean_ms": 1e3 * statistics.mean(adds),
        "mean_ms": 1e3 * statistics.mean(latencies), "p99_ms": 1e3 * statistics.quantiles(latencies, n=100)[98],
        "mean_ms_each": [1e3 * statistics.mean(of.latencies) for of in replayed],
        "phases_ms": {
            name: 1e3 * statistics.median(each for of in replayed for each in of.by_phase.get(name, []))
            for name in names
        },
        "reserved": max(of.reserved for of in replayed), "held": max(of.held for of in replayed),
        "late_ms": 1e3 * max(of.late_s for of in replayed),
    }  # fmt: skip


def show(facts: dict[str, float], found: dict[str, dict[str, Any]]) -> None:
    title = (
        f"{MODELS} models, room for {DEVICES * ROOM}, {facts['calls_per_s']:.1f} calls/s; by hand: cold "
        f"{facts['by_hand_all_ms']:.0f} ms, warm {facts['by_hand_run_ms']:.0f} ms"
    )
    table = Table(title=title, title_justify="left")
    headings = (
        "platform", "calls", "misses", "ideal LRU", "most called kept", "a miss adds, ms", "phases of a miss, ms",
        "mean, ms", "p99, ms", "reserved", "held",
    )  # fmt: skip
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place in (0, 6) else "right")
    for name, each in found.items():
        parts = ", ".join(f"{phase} {ms:.0f}" for phase, ms in each["phases_ms"].items() if ms >= 0.5)
        table.add_row(
            name, str(each["calls"]), f"{each['misses']:.1%}", f"{facts['ideal_lru']:.1%}",
            f"{facts['most_called_kept']:.1%}", f"{each['adds_ms']:.1f}", parts, f"{each['mean_ms']:.0f}",
            f"{each['p99_ms']:.0f}", f"{each['reserved']:.0%}", f"{each['held']:.0%}",
        )  # fmt: skip
    Console(width=max(Console().width, 150)).print(table)


def met(facts: dict[str, float], mine: dict[str, Any]) -> bool:
    """Whether the bars are met that need no other tree."""
    within = mine["reserved"] <= 1 and mine["held"] <= 1
    return bool(within and mine["adds_ms"] <= ADDS_MS and mine["misses"] <= min(MISSES, facts["ideal_lru"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--load", type=float, default=0.65)
    parser.add_argument("--skew", type=float, default=1.0)
    parser.add_argument("--size", type=int, default=64, help="MiB of weights of each model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sleep", type=float, default=0.0, metavar="MS")
    parser.add_argument("--base", type=working_tree, metavar="TREE")
    parser.add_argument("--serve", default="", metavar="OPTIONS")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    platforms = {"as it is": (ROOT, shlex.split(options.serve))}
    if options.base:
        platforms["base"] = (options.base, [])
    console = Console(stderr=True)
    replayed: dict[str, list[Replayed]] = {name: [] for name in platforms}
    with tempfile.TemporaryDirectory(prefix="gpufaas-swap-models-") as source:
        with console.status("writing models"):
            given, facts = storm(Path(source), options)
            rooms = {name: occupation(given.source, *of) for name, of in platforms.items()}
        for turn in range(options.rounds):
            for name, of in platforms.items():
                with console.status(f"{name}, round {turn + 1} of {options.rounds}: {given.times[-1]:.0f} s of calls"):
                    replayed[name].append(given.over(*of, rooms[name]))
    found = {name: summary(each) for name, each in replayed.items()}
    if options.json:
        print(json.dumps({**facts, "occupation": rooms, "platforms": found}, indent=1))
    else:
        show(facts, found)
        if "base" in found:
            ratio = found["as it is"]["mean_ms"] / found["base"]["mean_ms"]
            print(f"mean latency: {ratio:.2f} times the base's (at most 0.8)")
    return 0 if met(facts, found["as it is"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
