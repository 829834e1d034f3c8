"""
Emulated devices: do they take the time of their own cost model, and does the simulator say what happens on them?

    python benchmarks/emulated.py [--seconds 140] [--load 0.3] [--seed 1] [--policy SPEC] [--out docs/evaluation.md]

Two emulated devices of 16 GiB, on which not all of five functions fit. One has a device to itself, for batches; some
run beside others and disturb them, one has a share. First, on one device, each function is called alone, and pairs
side by side: what a call takes is compared with the cost model. Then the platform is started again on the same data,
with two empty devices, and Poisson calls are sent to it, open loop; the simulator gets the same calls and costs.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from _document import table, write_part
from _platform import ROOT, gpufaas, platform
from rich.console import Console

from gpufaas import Client
from gpufaas_core import local_login
from gpufaas_core.cost import Truth, truth
from gpufaas_core.files import remove_tree
from gpufaas_scheduler.policies import DEFAULT_POLICY
from gpufaas_simulator import synthetic
from gpufaas_simulator.explicit import read_workload
from gpufaas_simulator.recorded import read_journal
from gpufaas_simulator.replay import Endpoint, Replayed, replay
from gpufaas_simulator.report import Report
from gpufaas_simulator.run import simulate
from gpufaas_simulator.workload import Workload, arrivals

KIND = "v100"
FUNCTIONS: dict[str, dict[str, Any]] = {
    "small": {"occupation_mb": 1000, "load_s": 0.4, "infer_s": 0.15, "sharing": "spatial", "compute": 30,
              "beside": {"medium": 1.1, "large": 1.3}},
    "medium": {"occupation_mb": 2500, "load_s": 0.6, "infer_s": 0.3, "sharing": "spatial", "compute": 50,
               "beside": {"*": 1.2}},
    "large": {"occupation_mb": 4000, "load_s": 1.0, "infer_s": 0.5, "sharing": "spatial", "compute": 50, "uses": 70},
    "capped": {"occupation_mb": 3000, "load_s": 0.5, "infer_s": 0.2, "sharing": "share", "compute": 25},
    "whole": {"occupation_mb": 6000, "load_s": 1.2, "infer_s": 0.4, "batch_max": 4, "batch": {"4": 0.7}},
}  # fmt: skip
"""As in a workload file; most called first."""
PAIRS = (("small", "medium"), ("medium", "large"), ("large", "capped"))
ALONE = 10
"""Calls of each function, and of each pair, in the first part."""
OWN_MODEL, LATENCY = 0.05, 0.10
"""The bars: an emulated device against its cost model, live against simulated mean latency."""
_RUN = re.compile(r"run;dur=([0-9.]+)")
HANDLER = """
def load(device):
    return None


def handle(model, event, context):
    return "not run"


def handle_batch(model, events, contexts):
    return ["not run"] * len(events)
"""


def write_functions(home: Path) -> None:
    devices = [{"id": f"local/emulated:{n}", "memory_mb": 16 * 1024 * 1.048576, "kind": KIND} for n in (0, 1)]
    (home / "costs.json").write_text(json.dumps({"devices": devices, "functions": FUNCTIONS, "arrivals": []}))
    functions = {}
    for name, each in FUNCTIONS.items():
        (home / name).mkdir()
        # Bundles that differ: what is learnt belongs to a bundle.
        (home / name / "handler.py").write_text(f"# {name}\n{HANDLER}")
        annotations = {"gpufaas.memory": f"{each['occupation_mb'] + 200}MB"}
        if "batch_max" in each:
            annotations["gpufaas.batch-max"] = str(each["batch_max"])
        annotations |= {f"gpufaas.{key}": str(each[key]) for key in ("sharing", "compute") if key in each}
        functions[name] = {
            "lang": "python3-torch", "handler": f"./{name}", "image": f"{name}:latest", "annotations": annotations,
        }  # fmt: skip
    stack = {"version": "1.0", "provider": {"name": "openfaas"}, "functions": functions}
    (home / "stack.yaml").write_text(json.dumps(stack))


@contextmanager
def served(home: Path, journal: Path, policy: str, devices: int) -> Iterator[str]:
    profile = f"16GiB,kind={KIND},profile={home / 'costs.json'}"
    given = [part for number in range(devices) for part in ("--device", f"emulated:{number}={profile}")]
    with platform("--journal", str(journal), "--policy", policy, *given, home=home) as (url, *_):
        yield url


async def own_model(url: str, workload: Workload) -> list[tuple[str, float, float]]:
    """Return what was called, how long that took on a device, and what the cost model says."""
    known = {each.name: truth(each.name, each.need, each.costs["*"]) for each in workload.functions}
    rows: list[tuple[str, float, float]] = []
    async with httpx.AsyncClient(base_url=url, auth=local_login.find(url), timeout=60, trust_env=False) as http:

        async def run_s(name: str) -> float:
            answer = (await http.post(f"/function/{name}", content=b"{}")).raise_for_status()
            run = _RUN.search(answer.headers["server-timing"])
            assert run is not None
            return float(run[1]) / 1000

        for name, each in known.items():
            await run_s(name)
            took = statistics.fmean([await run_s(name) for _ in range(ALONE)])
            rows.append((name, took, each.service_s(1, each.cap)))
        for first, second in PAIRS:
            await run_s(first), await run_s(second)  # so that both are resident
            found = [await asyncio.gather(run_s(first), run_s(second)) for _ in range(ALONE)]
            for at, (one, other) in enumerate(((first, second), (second, first))):
                took = statistics.fmean([each[at] for each in found])
                rows.append((f"{one} beside {other}", took, beside_s(known[one], known[other])))
    return rows


def beside_s(first: Truth, second: Truth) -> float:
    """Return how long *first* takes if *second* begins with it on a device of full compute."""
    alone, other = first.service_s(1, first.cap), second.service_s(1, second.cap)
    uses = min(first.uses, first.cap) + min(second.uses, second.cap)
    slow = max(1.0, uses / 100) * first.disturbed([second])
    other_slow = max(1.0, uses / 100) * second.disturbed([first])
    if alone * slow <= other * other_slow:
        return alone * slow
    together = other * other_slow
    return together + alone - together / slow


def drawn(workload: Workload, load: float, seconds: float, seed: int) -> Workload:
    """Poisson calls, so many that they would keep the devices busy for *load* if each was alone."""
    rng = random.Random(seed)
    weights = synthetic.popularity(len(workload.functions), synthetic.DEFAULT_SKEW)
    known = [truth(each.name, each.need, each.costs["*"]) for each in workload.functions]
    work = [each.service_s(1, each.cap) * min(each.uses, each.cap) / 100 for each in known]
    per_s = load * len(workload.devices) / (sum(w * s for w, s in zip(weights, work, strict=True)) / sum(weights))
    pairs: list[tuple[float, int]] = []
    time = rng.expovariate(per_s)
    while time < seconds:
        pairs.append((time, rng.choices(range(len(known)), weights=weights)[0]))
        time += rng.expovariate(per_s)
    times, calls = arrivals(pairs)
    return replace(workload, times=times, calls=calls, name="emulated")


def as_known(workload: Workload, journal: Path) -> Workload:
    """Return *workload* with the sizes that the scheduler knew of its functions."""
    sizes = {}
    for each in read_journal(journal).workload.functions:
        for cost in each.costs.values():
            sizes[each.name.partition(".")[0]] = cost.occupation
    functions = [
        replace(each, costs={"*": replace(each.costs["*"], occupation=sizes[each.name])}) for each in workload.functions
    ]
    return replace(workload, functions=functions)


def document(
    own: Sequence[tuple[str, float, float]], live: Replayed, simulated: Report, policy: str, seconds: float
) -> str:
    rows = [[what, f"{1000 * took:.1f}", f"{1000 * said:.1f}", f"{took / said - 1:+.1%}"] for what, took, said in own]
    a, b = live.report, simulated
    off = a.latency.mean / b.latency.mean - 1
    compared = [
        ["mean latency, ms", f"{1000 * a.latency.mean:.0f}", f"{1000 * b.latency.mean:.0f}", f"{off:+.1%}"],
        ["p99 latency, ms", f"{1000 * a.latency.p99:.0f}", f"{1000 * b.latency.p99:.0f}",
         f"{a.latency.p99 / b.latency.p99 - 1:+.1%}"],
        ["misses", str(a.misses), str(b.misses), ""],
        ["calls served", str(a.completed), str(b.completed), ""],
    ]  # fmt: skip
    worst = max(abs(took / said - 1) for _, took, said in own)
    met = "met" if worst <= OWN_MODEL and abs(off) <= LATENCY else "**not met**"
    return f"""
## Emulated devices

```console
$ python benchmarks/emulated.py
```

[Emulated devices](simulator.md#emulated-devices) of 16 GiB behind `gpufaas serve`, policy `{policy}`, and five
functions that share them in each way that there is. On one device: calls alone, and pairs that begin together, by the
time that the worker took:

{table(["call", "took, ms", "cost model, ms", "off"], rows)}

Then {len(live.record.workload)} Poisson calls over {seconds:.0f} s, over HTTP to two empty devices, and simulated
with the same costs:

{table(["", "live", "simulated", "off"], compared)}

Calls within 5 % of the cost model, and mean latency within 10 %: {met}. The load average was
{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; calls were sent at most {1000 * live.late_s:.0f} ms late.
"""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=140.0)
    arguments.add_argument("--load", type=float, default=0.3, help="of the devices, if each call was alone")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--policy", default=DEFAULT_POLICY)
    arguments.add_argument("--out", type=Path, default=ROOT / "docs" / "evaluation.md")
    options = arguments.parse_args()

    console = Console(stderr=True)
    home = Path(tempfile.mkdtemp(prefix="gpufaas-emulated-"))
    try:
        write_functions(home)
        workload = read_workload(home / "costs.json")
        with served(home, home / "first.jsonl", options.policy, 1) as url:
            with console.status("building and deploying"):
                gpufaas(url, "up", "-f", str(home / "stack.yaml"), cwd=home)
            with console.status("calling each alone, and pairs"):
                own = asyncio.run(own_model(url, workload))
        with served(home, home / "second.jsonl", options.policy, 2) as url:
            # Deployed again, so that the fork server is ready when the first call comes.
            gpufaas(url, "up", "-f", str(home / "stack.yaml"), cwd=home)
            sent = drawn(workload, options.load, options.seconds, options.seed)
            with console.status(f"replaying {len(sent)} calls over {options.seconds:.0f} s"):
                live = asyncio.run(replay(sent, Endpoint(url, b"{}", authorization=Client(url).authorization)))
        journal = home / "second.jsonl"
        known = as_known(sent, journal)
        _, simulated = simulate(known, read_journal(journal).header)
        for what, took, said in own:
            print(f"{what}: {took:.4f} s, cost model {said:.4f} s ({took / said - 1:+.1%})")
        off = live.report.latency.mean / simulated.latency.mean - 1
        print(
            f"{live.report.completed} calls: mean latency {live.report.latency.mean:.3f} s live, "
            f"{simulated.latency.mean:.3f} s simulated ({off:+.1%}); misses {live.report.misses}, {simulated.misses}"
        )
        for what, count in live.errors.items():
            print(f"{count} calls: {what}")
        write_part(
            options.out,
            "benchmarks/emulated.py",
            document(own, live, simulated, options.policy, options.seconds),
        )
        return 0 if abs(off) <= LATENCY and all(abs(took / said - 1) <= OWN_MODEL for _, took, said in own) else 1
    finally:
        remove_tree(home)


if __name__ == "__main__":
    sys.exit(main())
