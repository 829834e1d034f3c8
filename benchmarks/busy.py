"""
Busy devices: a convnet of some 10 ms on two CPU devices that always have calls waiting, against two bare loops of it.

    python benchmarks/busy.py [--seconds 4] [--rounds 3] [--connections 16,64] [--base TREE] [--json]

Each round runs the bare loops, beside each other, and then the platform (and that of `--base`, another tree), in
turn. Shown are medians: calls/s as a share of the loops', the 99th percentile of latency over the median, and what the
serving process spends on a call (user and system, of /proc): on two cores that is time that the two workers lack.
"""

import argparse
import contextlib
import json
import os
import statistics
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from _platform import ROOT, gpufaas, platform
from _wrk import wrk
from rich.console import Console
from rich.table import Table

OF_BARE, TAIL, CPU_US = 0.98, 1.2, 200.0
"""The bars."""
BODY = struct.pack("<3072f", *((n % 255) / 255 for n in range(3072)))
HANDLER = '''
import torch
from torch import nn


class Cnn(nn.Module):
    """float32[batch, 3, 32, 32] -> float32[batch, 1000]."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 96, 3, padding=1), nn.ReLU(),
            nn.Conv2d(96, 128, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(8),
        )
        self.scores = nn.Sequential(nn.Linear(8192, 512), nn.ReLU(), nn.Linear(512, 1000))

    def forward(self, x):
        return self.scores(self.features(x).flatten(1))


def load(device):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Cnn().to(device).eval()


def handle(model, event, context):
    image = torch.frombuffer(bytearray(event.body), dtype=torch.float32).view(1, 3, 32, 32)
    with torch.inference_mode():
        return {"class": int(model(image).argmax(1))}
'''
LUA = """
wrk.method = "POST"
wrk.body = io.open("%s", "rb"):read("*a")
done = function(summary, latency, requests)
    io.write(string.format("RESULT %%d %%d %%d %%d %%d\\n", summary.requests, summary.duration,
        latency:percentile(50), latency:percentile(99),
        summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.write
            + summary.errors.timeout))
end
"""


def bare(seconds: float) -> None:
    """Be a bare loop: print its calls/s."""
    space: dict[str, Any] = {}
    exec(HANDLER, space)
    model, event = space["load"]("cpu"), type("Event", (), {"body": BODY})
    for _ in range(5):
        space["handle"](model, event, None)
    print("ready", flush=True)
    sys.stdin.readline()
    calls, begun = 0, time.perf_counter()
    while (took := time.perf_counter() - begun) < seconds:
        space["handle"](model, event, None)
        calls += 1
    print(calls / took)


def bare_loops(seconds: float) -> float:
    """Return the calls/s of two loops beside each other."""
    command = [sys.executable, __file__, "--bare", "--seconds", str(seconds)]
    loops = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for each in loops:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in loops:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    return sum(float(each.communicate()[0]) for each in loops)


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def deploy(url: str, home: Path, tree: Path) -> None:
    (home / "cnn").mkdir()
    (home / "cnn" / "handler.py").write_text(textwrap.dedent(HANDLER))
    copies = {f"com.openfaas.scale.{each}": "2" for each in ("min", "max")}
    function = {"lang": "python3-torch", "handler": "./cnn", "image": "cnn:latest", "labels": copies,
                "annotations": {"gpufaas.memory": "512MiB"}}  # fmt: skip
    stack = {"version": "1.0", "provider": {"name": "openfaas"}, "functions": {"cnn": function}}
    (home / "stack.yaml").write_text(json.dumps(stack))
    gpufaas(url, "up", cwd=home, tree=tree)
    (home / "body").write_bytes(BODY)
    (home / "post.lua").write_text(LUA % (home / "body"))


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    trees = {"platform": ROOT} | ({"base": options.base} if options.base else {})
    found: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    with contextlib.ExitStack() as stack:
        served = {}
        for name, tree in trees.items():
            devices = ("--device", "cpu:0=1GiB", "--device", "cpu:1=1GiB")
            url, process, home = stack.enter_context(platform(*devices, tree=tree))
            deploy(url, home, tree)
            served[name] = f"{url}/function/cnn", process.pid, home / "post.lua"
            wrk(served[name][0], 16, 2, served[name][2])  # warm-up
        for _ in range(options.rounds):
            ceiling = bare_loops(options.seconds)
            for count in options.connections:
                for name, (url, pid, script) in served.items():
                    before = cpu_s(pid)
                    seen = wrk(url, count, options.seconds, script)
                    spent = cpu_s(pid) - before
                    assert not seen["errors"], f"{seen['errors']:.0f} calls failed"
                    calls = seen["rps"] * options.seconds
                    found.setdefault((name, count), []).append(
                        (seen["rps"] / ceiling, seen["p99_ms"] / seen["p50_ms"], spent / calls * 1e6)
                    )
    return {
        f"{name} at {count}": dict(
            zip(("of_bare", "tail", "cpu_us"), map(statistics.median, zip(*rounds, strict=True)), strict=True)
        )
        for (name, count), rounds in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=lambda text: [int(each) for each in text.split(",")], default=[16, 64])
    parser.add_argument("--base", type=lambda text: Path(text).resolve(), help="another working tree, with its .venv")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        bare(options.seconds)
        return
    found = measure(options)
    if options.json:
        print(json.dumps(found))
        return
    table = Table("", "of two bare loops", "p99 / p50", "us of the serving process")
    for name, each in found.items():
        table.add_row(name, f"{each['of_bare']:.3f}", f"{each['tail']:.2f}", f"{each['cpu_us']:.0f}")
    Console().print(table, f"Goals: {OF_BARE}, {TAIL}, {CPU_US:.0f}.")


if __name__ == "__main__":
    main()
