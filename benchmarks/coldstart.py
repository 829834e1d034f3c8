"""
Cold starts on a CPU device, weights in the page cache: what the platform adds to loading a model by hand.

By hand: a process that has torch imported maps the same safetensors, builds the model on meta, assigns the weights and
runs the first inference (a fresh fork of that process each time). The platform: one HTTP request for a model that is
resident nowhere, until its answer; the two models take turns on a device that holds one of them, so the time includes
the eviction of the other. Rounds of by hand, platform, in one run; medians, and the difference round by round.

    .venv/bin/python benchmarks/coldstart.py [--rounds 7] [--json]
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from _platform import ROOT, gpufaas, platform
from rich.console import Console
from rich.table import Table

MODELS = ("resnet50", "vgg16")
BODY = b'{"seed": 7}'
GOAL_S = 0.3
PHASES = ("queue", "load-room", "load-fork", "load-import", "load-load", "run")
BY_HAND = """
import json, os, sys, time
import torch, safetensors.torch
sys.path.insert(0, sys.argv[1])
for line in sys.stdin:
    arch, weights = line.split()
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(int(sys.argv[2]))
        began = time.perf_counter()
        from common import architectures
        model = architectures.load(arch, weights, "cpu")
        loaded = time.perf_counter()
        answer = architectures.answer(arch, model, b'{"seed": 7}')
        print(json.dumps({"load": loaded - began, "all": time.perf_counter() - began, "answer": answer}), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def timings(response: httpx.Response) -> dict[str, float]:
    """Return the phases of Server-Timing in seconds."""
    return {
        name: float(ms) / 1e3 for name, ms in re.findall(r"([\w-]+);dur=([\d.]+)", response.headers["server-timing"])
    }


def deploy(url: str, examples: Path) -> None:
    """Build and deploy copies of the examples in *examples*, on a platform whose device holds one of the models."""
    shutil.copytree(ROOT / "functions" / "examples", examples, ignore=shutil.ignore_patterns("build"))
    # What vgg16 needs is measured at its first call; the estimate from its weights alone would not fit here.
    stack = examples / "stack.yaml"
    stack.write_text(stack.read_text().replace("  vgg16:\n", "  vgg16:\n    annotations: {gpufaas.memory: 780Mi}\n"))
    for model in MODELS:
        gpufaas(url, "up", "-f", str(stack), "--filter", model, cwd=examples)


def by_hand(child: subprocess.Popen[str], model: str, examples: Path) -> dict[str, Any]:
    """Have *child*, which runs `BY_HAND`, load *model* and answer once; return its times in seconds and its answer."""
    assert child.stdin
    assert child.stdout
    weights = next((examples / "build" / model).rglob("weights.safetensors"))
    child.stdin.write(f"{model} {weights}\n")
    child.stdin.flush()
    found: dict[str, Any] = json.loads(child.stdout.readline())
    return found


def cold_start(client: httpx.Client, model: str, expected: object) -> dict[str, float]:
    """Call *model*, which is not resident, through the platform; return the times in seconds, in all and by phase."""
    began = time.perf_counter()
    response = client.post(f"/function/{model}", content=BODY)
    took = time.perf_counter() - began
    assert response.status_code == 200, response.text
    assert response.headers["x-gpufaas-start"] == "miss", "the model was still resident"
    assert response.json() == expected, "the answers differ"
    return {"platform": took, **timings(response)}


def measure(client: httpx.Client, examples: Path, rounds: int, console: Console) -> dict[str, list[dict[str, float]]]:
    """Return the times of each round in seconds, by model; a round before the first warms profiles and page cache."""
    found: dict[str, list[dict[str, float]]] = {model: [] for model in MODELS}
    arguments = [sys.executable, "-c", BY_HAND, str(examples), str(len(os.sched_getaffinity(0)))]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        for turn in range(rounds + 1):
            for model in MODELS:
                with console.status(f"{model}, round {turn} of {rounds}"):
                    reference = by_hand(child, model, examples)
                    times = cold_start(client, model, reference["answer"])
                if turn:
                    found[model].append({**times, "by hand": reference["all"], "by hand load": reference["load"]})
    return found


def show(results: dict[str, dict[str, float]]) -> None:
    table = Table(title="cold start on a CPU device, ms (medians)", title_justify="left")
    for name in ("model", "request to answer", *PHASES, "by hand", "added", "goal"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for model, each in results.items():
        cells = (each["platform"], *(each[name] for name in PHASES), each["by hand"], each["added"])
        table.add_row(model, *(f"{1e3 * cell:.0f}" for cell in cells), f"{1e3 * GOAL_S:.0f}")
    Console(width=max(Console().width, 120)).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    console = Console(stderr=True)
    with platform("--device", "cpu:0=800MiB") as (url, _, home), httpx.Client(base_url=url, timeout=120) as client:
        with console.status("building and deploying"):
            deploy(url, home / "examples")
        rounds = measure(client, home / "examples", options.rounds, console)
    results = {
        model: {
            **{key: statistics.median(each[key] for each in of_model) for key in of_model[0]},
            "added": statistics.median(each["platform"] - each["by hand"] for each in of_model),
        }
        for model, of_model in rounds.items()
    }
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)


if __name__ == "__main__":
    main()
