"""
Batches and neighbours on a real CPU device: does the simulator say what happens there?

    python benchmarks/neighbours.py [--seconds 120] [--load 0.3] [--seed 1] [--policy SPEC] [--out docs/evaluation.md]

A function whose calls run in batches, and two that hold shares, are on one CPU device with a part of a core. First
their times are measured, by what the workers say: alone, in batches, and while one of the others runs without a pause.
Then the platform is started again with an empty device, and Poisson calls are sent to it, open loop; the simulator gets
the same calls and the times of the first part. Goal: mean latency within 20 %.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
from _document import table, write_part
from _platform import ROOT, gpufaas, platform
from emulated import as_known, drawn
from rich.console import Console

from gpufaas import Client
from gpufaas_core import local_login
from gpufaas_core.files import remove_tree
from gpufaas_scheduler.policies import DEFAULT_POLICY
from gpufaas_simulator.explicit import read_workload
from gpufaas_simulator.recorded import read_journal
from gpufaas_simulator.replay import Endpoint, Replayed, replay
from gpufaas_simulator.report import Report
from gpufaas_simulator.run import simulate

DEVICE = "local/cpu:0"
CORES, MEMORY_MIB = 0.4, 2048
"""Few cores: other programs on the machine hardly hold up workers that use less than their turn."""
FUNCTIONS: dict[str, dict[str, Any]] = {
    "batched": {"sharing": "spatial", "compute": 50, "uses": 100, "batch_max": 8},
    "small": {"sharing": "share", "compute": 20},
    "large": {"sharing": "share", "compute": 30},
}
"""As in a workload file; most called first. The batched one uses all that the others leave."""
WIDTH = 256
"""Of the layers that a call passes: they stay in the processor's cache, whose next level other programs use, too."""
TIMES = {"batched": 2000, "small": 1300, "large": 1600}
"""How often a call passes them."""
SIZES = (2, 4, 8)
ROUNDS, CALLS = 5, 4
"""Each way of each function is measured in each round, with so many calls; the median of the rounds counts."""
LATENCY = 0.20
"""The bar: live against simulated mean latency."""
_TIMES = re.compile(r"(load|run);dur=([0-9.]+)")
HANDLER = """
import torch

WIDTH, TIMES = {width}, {times}


def load(device):
    torch.set_num_threads(1)
    return torch.full((2, WIDTH, WIDTH), 1 / WIDTH, device=device)


def handle(model, event, context):
    return handle_batch(model, [event], [context])[0]


def handle_batch(model, events, contexts):
    with torch.inference_mode():
        x = torch.ones(len(events), WIDTH)
        for _ in range(TIMES):
            x = torch.relu(x @ model[0]) @ model[1]
    return x.argmax(1).tolist()
"""


def write_functions(home: Path) -> None:
    functions = {}
    for name, need in FUNCTIONS.items():
        (home / name).mkdir()
        (home / name / "handler.py").write_text(f"# {name}\n{HANDLER.format(width=WIDTH, times=TIMES[name])}")
        annotations = {"gpufaas.memory": "640MiB" if name == "batched" else "320MiB"}
        annotations |= {f"gpufaas.{key.replace('_', '-')}": str(need[key]) for key in need if key != "uses"}
        functions[name] = {
            "lang": "python3-torch", "handler": f"./{name}", "image": f"{name}:latest", "annotations": annotations,
        }  # fmt: skip
    stack = {"version": "1.0", "provider": {"name": "openfaas"}, "functions": functions}
    (home / "stack.yaml").write_text(json.dumps(stack))


@contextmanager
def served(home: Path, journal: Path, policy: str) -> Iterator[str]:
    device = f"cpu:0={MEMORY_MIB}MiB,cores={CORES:g}"
    with platform("--journal", str(journal), "--policy", policy, "--device", device, home=home) as (url, *_):
        # Deployed again for the second time, so that the fork server is ready when the first call comes.
        gpufaas(url, "up", "-f", str(home / "stack.yaml"), cwd=home)
        yield url


def others_of(name: str) -> list[str]:
    return [each for each in FUNCTIONS if each != name]


def contention(first: str, second: str) -> float:
    """Return how much longer two functions take beside each other because both use compute, as simulated."""
    used = sum(each.get("uses", each["compute"]) for each in (FUNCTIONS[first], FUNCTIONS[second]))
    return max(1.0, used / 100)


class Measured:
    """The times of the functions of a platform."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._found: dict[tuple[str, str | int], list[float]] = defaultdict(list)
        """Seconds of each function by neighbour, or size of its batch."""

    async def costs(self) -> dict[str, dict[str, Any]]:
        load_s = {name: (await self._call(name))["load"] for name in FUNCTIONS}
        for _ in range(ROUNDS):
            await self._round()
        took_s = {way: statistics.median(found) for way, found in self._found.items()}
        costs: dict[str, dict[str, Any]] = {}
        for name, need in FUNCTIONS.items():
            costs[name] = cost = {"load_s": load_s[name], "infer_s": took_s[name, 1]}
            if "batch_max" in need:
                cost["batch"] = {size: took_s[name, size] for size in SIZES}
            else:
                cost["share"] = {need["compute"]: 1.0}  # its time is that under its cap
            cost["beside"] = {}
            for other in others_of(name):
                cost["beside"][other] = took_s[name, other] / took_s[name, 1] / contention(name, other)
        return costs

    async def _round(self) -> None:
        for name, need in FUNCTIONS.items():
            self._found[name, 1].append(await self._mean(name))
            for size in SIZES if "batch_max" in need else ():
                self._found[name, size].append(await self._batch(name, size))
            for other in others_of(name):
                async with self._busy(other):
                    self._found[name, other].append(await self._mean(name))

    async def _call(self, name: str) -> dict[str, float]:
        answer = (await self._http.post(f"/function/{name}")).raise_for_status()
        found = {phase: float(ms) / 1000 for phase, ms in _TIMES.findall(answer.headers["server-timing"])}
        return {**found, "size": float(answer.headers.get("x-gpufaas-batch", 1))}

    async def _mean(self, name: str) -> float:
        await self._call(name)
        return statistics.fmean([(await self._call(name))["run"] for _ in range(CALLS)])

    async def _batch(self, name: str, size: int) -> float:
        """Return the time of *size* calls together: they wait while one call runs."""
        took: list[float] = []
        while len(took) < size:
            each = await asyncio.gather(*(self._call(name) for _ in range(1 + size)))
            took += [found["run"] for found in each if found["size"] == size]
        return statistics.fmean(took)

    @asynccontextmanager
    async def _busy(self, name: str) -> AsyncIterator[None]:
        """Call *name* without a pause until the end of the block."""
        ends = asyncio.Event()

        async def again() -> None:
            while not ends.is_set():
                await self._call(name)

        calling = asyncio.create_task(again())
        try:
            yield
        finally:
            ends.set()
            await calling


async def costs_of(url: str) -> dict[str, dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, auth=local_login.find(url), timeout=60, trust_env=False) as http:
        return await Measured(http).costs()


def write_workload(path: Path, costs: dict[str, dict[str, Any]]) -> None:
    memory_mb = MEMORY_MIB * 1.048576
    functions = {name: {"occupation_mb": 400.0, **FUNCTIONS[name], **cost} for name, cost in costs.items()}
    devices = [{"id": DEVICE, "memory_mb": memory_mb, "kind": "cpu"}]
    path.write_text(json.dumps({"devices": devices, "functions": functions, "arrivals": []}))


def mean_ms(record: Any, function: int) -> float:
    calls = [at for at in range(len(record.workload)) if record.workload.calls[at] == function]
    return 1000 * statistics.fmean(record.ended[at] - record.workload.times[at] for at in calls)


def document(
    costs: dict[str, dict[str, Any]], live: Replayed, record: Any, simulated: Report, policy: str, seconds: float,
    busy_before: float,
) -> str:  # fmt: skip
    ways = []
    for name, cost in costs.items():
        ways.append([name, "alone", f"{1000 * cost['infer_s']:.1f}", ""])
        for size, took_s in cost.get("batch", {}).items():
            ways.append([name, f"{size} together", f"{1000 * took_s:.1f}", f"{took_s / cost['infer_s']:.2f}"])
        for other, factor in cost["beside"].items():
            slower = factor * contention(name, other)
            ways.append([name, f"beside {other}", f"{1000 * slower * cost['infer_s']:.1f}", f"{slower:.2f}"])
    rows = [
        [f"mean latency of {name}, ms", f"{mean_ms(live.record, at):.0f}", f"{mean_ms(record, at):.0f}",
         f"{mean_ms(live.record, at) / mean_ms(record, at) - 1:+.1%}"]
        for at, name in enumerate(costs)
    ]  # fmt: skip
    a, b = live.report, simulated
    off = a.latency.mean / b.latency.mean - 1
    rows += [
        ["mean latency, ms", f"{1000 * a.latency.mean:.0f}", f"{1000 * b.latency.mean:.0f}", f"**{off:+.1%}**"],
        ["p99 latency, ms", f"{1000 * a.latency.p99:.0f}", f"{1000 * b.latency.p99:.0f}",
         f"{a.latency.p99 / b.latency.p99 - 1:+.1%}"],
        ["misses", str(a.misses), str(b.misses), ""],
        ["calls served", str(a.completed), str(b.completed), ""],
    ]  # fmt: skip
    met = "met" if abs(off) <= LATENCY else "**not met**"
    others = "" if busy_before <= 1.5 else (
        " Other programs kept the machine busy at times: to be repeated on a quiet one."
    )  # fmt: skip
    return f"""
## Batches and neighbours on a CPU device

```console
$ python benchmarks/neighbours.py
```

Behind `gpufaas serve --device cpu:0={MEMORY_MIB}MiB,cores={CORES:g}`, policy `{policy}`: `batched` runs up to
{FUNCTIONS["batched"]["batch_max"]} calls together on one thread, `small` and `large` hold shares of
{FUNCTIONS["small"]["compute"]} and {FUNCTIONS["large"]["compute"]} %. What a call takes, by the worker's own clock
(medians of {ROUNDS} rounds):

{table(["function", "how", "took, ms", "of alone"], ways)}

Then {len(live.record.workload)} Poisson calls over {seconds:.0f} s, over HTTP to an empty device, and simulated with
these times:

{table(["", "live", "simulated", "off"], rows)}

Mean latency within 20 %: {met}. The load average was {busy_before:.1f} on {os.cpu_count()} cores before; calls were
sent at most {1000 * live.late_s:.0f} ms late.{others}
"""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=120.0)
    arguments.add_argument("--load", type=float, default=0.3, help="of the device, if each call was alone")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--policy", default=DEFAULT_POLICY)
    arguments.add_argument("--out", type=Path, default=ROOT / "docs" / "evaluation.md")
    options = arguments.parse_args()

    console = Console(stderr=True)
    home = Path(tempfile.mkdtemp(prefix="gpufaas-neighbours-"))
    busy_before = os.getloadavg()[0]
    try:
        write_functions(home)
        with (
            console.status("building, deploying, measuring alone, in batches and beside each other"),
            served(home, home / "first.jsonl", options.policy) as url,
        ):
            costs = asyncio.run(costs_of(url))
        write_workload(home / "costs.json", costs)
        sent = drawn(read_workload(home / "costs.json"), options.load, options.seconds, options.seed)
        with (
            console.status(f"replaying {len(sent)} calls over {options.seconds:.0f} s"),
            served(home, home / "second.jsonl", options.policy) as url,
        ):
            live = asyncio.run(replay(sent, Endpoint(url, b"{}", authorization=Client(url).authorization)))
        journal = home / "second.jsonl"
        record, simulated = simulate(as_known(sent, journal), read_journal(journal).header)
        off = live.report.latency.mean / simulated.latency.mean - 1
        for at, name in enumerate(costs):
            print(f"{name}: {mean_ms(live.record, at):.0f} ms live, {mean_ms(record, at):.0f} ms simulated")
        print(
            f"{live.report.completed} calls: mean latency {live.report.latency.mean:.3f} s live, "
            f"{simulated.latency.mean:.3f} s simulated ({off:+.1%}); misses {live.report.misses}, {simulated.misses}"
        )
        for what, count in live.errors.items():
            print(f"{count} calls: {what}")
        text = document(costs, live, record, simulated, options.policy, options.seconds, busy_before)
        write_part(options.out, "benchmarks/neighbours.py", text)
        return 0 if abs(off) <= LATENCY else 1
    finally:
        remove_tree(home)


if __name__ == "__main__":
    sys.exit(main())
