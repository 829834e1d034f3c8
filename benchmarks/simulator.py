"""
How long a million invocations on a thousand devices take to simulate, on one core, and how much memory.

    python benchmarks/simulator.py [--policy lalb-o3] [--calls 1000000] [--devices 1000] [--json]

Functions, twice as many as devices, have costs of GPU-FaaS's table 1 and a popularity of rank^-0.8; calls come at
random times at about nine tenths of what the devices can serve when nothing is loaded. Time is from the drawn workload
to the report; memory is the peak of the process.
"""

import argparse
import json
import platform
import resource
import sys
from time import perf_counter, process_time

from rich.console import Console
from rich.progress import Progress

from gpufaas_scheduler.policies import DEFAULT_POLICY
from gpufaas_simulator.run import engine_header, simulate
from gpufaas_simulator.synthetic import devices, make_workload

INFER_S = 1.31  # mean of table 1
LOAD = 0.9
TARGET_S = 180.0
TARGET_GB = 2.0


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--policy", default=DEFAULT_POLICY)
    arguments.add_argument("--calls", type=int, default=1_000_000)
    arguments.add_argument("--devices", type=int, default=1_000)
    arguments.add_argument("--json", action="store_true", help="print JSON instead of a line")
    options = arguments.parse_args()

    rpm = 60.0 * LOAD * options.devices / INFER_S
    minutes = max(1, round(options.calls / rpm))
    workload = make_workload(
        "poisson", working_set=2 * options.devices, rpm=options.calls / minutes, minutes=minutes, seed=1,
        on=devices(options.devices),
    )  # fmt: skip
    began, began_cpu = perf_counter(), process_time()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=len(workload))
        _, found = simulate(
            workload, engine_header(options.policy), progress=lambda ended: progress.update(task, completed=ended)
        )
    took_s, cpu_s = perf_counter() - began, process_time() - began_cpu
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    result = {
        "policy": options.policy, "calls": len(workload), "devices": options.devices,
        "functions": len(workload.functions), "took_s": took_s, "cpu_s": cpu_s,
        "peak_gb": peak_gb, "miss_ratio": found.miss_ratio, "mean_latency_s": found.latency.mean,
        "python": platform.python_version(),
    }  # fmt: skip
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{options.policy}: {len(workload):,} calls of {len(workload.functions):,} functions on "
            f"{options.devices:,} devices in {took_s:.1f} s ({cpu_s:.1f} s of CPU), peak {peak_gb:.2f} GB; "
            f"{found.miss_ratio:.1%} misses, mean latency {found.latency.mean:.2f} s"
        )
        full = options.calls >= 1_000_000 and options.devices >= 1_000
        if full:
            met = took_s < TARGET_S and peak_gb < TARGET_GB
            print(f"target {TARGET_S:.0f} s and {TARGET_GB:.0f} GB: {'met' if met else 'MISSED'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
