"""
What batches are worth: a CNN on one CPU device under saturation, call by call and eight calls at a time, against the
same model in a bare loop.

    python benchmarks/batching.py [--seconds 5] [--rounds 3] [--callers 32] [--json]

Each round runs all four in turn, so that all meet the same machine; medians of the rounds are shown. The model uses one
thread; callers and gateway need another processor: wrk makes the calls, if it is there. The first bar holds where the
bare loop itself gives that much. The time between the end of a batch and the begin of the next is measured in the
handler: it says more than calls/s where others use the machine, too.
"""

import argparse
import asyncio
import json
import re
import shutil
import statistics
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from _platform import gpufaas, platform
from rich.console import Console
from rich.table import Table

SIZE = 8
MORE_CALLS, OF_BARE = 1.5, 0.9
"""The bars: calls/s in batches against call by call, and against the bare loop."""
BODY = struct.pack("<3072f", *((n % 255) / 255 for n in range(3072)))
HANDLER = '''
import statistics, time

import torch
from torch import nn


class Cnn(nn.Module):
    """float32[batch, 3, 32, 32] -> float32[batch, 1000]. Most of its weights are in two wide layers, as in AlexNet."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()
        )
        self.scores = nn.Sequential(nn.Linear(4096, 2048), nn.ReLU(), nn.Linear(2048, 1000))

    def forward(self, x):
        return self.scores(self.features(x).flatten(1))


def load(device):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Cnn().to(device).eval()


ended, idle_s, took_s, sizes = 0.0, [], [], []


def handle(model, event, context):
    if not event.body:  # what was measured since it was asked last
        found = [statistics.median(each or [0]) * 1e3 for each in (idle_s, took_s)], statistics.fmean(sizes or [0])
        for each in (idle_s, took_s, sizes):
            each.clear()
        return found
    return handle_batch(model, [event], [context])[0]


def handle_batch(model, events, contexts):
    global ended
    began = time.perf_counter()
    answers = classes(model, events)
    idle_s.append(began - ended)
    sizes.append(len(events))
    ended = time.perf_counter()
    took_s.append(ended - began)
    return answers


def classes(model, events):
    images = [torch.frombuffer(bytearray(each.body), dtype=torch.float32).view(3, 32, 32) for each in events]
    with torch.inference_mode():
        best = model(torch.stack(images)).argmax(1).tolist()
    return [{"class": each} for each in best]
'''


LUA = """
wrk.method = "POST"
wrk.body = io.open("%s", "rb"):read("*a")
done = function(summary, latency, requests)
    io.write(string.format("RESULT %%d %%d %%d\\n", summary.requests, summary.duration,
        summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.write
            + summary.errors.timeout))
end
"""


class Seen(NamedTuple):
    """What a handler saw."""

    idle_ms: float
    """Median time between the end of a batch, or call, and the begin of the next."""
    run_ms: float
    """Median time of a batch, or call."""
    size: float
    """Calls in a batch."""


def bare(size: int, seconds: float) -> None:
    """Be the bare loop: print calls/s, and the processor time of a call in ms."""
    space: dict[str, Any] = {}
    exec(HANDLER, space)
    model = space["load"]("cpu")
    events = [type("Event", (), {"body": BODY})] * size
    for _ in range(5):
        space["handle_batch"](model, events, events)
    calls, begun, cpu_s = 0, time.perf_counter(), time.process_time()
    while (took := time.perf_counter() - begun) < seconds:
        space["handle_batch"](model, events, events)
        calls += size
    print(calls / took, (time.process_time() - cpu_s) * 1e3 / calls)


def bare_loop(size: int, seconds: float) -> tuple[float, float]:
    command = [sys.executable, __file__, "--bare", str(size), "--seconds", str(seconds)]
    per_s, cpu_ms = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(per_s), float(cpu_ms)


def cpu_s(process: psutil.Process) -> float:
    """Return the processor time of the workers of a platform."""
    workers = [each for child in process.children() for each in child.children()]
    return sum(each.cpu_times().user + each.cpu_times().system for each in workers)


def saturate(url: str, function: str, callers: int, seconds: float, home: Path) -> tuple[float, Seen]:
    """Call *function* from so many connections at once; return calls/s, and what the handler saw."""
    target = f"{url}/function/{function}"
    httpx.post(target).raise_for_status()  # what it has seen until now does not count
    if shutil.which("wrk"):
        script = home / "post.lua"
        (home / "body").write_bytes(BODY)
        script.write_text(LUA % (home / "body"))
        command = ["wrk", "-t1", f"-c{callers}", f"-d{seconds:g}s", "-s", str(script), target]
        found = re.search(r"RESULT (\d+) (\d+) (\d+)", subprocess.run(command, capture_output=True, text=True).stdout)
        assert found is not None
        calls, micros, failed = map(int, found.groups())
        assert not failed, f"{failed} of {calls} calls failed"
        per_s = calls / (micros / 1e6)
    else:
        per_s = asyncio.run(call(url, function, callers, seconds))
    (idle_ms, run_ms), size = httpx.post(target).raise_for_status().json()
    return per_s, Seen(idle_ms, run_ms, size)


async def call(url: str, function: str, callers: int, seconds: float) -> float:
    """As `saturate`, without wrk; return calls/s."""
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /function/{function} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(BODY)}\r\n\r\n"
    request = head.encode() + BODY
    until, calls = time.perf_counter() + seconds, 0

    async def caller() -> None:
        nonlocal calls
        reader, writer = await asyncio.open_connection(host, int(port))
        while time.perf_counter() < until:
            writer.write(request)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert answer.startswith(b"http/1.1 200"), answer
            await reader.readexactly(int(answer.partition(b"content-length: ")[2].split(b"\r\n", 1)[0]))
            calls += 1
        writer.close()

    begun = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return calls / (time.perf_counter() - begun)


def deploy(url: str, home: Path) -> None:
    (home / "cnn").mkdir()
    (home / "cnn" / "handler.py").write_text(textwrap.dedent(HANDLER))
    functions = {
        name: {"lang": "python3-torch", "handler": "./cnn", "image": f"{name}:latest", "annotations": {
            "gpufaas.memory": "512MiB", "gpufaas.batch-max": str(size),
        }} for name, size in (("alone", 1), ("batched", SIZE))
    }  # fmt: skip
    stack = {"version": "1.0", "provider": {"name": "openfaas"}, "functions": functions}
    (home / "stack.yaml").write_text(json.dumps(stack))
    gpufaas(url, "up", cwd=home)


def measure(seconds: float, rounds: int, callers: int) -> dict[str, float]:
    names = (
        "bare_1", "alone", "bare_8", "batched", "batch_size", "bare_ms", "worker_ms", "idle_1_ms", "run_1_ms",
        "idle_8_ms", "run_8_ms",
    )  # fmt: skip
    rows: dict[str, list[float]] = {name: [] for name in names}

    def note(**found: float) -> None:
        for name, each in found.items():
            rows[name].append(each)

    with platform("--device", "cpu:0=2GiB") as (url, child, home):
        deploy(url, home)
        for function in ("alone", "batched"):
            saturate(url, function, callers, 1.0, home)  # loads it
        for _ in range(rounds):
            note(bare_1=bare_loop(1, seconds)[0])
            per_s, seen = saturate(url, "alone", callers, seconds, home)
            note(alone=per_s, idle_1_ms=seen.idle_ms, run_1_ms=seen.run_ms)
            per_s, ms = bare_loop(SIZE, seconds)
            note(bare_8=per_s, bare_ms=ms)
            before_s, begun = cpu_s(psutil.Process(child.pid)), time.perf_counter()
            per_s, seen = saturate(url, "batched", callers, seconds, home)
            calls = per_s * (time.perf_counter() - begun)
            worker_ms = (cpu_s(psutil.Process(child.pid)) - before_s) * 1e3 / calls
            note(batched=per_s, batch_size=seen.size, idle_8_ms=seen.idle_ms, run_8_ms=seen.run_ms, worker_ms=worker_ms)
    found = {name: statistics.median(each) for name, each in rows.items()}
    for name, one, other in (
        ("gain", "batched", "alone"), ("bare_gain", "bare_8", "bare_1"), ("of_bare", "batched", "bare_8"),
        ("cpu_of_bare", "bare_ms", "worker_ms"),
    ):  # fmt: skip
        found[name] = statistics.median(a / b for a, b in zip(rows[one], rows[other], strict=True))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=5)  # wrk takes whole ones
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--callers", type=int, default=4 * SIZE)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        bare(options.bare, options.seconds)
        return 0
    found = measure(options.seconds, options.rounds, options.callers)
    if options.json:
        print(json.dumps(found))
    else:
        table = Table(title="A CNN on one CPU device, one thread, medians of the rounds")
        for column in ("", "calls/s in a bare loop", "calls/s served", "runs, ms", "device idle between, ms"):
            table.add_column(column, justify="right" if column else "left")
        for what, bare_per_s, per_s, size in (
            ("call by call", "bare_1", "alone", 1), (f"{SIZE} at a time", "bare_8", "batched", SIZE),
        ):  # fmt: skip
            runs, idle = found[f"run_{size}_ms"], found[f"idle_{size}_ms"]
            table.add_row(what, f"{found[bare_per_s]:.0f}", f"{found[per_s]:.0f}", f"{runs:.2f}", f"{idle:.2f}")
        Console().print(table)
        print(f"batches of {found['batch_size']:.1f} calls: {found['gain']:.2f} times the calls of call by call (at "
              f"least {MORE_CALLS:g}, where the bare loop has {found['bare_gain']:.2f}), {found['of_bare']:.2f} of the "
              f"bare loop (at least {OF_BARE:g})")  # fmt: skip
        print(f"processor time for a call: {found['worker_ms']:.2f} ms in the worker, {found['bare_ms']:.2f} ms in the "
              f"bare loop, which is {found['cpu_of_bare']:.2f} of that, whatever else the machine does")  # fmt: skip
    met = found["gain"] >= min(MORE_CALLS, found["bare_gain"]) and found["of_bare"] >= OF_BARE
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
