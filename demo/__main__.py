"""
The main job, shown: more models than fit share two small devices, two functions run side by side on shares of a third
one, and every answer is right.

    make demo            start, deploy, call, check, stop
    make demo KEEP=1     the same, but leave the platform running

Ends with 0 only if every answer was right (compared with a plain process that has the same weights), evictions
happened, no device ever held more than its budget (seen by a sampler that reads /proc from outside), and each shared
function had its share.
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from demo import shared
from gpufaas import Client
from gpufaas_cli.subprocess_lines import end_as_by_ctrl_c
from gpufaas_core import local_login
from gpufaas_core.files import remove_tree
from gpufaas_core.units import MiB, format_bytes

ROOT = Path(__file__).resolve().parent.parent
HOME = Path(os.environ.get("DEMO_HOME") or ROOT / ".demo")
"""The folder of everything that it writes; emptied when it begins, removed when it ends."""
DEVICES = {"cpu:0": 1050 * MiB, "cpu:1": 1050 * MiB}
CNNS = ("squeezenet", "densenet121", "resnet18", "resnet50", "alexnet", "vgg11", "vgg16")
FUNCTIONS = ("echo", "digits", "embed", *CNNS)
SENTENCES = (
    ("A man is playing a guitar.", "Someone plays an instrument.", "The stock market fell sharply."),
    ("The cat sleeps on the sofa.", "A kitten is napping on the couch.", "Our train leaves at seven."),
    ("How do I reset my password?", "I forgot my login credentials.", "Bake the bread for forty minutes."),
    ("It will rain tomorrow.", "The forecast says showers are coming.", "She bought a red bicycle."),
)
AT_ONCE = 8

console = Console()


@dataclass
class Call:
    """One input: what is sent, and how its answer is judged."""

    function: str
    body: str
    label: int | None = None
    """What the image of a digit shows; None: the body is none."""


@dataclass
class Phase:
    """A part of the demo and what came of it."""

    name: str
    calls: list[Call]
    at_once: int
    latencies: list[float] = field(default_factory=list)
    starts: Counter[str] = field(default_factory=Counter)
    evictions: int = 0
    together: int = 0
    """Calls that ran in one batch with others."""
    places: Counter[tuple[str | None, str | None]] = field(default_factory=Counter)
    """Device and share that the answers named."""
    digits: list[bool] = field(default_factory=list)
    """Of each image of a digit: whether the prediction was what it shows."""
    wrong: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the platform running afterwards")
    options = parser.parse_args()
    began = time.monotonic()
    end_as_by_ctrl_c()  # the platform is stopped then
    remove_tree(HOME)
    HOME.mkdir()
    with ExitStack() as stack:
        url, server = stack.enter_context(serving(options.keep))
        deploy(url)
        phases, sides = plan(), plan_sides()
        answers = right_answers([*phases, *sides])
        with sampled(server.pid) as memory:
            totals = asyncio.run(run(url, phases, sides, answers))
        failures = report(phases, memory, totals) + report_sides(sides, totals)
        failures += sum_up(phases, totals, time.monotonic() - began)
        if options.keep:
            console.print(
                f"\nThe platform is still up (pid {server.pid}). Call it:\n"
                f"  export OPENFAAS_URL={url}\n"
                f"  echo '{{\"seed\": 7}}' | {cli()} invoke vgg16 --timing\n"
                f"  {cli()} describe digits\n"
                f"  {cli()} top\n"
                f"Stop it: kill {server.pid}"
            )
    for failure in failures:
        console.print(f"[red]✗ {failure}[/red]")
    if not failures:
        told = "✓ every answer was right, models were evicted and reloaded, no budget was exceeded"
        console.print(f"[green]{told}[/green]", soft_wrap=True)
    return 1 if failures else 0


# --- the platform -----------------------------------------------------------------------------------------------------


def cli() -> Path:
    path = Path(sys.executable).parent / "gpufaas"
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


@contextmanager
def serving(keep: bool) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start the platform on a free port. Stop it at the end, unless *keep* is set and nothing went wrong."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    devices = [f"--device={name}={size}" for name, size in DEVICES.items()]
    devices.append(f"--device={shared.DEVICE}={shared.OPTIONS}")
    console.rule("[bold]gpufaas serve")
    command = [sys.executable, "-m", "gpufaas_cli", "serve", "--port", str(port), "--data", str(HOME / "data")]
    command += ["--park", "off"]  # what is parked is in host memory, and would count as held
    server = subprocess.Popen([*command, *devices], start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    kept = False
    try:
        until = time.monotonic() + 60
        with Client(url) as client:
            while not client.is_ready():
                if server.poll() is not None or time.monotonic() > until:
                    raise SystemExit("the platform did not start: see above")
                time.sleep(0.05)
        yield url, server
        kept = keep
    finally:
        if not kept:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            remove_tree(HOME)


def deploy(url: str) -> None:
    console.rule("[bold]gpufaas up")
    examples = HOME / "examples"
    shutil.copytree(ROOT / "functions" / "examples", examples, ignore=shutil.ignore_patterns("build", "__pycache__"))
    environment = {**os.environ, "OPENFAAS_URL": url}
    (examples / "shared.yaml").write_text(shared.STACK)
    for files in (["shared.yaml"], ["stack.yaml", *FUNCTIONS]):
        command = [sys.executable, "-m", "gpufaas_cli", "up", "-f", *files]
        if subprocess.run(command, cwd=examples, env=environment, check=False).returncode:
            raise SystemExit("the examples could not be deployed: see above")


@contextmanager
def sampled(server: int) -> Iterator[dict[str, Any]]:
    """Have a process watch memory from outside (see demo.sampler); what it saw is in the dict at the end."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    found = [pid for pid in children if b"zygote" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    process = subprocess.Popen([sys.executable, "-m", "demo.sampler", found[0]], stdout=subprocess.PIPE, cwd=ROOT)
    memory: dict[str, Any] = {}
    try:
        yield memory
    finally:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
        memory.update(json.loads(out))


# --- inputs and right answers -----------------------------------------------------------------------------------------


def plan() -> list[Phase]:
    """Return the phases; seeded, so that every run sends the same."""
    rng = random.Random(7)
    images = digit_images()

    def cnn(name: str) -> Call:
        return Call(name, json.dumps({"seed": rng.randrange(5)}))

    def digit() -> Call:
        pixels, label = images[rng.randrange(len(images))]
        return Call("digits", json.dumps(pixels), label)

    def sentences() -> Call:
        return Call("embed", json.dumps(rng.choice(SENTENCES)))

    def echo() -> Call:
        return Call("echo", json.dumps({"n": rng.randrange(1000), "text": "hello"}))

    first = [echo(), digit(), sentences(), *(cnn(name) for name in CNNS)]
    # As real traces are: a few functions get most of the calls.
    weights = {"digits": 30, "embed": 20, "echo": 10, "squeezenet": 12, "resnet18": 10, "densenet121": 6,
               "resnet50": 6, "alexnet": 4, "vgg11": 2, "vgg16": 2}  # fmt: skip
    makers = {"digits": digit, "embed": sentences, "echo": echo}
    mixed = [
        makers[name]() if name in makers else cnn(name)
        for name in rng.choices(list(weights), weights=list(weights.values()), k=240)
    ]
    pressure = [cnn(name) for _ in range(5) for name in ("vgg16", "vgg11", "alexnet", "resnet50")]
    warm = [Call("digits", json.dumps(pixels), label) for pixels, label in images]
    return [
        Phase("first calls", first, 1),
        Phase("mixed", mixed, AT_ONCE),
        Phase("large models", pressure, 4),
        Phase("hot model", warm, AT_ONCE),
    ]


def plan_sides() -> list[Phase]:
    """Return the calls of the functions that share a device; each is sent again and again."""
    calls = {name: [Call(name, json.dumps({"seed": seed})) for seed in range(5)] for name in shared.SHARES}
    return [Phase(name, calls[name], shared.EACH) for name in shared.SHARES]


def digit_images() -> list[tuple[list[list[int]], int]]:
    """Return the images of the digits that training never saw, as 8 rows of 8 pixels, with what they show."""
    sys.path.insert(0, str(HOME / "examples" / "digits"))
    from digits_cnn import split  # type: ignore[import-not-found]

    _, (images, labels) = split()
    return [
        ([[int(pixel) for pixel in row] for row in image], int(label))
        for image, label in zip(images, labels, strict=True)
    ]


def right_answers(phases: list[Phase]) -> dict[tuple[str, str], Any]:
    """Ask a plain process that has the same weights."""
    console.rule("[bold]the same inputs to a plain process with the same weights")
    calls = [call for phase in phases for call in phase.calls]
    inputs = {
        each.function: list(dict.fromkeys(c.body for c in calls if c.function == each.function)) for each in calls
    }
    began = time.monotonic()
    with console.status("computing the right answers"):
        done = subprocess.run(
            [sys.executable, "-m", "demo.reference", str(HOME / "examples" / "build")],
            input=json.dumps(inputs), capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the plain process failed:\n{done.stderr}")
    answers = json.loads(done.stdout)
    console.print(f"{sum(map(len, inputs.values()))} different inputs in {time.monotonic() - began:.1f} s")
    return {
        (function, body): answer
        for function, bodies in inputs.items()
        for body, answer in zip(bodies, answers[function], strict=True)
    }


def agree(one: Any, other: Any) -> bool:
    """Whether two answers are the same, numbers within 1e-3: the order of additions differs with threads."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(agree(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(agree, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return isinstance(other, (int, float)) and math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-3)
    return bool(one == other)


def meaning_is_right(similarities: list[list[float]]) -> bool:
    """The first two sentences of each triple mean the same, the third does not."""
    return similarities[0][1] > 0.4 and similarities[0][1] > similarities[0][2] + 0.2


# --- calls ------------------------------------------------------------------------------------------------------------


async def run(url: str, phases: list[Phase], sides: list[Phase], answers: dict[tuple[str, str], Any]) -> dict[str, Any]:
    console.rule("[bold]calls over HTTP")
    progress = Progress(
        TextColumn("{task.description:<13}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, auth=local_login.find(url)) as client:
        status = (await client.get("/system/status")).json()
        with Live(console=console, refresh_per_second=8, transient=False) as live:
            stop = asyncio.Event()
            needs: dict[str, int] = {}
            watch = asyncio.create_task(show(client, live, progress, stop, needs))
            before = evictions(status)
            for phase in phases:
                task = progress.add_task(phase.name, total=len(phase.calls))
                waiting = iter(phase.calls)

                async def send(phase: Phase = phase, waiting: Iterator[Call] = waiting, task: Any = task) -> None:
                    for call in waiting:
                        await one(client, phase, call, answers)
                        progress.advance(task)

                await asyncio.gather(*(send() for _ in range(phase.at_once)))
                status = (await client.get("/system/status")).json()
                phase.evictions, before = evictions(status) - before, evictions(status)
            await at_once(client, sides, answers)
            stop.set()
            await watch
    console.print()
    return {**status, "needs": needs}


async def at_once(client: httpx.AsyncClient, sides: list[Phase], answers: dict[tuple[str, str], Any]) -> None:
    """Call the functions of all *sides* without a pause, at the same time and for as long."""
    until = time.monotonic() + shared.SECONDS

    async def send(side: Phase) -> None:
        for call in itertools.cycle(side.calls):
            if time.monotonic() >= until:
                return
            await one(client, side, call, answers)

    await asyncio.gather(*(send(side) for side in sides for _ in range(side.at_once)))


async def one(client: httpx.AsyncClient, phase: Phase, call: Call, answers: dict[tuple[str, str], Any]) -> None:
    began = time.perf_counter()
    response = await client.post(f"/function/{call.function}", content=call.body)
    phase.latencies.append(time.perf_counter() - began)
    phase.starts[response.headers.get("x-gpufaas-start", "none")] += 1
    phase.together += "x-gpufaas-batch" in response.headers
    phase.places[response.headers.get("x-gpufaas-device"), response.headers.get("x-gpufaas-share")] += 1
    if response.status_code != 200:
        phase.wrong.append(f"{call.function}: {response.status_code} {response.text[:300]}")
        return
    answer = response.json()
    if not agree(answer, answers[call.function, call.body]):
        phase.wrong.append(f"{call.function}: {call.body[:60]} gave {str(answer)[:100]}, not as the plain process")
    if call.label is not None:
        phase.digits.append(answer["digit"] == call.label)
    if call.function == "embed" and not meaning_is_right(answer["similarities"]):
        phase.wrong.append(f"embed: {call.body} has similarities {answer['similarities']}")


def evictions(status: dict[str, Any]) -> int:
    return sum(device["evictions"] for device in status["devices"])


async def show(
    client: httpx.AsyncClient, live: Live, progress: Progress, stop: asyncio.Event, needs: dict[str, int]
) -> None:
    """Redraw what is resident where while the calls run, and note in *needs* what each function occupies."""
    while not stop.is_set():
        status = (await client.get("/system/status")).json()
        needs.update((each["function"], each["memory"]) for device in status["devices"] for each in device["resident"])
        live.update(Group(progress, devices_now(status)))
        try:
            await asyncio.wait_for(stop.wait(), 0.15 if console.is_terminal else 1.0)
        except TimeoutError:
            continue


def devices_now(status: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 1))
    for name in ("device", "reserved", "", "resident, least recently used first"):
        table.add_column(name, no_wrap=not name.startswith("resident"))
    for device in status["devices"]:
        share = device["used"] / device["device"]["memory"]
        resident = Text()
        for each in device["resident"]:
            name = each["function"].partition(".")[0]
            resident.append(f"{name} ", style="bold green" if each["running"] else "yellow" if each["loading"] else "")
        bar = "█" * round(share * 12)
        table.add_row(device["device"]["id"].partition("/")[2], format_bytes(device["used"]), f"{bar:░<12}", resident)
    return table


# --- the end ----------------------------------------------------------------------------------------------------------


def report(phases: list[Phase], memory: dict[str, Any], status: dict[str, Any]) -> list[str]:
    """Print the tables; return what went wrong."""
    failures = [wrong for phase in phases for wrong in phase.wrong[:5]]
    table = Table(title="calls", title_justify="left", padding=0)
    table.add_column("phase", no_wrap=True)
    for name in ("calls", "at once", "hits", "misses", "in batches", "evicted", "p50 ms", "p99 ms", "wrong"):
        table.add_column(name, justify="right")
    for phase in phases:
        cuts = statistics.quantiles(phase.latencies, n=100, method="inclusive")
        table.add_row(
            phase.name, str(len(phase.calls)), str(phase.at_once), str(phase.starts["hit"]),
            str(phase.starts.total() - phase.starts["hit"]),
            str(phase.together), str(phase.evictions), f"{1e3 * cuts[49]:.0f}", f"{1e3 * cuts[98]:.0f}",
            str(len(phase.wrong)),
        )  # fmt: skip
    console.print(table)

    table = Table(title=f"memory of each device, sampled {memory['samples']} times from /proc", title_justify="left")
    for name in ("device", "budget", "peak", "of budget", "workers at once", "evictions"):
        table.add_column(name, justify="left" if name == "device" else "right")
    by_name = {each["device"]["id"].partition("/")[2]: each for each in status["devices"]}
    for name, budget in {**DEVICES, shared.DEVICE: shared.MEMORY}.items():
        seen = memory["devices"].get(name, {"peak": 0, "workers": 0})
        peak, evicted = seen["peak"], by_name[name]["evictions"]
        row = format_bytes(budget), format_bytes(peak), f"{peak / budget:.0%}", seen["workers"], evicted
        table.add_row(name, *map(str, row))
        if peak > budget:
            failures.append(f"{name} held {format_bytes(peak)}, more than its {format_bytes(budget)}")
    console.print(table)
    if memory["samples"] < 10:
        failures.append("memory was sampled too seldom to say anything")
    return failures


def report_sides(sides: list[Phase], status: dict[str, Any]) -> list[str]:
    """Print what each of the functions that share a device got; return what went wrong."""
    failures = []
    device = next(each["device"] for each in status["devices"] if each["device"]["id"].endswith(shared.DEVICE))
    how, calls = device["labels"].get("compute.enforcement", "none"), sum(len(side.latencies) for side in sides)
    title = f"functions side by side on {shared.DEVICE}, {shared.SECONDS:.0f} s; shares by {how}"
    table = Table(title=title, title_justify="left")
    for name in ("function", "share", "calls/s", "of all", "p50 ms", "wrong"):
        table.add_column(name, justify="left" if name == "function" else "right")
    for side in sides:
        share, served = shared.SHARES[side.name], len(side.latencies)
        table.add_row(
            side.name, f"{share} %", f"{served / shared.SECONDS:.0f}", f"{served / calls:.0%}",
            f"{1e3 * statistics.median(side.latencies):.0f}", str(len(side.wrong)),
        )  # fmt: skip
        failures += side.wrong[:5]
        for place, count in side.places.items():
            if place != (device["id"], str(share)):
                failures.append(f"{side.name}: {count} calls ran on {place[0]} with a share of {place[1]}")
    console.print(table)
    if any(abs(len(side.latencies) / calls - shared.SHARES[side.name] / 100) > 0.1 for side in sides):
        console.print("A share is a limit: other work on this machine, or no control groups, left them other parts.")
    return failures


def sum_up(phases: list[Phase], status: dict[str, Any], seconds: float) -> list[str]:
    """Say what was shown; return what was not."""
    failures = []
    needed = sum(memory for name, memory in status["needs"].items() if name.partition(".")[0] in FUNCTIONS)
    judged = [right for phase in phases for right in phase.digits]
    console.print(
        f"{len(FUNCTIONS)} functions that need {format_bytes(needed)} shared "
        f"{format_bytes(sum(DEVICES.values()))}; {sum(len(phase.calls) for phase in phases)} calls; "
        f"{sum(judged) / len(judged):.1%} of {len(judged)} digits recognised; {seconds:.0f} s in all",
        soft_wrap=True,
    )
    if sum(judged) < 0.97 * len(judged):
        failures.append("fewer than 97 % of the digits were recognised")
    if not sum(phase.evictions for phase in phases):
        failures.append("nothing was evicted: the models all fitted, so nothing was shown")
    return failures


if __name__ == "__main__":
    sys.exit(main())
