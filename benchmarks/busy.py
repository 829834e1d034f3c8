"""
What a call of a busy device costs the serving process, beside the least that any process can do for it.

    .venv/bin/python benchmarks/busy.py [--servers raw,uvloop,starlette] [--connections 16,64] [--base TREE]
                                      [--rounds 5] [--seconds 3] [--json FILE]

The convnet of peers.py on two devices, or by two workers, with wrk's connections (`apt install wrk`). A server wakes up
once for a request and once for an answer, each time behind models that have filled the caches, so the same steps take
several times as long as in a row of quick calls. How long, is measured with servers that do nothing else
(`peer_servers/floor.py`): *raw*, an epoll loop in Python that reads and writes fixed bytes, *uvloop*, the same as
protocols, *starlette*, a bare application that awaits its worker. They run alternately, with --base a working tree's
platform too.

Processor time is that of all threads of the serving process without its workers (`/proc/PID/task/*/schedstat`), its
part in the kernel as `/proc/PID/stat` divides it (by samples of 4 ms); how often a thread of it waited and how often
one was displaced, and page faults, are the kernel's counts. The bar is judged at the end; if missed, it exits with 1.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from _base import working_tree
from _judged import Bar, most, status_of
from _peer_report import GATEWAY_US
from _platform import ROOT, free_port, process
from _servers import ONE_THREAD, PROGRAMS, ours
from _wrk import LUA, need_wrk, wrk
from peers import BODIES, machine_of, write_weights
from rich.console import Console
from rich.table import Table

FLOORS: Final = {"raw": "raw epoll", "uvloop": "uvloop protocols", "starlette": "Starlette"}
OURS, BASE = "this platform", "the other tree"
SHOWN: Final = ("rps", "us", "kernel_us", "waits", "displaced", "faults")
Row = dict[str, float]


class Used:
    """What a process has used so far."""

    def __init__(self, pid: int) -> None:
        self.ns = self.waits = self.displaced = 0
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                self.ns += int((task / "schedstat").read_text().split()[0])
                said = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
                self.waits += int(said["voluntary_ctxt_switches"])
                self.displaced += int(said["nonvoluntary_ctxt_switches"])
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        self.faults, self.user, self.kernel = (int(fields[at]) for at in (7, 11, 12))

    def since(self, before: "Used", calls: float) -> Row:
        """Return what was used for each of *calls*."""
        return {
            "us": (self.ns - before.ns) / 1e3 / calls,
            "user": self.user - before.user,
            "kernel": self.kernel - before.kernel,
            "waits": (self.waits - before.waits) / calls,
            "displaced": (self.displaced - before.displaced) / calls,
            "faults": (self.faults - before.faults) / calls,
        }


@contextlib.contextmanager
def floor(kind: str, weights: Path) -> Iterator[tuple[str, int]]:
    """Serve by a process that does nothing else; give its URL and its number."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    env = {**os.environ, **ONE_THREAD, "BENCH_WEIGHTS": str(weights)}
    env["PYTHONPATH"] = str(ROOT / "functions" / "examples")
    with process([sys.executable, str(PROGRAMS / "floor.py"), kind, str(port)], url, env=env) as child:
        yield url, child.pid


def measured(url: str, pid: int, connections: int, seconds: float, script: Path) -> Row:
    before = Used(pid)
    row = wrk(url, connections, seconds, script)
    if row["errors"]:
        raise SystemExit(f"{row['errors']:.0f} calls of {url} failed")
    return row | Used(pid).since(before, max(row["requests"], 1))


def run(options: argparse.Namespace, console: Console) -> dict[tuple[str, int], list[Row]]:
    """Return what each round found, by server and number of connections."""
    found: dict[tuple[str, int], list[Row]] = {}
    with tempfile.TemporaryDirectory(prefix="gpufaas-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        script = folder / "post.lua"
        script.write_text(LUA % BODIES["convnet"])
        weights = write_weights(folder)
        servers = {FLOORS[kind]: stack.enter_context(floor(kind, weights)) for kind in options.servers}
        for title, tree in (BASE, options.base), (OURS, ROOT):
            if tree:
                mine = stack.enter_context(ours(("convnet",), tree))
                servers[title] = mine.urls["convnet"], mine.tree.members()[0].pid
        for url, _ in servers.values():
            wrk(url, 16, 3, script)  # warm-up
        time.sleep(options.settle)
        for turn in range(options.rounds):
            for count in options.connections:
                for title, server in servers.items():
                    with console.status(f"{title}: {count} connections, round {turn + 1} of {options.rounds}"):
                        row = measured(*server, count, options.seconds, script)
                    found.setdefault((title, count), []).append(row)
    return found


def medians(rows: Sequence[Row]) -> Row:
    """Return them, and what of the time is the kernel's: by the samples of all rounds, as one has few."""
    found = {key: statistics.median(each[key] for each in rows) for key in rows[0]}
    user, kernel = (sum(each[key] for each in rows) for key in ("user", "kernel"))
    return {**found, "kernel_us": found["us"] * kernel / max(user + kernel, 1)}


def times(found: dict[tuple[str, int], list[Row]], title: str, other: str, count: int) -> float | None:
    """Return how many times the processor time of *other* the server *title* needs: the median of the rounds'."""
    if (other, count) not in found:
        return None
    pairs = zip(found[title, count], found[other, count], strict=True)
    return statistics.median(mine["us"] / its["us"] for mine, its in pairs)


def show(found: dict[tuple[str, int], list[Row]], options: argparse.Namespace) -> None:
    compared = [FLOORS[kind] for kind in options.servers] + ([BASE] if options.base else [])
    title = f"a call of a busy device: medians of {options.rounds} rounds of {options.seconds:g} s ({machine_of()})"
    shown = Table(title=title, title_justify="left")
    headings = ("connections", "server", "req/s", "CPU µs", "in the kernel", "waits", "displaced", "faults")
    for heading in (*headings, *(f"times {each}" for each in compared)):
        shown.add_column(heading, justify="right")
    for (title, count), rows in sorted(found.items(), key=lambda item: item[0][1]):
        told = medians(rows)
        ratios = (times(found, title, each, count) for each in compared)
        cells = [f"{told[key]:,.0f}" if key.endswith(("us", "rps")) else f"{told[key]:.2f}" for key in SHOWN]
        shown.add_row(str(count), title, *cells, *("" if each is None else f"{each:.2f}" for each in ratios))
    Console(width=max(Console().width, 140)).print(shown)


def bars(found: dict[tuple[str, int], list[Row]]) -> list[Bar]:
    return [
        most(f"{count} connections: µs of the serving process a call", medians(rows)["us"], GATEWAY_US)
        for (title, count), rows in found.items()
        if title == OURS
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default=",".join(FLOORS), help=f"of {', '.join(FLOORS)}; default: all")
    parser.add_argument("--connections", default="16,64")
    parser.add_argument("--base", type=working_tree, metavar="TREE", help="another working tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--settle", type=float, default=13.0, help="seconds after the warm-up; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.servers = [each for each in options.servers.split(",") if each]
    options.connections = [int(each) for each in options.connections.split(",")]
    if unknown := [each for each in options.servers if each not in FLOORS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(FLOORS)}")
    need_wrk()
    found = run(options, Console(stderr=True))
    if options.json:
        options.json.write_text(json.dumps({f"{title} at {at}": rows for (title, at), rows in found.items()}) + "\n")
    show(found, options)
    return status_of(bars(found))


if __name__ == "__main__":
    raise SystemExit(main())
