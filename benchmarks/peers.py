"""
Warm calls of this platform and other servers, alternately in one run on this machine.

    .venv/bin/python benchmarks/peers.py [--peers mosec,litserve,...] [--works echo,convnet]
                                      [--rounds 3] [--seconds 3] [--base TREE [--planned N]] [--json FILE] [--write]

Two works: *echo* (1 KB of JSON, parsed and serialised) at 1, 16 and 64 connections, and *convnet* (resnet18 of the
examples at 64 x 64 pixels, 7 to 15 ms on one thread) at 16 and 64, on two devices here and by two workers there. Load
is wrk's (`apt install wrk`), on the same cores. Each peer is started beside the platform, and each round measures both,
one after the other: what is compared is from the same seconds. Medians of the rounds are shown, and of the rounds'
ratios. The processor time of a call is that of the server and all its descendants, from /proc, without wrk's.

The peers: bare Starlette on uvicorn (no peer but a yardstick: echo only), mosec, LitServe, and Ray Serve without and
with HAProxy; each but the first in an environment of its own, in the user's cache directory, made at its first use. One
that cannot be installed or started is said to be "not run". More yardsticks of the same run: a turn of an empty Python
loop, 1 KB to another process and back, and the convnet in two processes without any server.

--base: no peers, but the platform of another working tree (`_base.py`), with *echo* or the --works given. With
--planned N, both have N more functions, which are resident, and a plan owns them here. --write puts the table
into README.md and docs/performance.md. The bars are judged at the end; with a missed one it exits with 1.
"""

import argparse
import contextlib
import json
import os
import platform as machine
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import httpx
from _base import measure, options_of, pairs_of
from _deploying import deploy
from _judged import status_of
from _pairs import load
from _peer_report import Cell, Report, Row, bars, print_table, write
from _platform import ROOT
from _servers import PEERS, WORKS, ByHand, NotRun, Served, by_hand, ours, ping_pong_us, python_loop_ns, theirs
from _wrk import BODY, LUA, need_wrk, wrk
from rich.console import Console

from gpufaas_core import local_login

CONNECTIONS: Final = {"echo": (1, 16, 64), "convnet": (16, 64)}
BODIES: Final = {"echo": BODY, "convnet": json.dumps({"seed": 7, "size": 64})}
WARM_UP_S: Final = {"echo": 1.0, "convnet": 3.0}
PLANNED_WITHIN_S: Final = 120.0


class Runs:
    """Measures servers with one work after the other; keeps what each round found."""

    def __init__(self, folder: Path, seconds: float, rounds: int, console: Console) -> None:
        self.seconds, self.rounds, self.console = seconds, rounds, console
        self.report = Report(rounds=rounds, seconds=seconds, machine=machine_of())
        self._scripts = {work: folder / f"{work}.lua" for work in WORKS}
        for work, script in self._scripts.items():
            script.write_text(LUA % BODIES[work])

    def pair(self, name: str, work: str, mine: Served, other: Served, hand: ByHand | None) -> None:
        """Measure *work* by the platform and by the peer *name*, alternately."""
        same_answer(work, mine, other)
        for connections in CONNECTIONS[work]:
            for each in (mine, other):
                wrk(each.urls[work], connections, WARM_UP_S[work], self._scripts[work])
        for turn in range(self.rounds):
            self._yardsticks(hand if work == "convnet" else None)
            for connections in CONNECTIONS[work]:
                told = f"{PEERS[name].title}: {work}, {connections} connections, round {turn + 1} of {self.rounds}"
                with self.console.status(told):
                    rows = [self.load(work, connections)(each) for each in (mine, other)]
                self.report.add(Cell(name, work, connections), *rows)
        for connections in CONNECTIONS[work]:
            self.console.log(self.report.line(Cell(name, work, connections)))

    def load(self, work: str, connections: int) -> Callable[[Served], Row]:
        return load(work, connections, self.seconds, self._scripts[work])

    def _yardsticks(self, hand: ByHand | None) -> None:
        self.report.yardstick("python_loop_ns", python_loop_ns())
        self.report.yardstick("ping_pong_us", ping_pong_us())
        if hand is not None:
            self.report.ceiling(hand.rate(self.seconds))


def machine_of() -> str:
    return f"{os.cpu_count()} cores, Python {machine.python_version()}, Linux {machine.release()}"


def same_answer(work: str, mine: Served, other: Served) -> None:
    """:raises NotRun: the other one does not answer what the platform answers"""
    answers, headers = [], {"content-type": "application/json"}
    for each in (mine, other):
        response = httpx.post(each.urls[work], content=BODIES[work], headers=headers, timeout=120)
        answers.append(response.json() if response.is_success else f"{response.status_code}: {response.text[:200]}")
    if answers[0] != answers[1]:
        raise NotRun(f"it answers {str(answers[1])[:120]}, and not {str(answers[0])[:60]}")


def write_weights(folder: Path) -> Path:
    """Write the weights of the convnet, as the example's build does."""
    code = "import sys; from common.architectures import write_random_weights as w; w('resnet18', sys.argv[1])"
    path = folder / "weights.safetensors"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "functions" / "examples")}
    subprocess.run([sys.executable, "-c", code, str(path)], env=env, check=True, stdout=subprocess.DEVNULL)
    return path


def with_peers(names: Sequence[str], works: Sequence[str], runs: Runs, folder: Path) -> None:
    weights = write_weights(folder)
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(ours(works))
        hand = stack.enter_context(by_hand(weights)) if "convnet" in works else None
        for name in names:
            peer = PEERS[name]
            for work in (each for each in peer.works if each in works):
                runs.console.log(f"{peer.title}: {work}; the first use of a peer installs it")
                try:
                    with theirs(peer, work, weights) as other:
                        runs.pair(name, work, mine, other, hand)
                except NotRun as exc:
                    runs.report.not_run[name] = f"{work}: {exc}"
                    runs.console.log(f"{peer.title}: not run: {exc}")
                    break


PLANNED: Final = """
def load(device):
    return None

def handle(model, event, context):
    return event.body
"""


@contextlib.contextmanager
def with_planned(mine: contextlib.AbstractContextManager[Served], count: int, *, plan: bool) -> Iterator[Served]:
    """Deploy *count* functions beside what *mine* serves, and call each, so that it is resident; *plan* owns them."""
    with mine as served:
        url = httpx.URL(next(iter(served.urls.values()))).join("/")
        with httpx.Client(base_url=url, auth=local_login.find(str(url)), timeout=60) as client:
            annotations = {"gpufaas.sharing": "auto", "gpufaas.memory": "24Mi"}
            for number in range(count):
                deploy(client, f"planned{number}", PLANNED, kind="model", annotations=annotations)
                client.post(f"/function/planned{number}", content=b"1").raise_for_status()
            if plan and count:
                _apply_plan(client, count)
        yield served


def _apply_plan(client: httpx.Client, count: int) -> None:
    devices = [each["device"]["id"] for each in client.get("/system/status").raise_for_status().json()["devices"]]
    replicas = [{"function": f"planned{n}", "device": devices[n % len(devices)], "reserve": 10} for n in range(count)]
    client.put("/system/plan", json={"replicas": replicas}).raise_for_status()
    until = time.monotonic() + PLANNED_WITHIN_S
    while any(each["state"] != "resident" for each in client.get("/system/plan").raise_for_status().json()["replicas"]):
        if time.monotonic() > until:
            raise SystemExit(f"the plan was not carried out: {client.get('/system/plan').text}")
        time.sleep(0.1)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}; default: all")
    parser.add_argument("--works", help=f"of {', '.join(WORKS)}; default: both; with --base echo")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    parser.add_argument("--write", action="store_true", help="put the table into README.md and docs/performance.md")
    parser.add_argument("--planned", type=int, default=0, metavar="N", help="with --base: functions of a plan here")
    options = options_of(parser, rounds=3)
    works = options.works or ("echo" if options.base else ",".join(WORKS))
    options.peers, options.works = options.peers.split(","), works.split(",")
    if options.planned and not options.base:
        parser.error("--planned compares with another working tree: add --base TREE")
    if options.base and options.write:
        parser.error("--base measures no peers: there is nothing for --write")
    for given, known in ((options.peers, PEERS), (options.works, WORKS)):
        if unknown := [each for each in given if each not in known]:
            parser.error(f"{unknown[0]!r} is none of {', '.join(known)}")
    need_wrk()
    return options


def main() -> int:
    options = parsed()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="gpufaas-bench-") as folder:
        runs = Runs(Path(folder), options.seconds, options.rounds, console)
        if options.base:
            pairs, works, runs.seconds = pairs_of(options, options.seconds), options.works, 1.0
            parts = {f"{work}, {at} connections": runs.load(work, at) for work in works for at in CONNECTIONS[work]}
            measure(
                pairs,
                options,
                parts,
                lambda tree: with_planned(ours(works, tree), options.planned, plan=tree == ROOT),
                lambda mine: mine.urls[works[0]],
            )
            return pairs.finish(options)
        with_peers(options.peers, options.works, runs, Path(folder))
    report = runs.report
    print_table(report)
    if options.json:
        options.json.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    if options.write:
        write(report)
    return status_of(bars(report))


if __name__ == "__main__":
    raise SystemExit(main())
