"""
Many functions: a warm call where 400 functions are deployed against one where 10 are.

    .venv/bin/python benchmarks/many_functions.py [--functions 400] [--seconds 2] [--rounds 8] [--json FILE]

Two platforms, the same function (`echo`, 1 KB), by turns with wrk (`apt install wrk`) at 1 and 16 connections; the
others are deployed, and nobody calls them. Median latency and processor time of a call, from /proc, as ratios
round by round. The bars are judged at the end; with a missed one it exits with 1.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Final

import httpx
from _deploying import deploy
from _judged import most, status_of
from _platform import platform
from _servers import Tree
from _wrk import BODY, LUA, wrk
from rich.console import Console
from rich.table import Table

CONNECTIONS: Final = (1, 16)
FEW, TIMES = 10, 1.05
"""The bar: the latency and the processor time of a call, as a multiple of that where ten functions are deployed."""
ECHO: Final = """
import json


def handle(event, context):
    return {"headers": {"Content-Type": "application/json"}, "body": event.json()}
"""
Row = dict[str, float]


def fill(url: str, functions: int, console: Console) -> None:
    """Deploy so many functions."""
    with httpx.Client(base_url=url, timeout=120) as client, console.status(f"deploying {functions} functions"):
        for number in range(functions):
            deploy(client, f"f{number}", ECHO, kind="http")
        client.post("/function/f0", content=BODY).raise_for_status()


def measured(url: str, tree: Tree, connections: int, seconds: float, script: Path) -> Row:
    before = tree.cpu_s()[0]
    row = wrk(f"{url}/function/f0", connections, seconds, script)
    return {**row, "cpu_us": 1e6 * (tree.cpu_s()[0] - before) / max(row["requests"], 1)}


def run(options: argparse.Namespace, console: Console) -> dict[int, list[tuple[Row, Row]]]:
    """Return what each round found, where few functions are and where many are, by the number of connections."""
    found: dict[int, list[tuple[Row, Row]]] = {count: [] for count in CONNECTIONS}
    device = ("--device", "cpu:0=512MiB")
    with tempfile.TemporaryDirectory() as folder, platform(*device) as few, platform(*device) as many:
        script = Path(folder) / "post.lua"
        script.write_text(LUA % BODY)
        servers = []
        for (url, child, _), functions in ((few, FEW), (many, options.functions)):
            fill(url, functions, console)
            servers.append((url, Tree(child.pid)))
            wrk(f"{url}/function/f0", 16, 2, script)  # warm-up
        for turn in range(options.rounds):
            for count in CONNECTIONS:
                with console.status(f"{count} connections, round {turn + 1} of {options.rounds}"):
                    one, other = (measured(*each, count, options.seconds, script) for each in servers)
                found[count].append((one, other))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not shutil.which("wrk"):
        sys.exit("wrk is missing: apt install wrk")
    found = run(options, Console(stderr=True))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    shown = Table(title=f"echo, where {FEW} and where {options.functions} functions are", title_justify="left")
    judged = []
    for heading in ("connections", "", f"{FEW} functions", f"{options.functions}", "ratio"):
        shown.add_column(heading, justify="right")
    for count, rows in found.items():
        for key, told in (("p50_ms", "p50, ms"), ("cpu_us", "CPU of a call, µs"), ("rps", "req/s")):
            few, many = (statistics.median(row[side][key] for row in rows) for side in (0, 1))
            ratio = statistics.median(other[key] / one[key] for one, other in rows)
            shown.add_row(str(count), told, f"{few:,.2f}", f"{many:,.2f}", f"{ratio:.2f}")
            if key != "rps":
                judged.append(most(f"{count} connections, {told}: times that of {FEW} functions", ratio, TIMES))
    Console().print(shown)
    return status_of(judged)


if __name__ == "__main__":
    raise SystemExit(main())
