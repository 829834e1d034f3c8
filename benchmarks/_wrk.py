"""Two servers in turn under the load of wrk, and a table of what each served."""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BODY = json.dumps({"id": 7, "text": "x" * 950, "numbers": [1, 2, 3, 4.5]})
"""About 1 KB, for what echoes it."""
LUA = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = [==[%s]==]
done = function(summary, latency, requests)
    io.write(string.format("RESULT %%d %%d %%d %%d %%d\\n", summary.requests, summary.duration,
        latency:percentile(50), latency:percentile(99),
        summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.write
            + summary.errors.timeout))
end
"""


def options_of(doc: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not shutil.which("wrk"):
        sys.exit("wrk is missing: apt install wrk")
    return options


def wrk(url: str, connections: int, seconds: float, script: Path) -> dict[str, float]:
    """Return requests, requests/s, p50 and p99 in ms, and errors of one run."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--timeout", "20s", "-s", str(script), url]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"RESULT (\d+) (\d+) (\d+) (\d+) (\d+)", out)
    assert found, out
    requests, micros, p50, p99, errors = map(int, found.groups())
    rates = {"requests": requests, "rps": requests / (micros / 1e6)}
    return {**rates, "p50_ms": p50 / 1e3, "p99_ms": p99 / 1e3, "errors": errors}


def compare(
    ours: str, theirs: str, script: Path, connections: Mapping[int, float], options: argparse.Namespace
) -> dict[int, dict[str, Any]]:
    """Return what both URLs served, by the number of connections; the two take turns."""
    console, results = Console(stderr=True), {}
    for count in connections:
        for each in (ours, theirs):
            wrk(each, count, 1, script)  # warm-up
        rounds = []
        for turn in range(options.rounds):
            with console.status(f"{count} connections, round {turn + 1} of {options.rounds}"):
                time.sleep(0.2)
                rounds.append(
                    {
                        "platform": wrk(ours, count, options.seconds, script),
                        "bare": wrk(theirs, count, options.seconds, script),
                    }
                )
        results[count] = summary(rounds)
    return results


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return the medians of each server, and the median of the rounds' ratios of requests/s."""
    middle = {
        name: {
            key: statistics.median(each[name][key] for each in rounds) for key in ("rps", "p50_ms", "p99_ms", "errors")
        }
        for name in ("platform", "bare")
    }
    share = statistics.median(each["platform"]["rps"] / each["bare"]["rps"] for each in rounds)
    return {**middle, "share": share}


def show(
    title: str, names: tuple[str, str], results: dict[int, dict[str, Any]], goals: Mapping[int, float], *, as_json: bool
) -> None:
    """:param names: of the platform and of the other server; *goals*: the platform's share, by connections"""
    if as_json:
        print(json.dumps(results, indent=2))
        return
    table = Table(title=title, title_justify="left")
    served = [f"{name} {each}" for name in names for each in ("req/s", "p50 ms", "p99 ms")]
    for name in ("connections", *served, "share", "goal", "errors"):
        table.add_column(name, justify="right")
    for count, each in results.items():
        both = (each["platform"], each["bare"])
        figures = [text for a in both for text in (f"{a['rps']:,.0f}", f"{a['p50_ms']:.2f}", f"{a['p99_ms']:.2f}")]
        errors = sum(a["errors"] for a in both)
        table.add_row(str(count), *figures, f"{each['share']:.2f}", f"{goals[count]:.2f}", f"{errors:.0f}")
    Console().print(table)
