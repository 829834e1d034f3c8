"""
All that one machine with a GPU can tell, in under ten minutes: one bundle to send back, and tables.

    python benchmarks/gpu.py [--device cuda:0] [--out gpu-bundle.json] [--minutes 9] [--quick]

Sections: starts of models by tier and phase, beside loading them by hand in three ways and a fresh process; how fast
weights reach the device, as a share of a pinned copy; a swap storm with the memory of the device; what a warm call
adds; latency and memory by batch size; two processes at once, with MPS if that is there; `tests/gpu`. It needs this
working tree and its package, nothing else.

Without a GPU the same code runs on a CPU device with small models, and what only a GPU has is marked "not run". So is
what no time is left for. Nothing is estimated.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import _gpu_models
import coldstart
import httpx
import psutil
import swap
import torch
from _gpu_device import ARCHITECTURES, Machine, MiB, gpus_here, profiles, together, transfers
from _gpu_models import BUILD, GiB, write_weights
from _platform import ROOT, gpufaas, platform, serves_with
from _starts import into_page_cache, out_of_page_cache, phases
from rich.console import Console
from rich.table import Table

from gpufaas_core import local_login
from gpufaas_core.errors import InvalidSpec

ON_CPU: Final = ("resnet50", "vgg16", "bert-base", "gpt2", "transformer-1g")
PICKLED_TO: Final = GiB + GiB // 2
"""Larger models are not written a second time for torch.load, and not put into a function's bundle."""
HANDLER: Final = """
import json, pathlib, models, torch
from gpufaas_functions import load_module


def load(device):
    if device == "cpu":
        torch.set_num_threads(1)
    return load_module(models.BUILD[{name!r}], pathlib.Path({path!r}), device)


def handle(model, event, context):
    return {{"answer": models.answer(model, json.loads(event.body)["seed"])}}
"""
FILLER: Final = """
import mmap, torch


def load(device):
    if device == "cpu":
        return mmap.mmap(-1, {size}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.empty({size}, dtype=torch.uint8, device=device)


def handle(model, event, context):
    return "full"
"""
say = Console(stderr=True).print


# --- starts ---


class Hand:
    """Starts models without the platform."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    def start(self, how: str, name: str, path: Path) -> dict[str, Any]:
        assert self._child.stdin
        assert self._child.stdout
        self._child.stdin.write(json.dumps([how, name, str(path)]) + "\n")
        self._child.stdin.flush()
        found: dict[str, Any] = json.loads(self._child.stdout.readline())
        if "status" in found:
            return {"not run": f"the process ended with status {found['status']}"}
        self._child.stdout.readline()
        return found


@contextlib.contextmanager
def by_hand(on: Machine) -> Iterator[Hand]:
    paths = os.pathsep.join((str(ARCHITECTURES.parent), os.environ.get("PYTHONPATH", "")))
    threads = str(on.threads or len(os.sched_getaffinity(0)))
    with subprocess.Popen(
        [sys.executable, _gpu_models.__file__, on.device, threads],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    ) as child:  # fmt: skip
        yield Hand(child)


def fresh_process(on: Machine, name: str, path: Path) -> float:
    """Return the seconds of a new Python that imports torch, loads the model and runs it once."""
    code = "import sys; from pathlib import Path; import _gpu_models as m; m.start('platform', *sys.argv[1:2], "
    code += "Path(sys.argv[2]), sys.argv[3], 1)"
    paths = os.pathsep.join((str(ROOT / "benchmarks"), str(ARCHITECTURES.parent), os.environ.get("PYTHONPATH", "")))
    began = time.perf_counter()
    command = [sys.executable, "-c", code, name, str(path), on.device]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": paths})
    return time.perf_counter() - began


def models_of(on: Machine, home: Path) -> list[str]:
    """Return the models that fit: on the device, in host memory with their copies, and on the disk."""
    if on.quick or not on.cuda:
        return ["resnet50"] if on.quick else list(ON_CPU)
    room = min(on.memory * 0.8, psutil.virtual_memory().available / 3, shutil.disk_usage(home).free / 3)
    sizes = {f"transformer-{size}g": size * GiB for size in (1, 4, 16)}
    return [name for name in BUILD if sizes.get(name, 0) <= room]


def write_function(home: Path, name: str, weights: Path) -> None:
    """Write the function of a model, with its weights in the bundle unless they are large."""
    folder = home / name
    folder.mkdir()
    path = str(weights)
    if weights.stat().st_size <= PICKLED_TO:
        os.link(weights, folder / "weights.safetensors")
        path = "weights.safetensors"  # a worker runs in the folder of its handler
    (folder / "handler.py").write_text(HANDLER.format(name=name, path=path))
    shutil.copy(_gpu_models.__file__, folder / "models.py")
    shutil.copy(ARCHITECTURES, folder)


def deploy(url: str, home: Path, memory: dict[str, int]) -> None:
    functions = {
        name: {
            "lang": "python3-torch", "handler": f"./{name}", "image": f"{name}:latest",
            "annotations": {"gpufaas.memory": f"{size // MiB}MiB"},
        } for name, size in memory.items()
    }  # fmt: skip
    stack = {"version": "1.0", "provider": {"name": "openfaas"}, "functions": functions}
    (home / "stack.yaml").write_text(json.dumps(stack))
    gpufaas(url, "up", cwd=home)


def starts(on: Machine, home: Path) -> dict[str, Any]:
    """Return, by model, what a start takes by hand and on the platform, and what a warm call takes."""
    found: dict[str, Any] = {}
    weights = {}
    for name in models_of(on, home):
        path = home / f"{name}.safetensors"
        found[name] = section(starts_by_hand, on, name, path)
        if "bytes" in found[name]:
            weights[name] = path
    filler = on.memory - 256 * MiB
    memory = {name: int(found[name]["bytes"] * 1.25) + (GiB if on.cuda else 300 * MiB) for name in weights}
    source = home / "functions"
    source.mkdir()
    (source / "filler").mkdir()
    size = filler - (GiB if on.cuda else 64 * MiB)
    (source / "filler" / "handler.py").write_text(FILLER.format(size=size))
    for name, path in weights.items():
        write_function(source, name, path)
    variants: dict[str, list[str]] = {"as it is": []} | {
        name: [flag, "0"] for name, flag in coldstart.VARIANTS if serves_with(ROOT, flag)
    }
    bind = ["--bind", str(home)] if serves_with(ROOT, "--bind") else []  # for weights that are in no bundle
    for variant, options in variants.items():
        with (
            platform("--device", on.spec(on.memory), *bind, *options) as (url, _, data),
            httpx.Client(base_url=url, auth=local_login.find(url), timeout=300) as client,
        ):
            deploy(url, source, {**memory, "filler": filler})
            served = coldstart.Served(variant, client, data)
            for name, path in weights.items():
                answer = found[name]["platform"].get("answer")
                found[name][f"platform {variant}"] = (
                    section(served_starts, served, name, path, answer) if on.left_s > 30 else {"not run": "out of time"}
                )
            if variant == "as it is":
                found["warm calls"] = section(warm_calls, client, next(iter(weights)))
    return found


def starts_by_hand(on: Machine, name: str, path: Path) -> dict[str, Any]:
    """Write the weights of a model to *path*, and return what its start takes without the platform."""
    size = write_weights(name, path)
    found: dict[str, Any] = {"bytes": size}
    with by_hand(on) as hand:
        for how in ("platform", "safetensors", "torch.load"):
            if how == "torch.load" and size <= PICKLED_TO:
                from safetensors.torch import load_file

                torch.save(load_file(path), path.with_suffix(".pt"))
            elif how == "torch.load":
                found[how] = {"not run": "the model is not written a second time"}
                continue
            hand.start(how, name, path)  # the first one warms the page cache
            found[how] = hand.start(how, name, path)
    path.with_suffix(".pt").unlink(missing_ok=True)
    found["fresh process"] = {"all": fresh_process(on, name, path)}
    say(f"  {name}: by hand {found['platform'].get('all', 0):.3f} s, {on.left_s:.0f} s left")
    return found


def served_starts(served: coldstart.Served, name: str, path: Path, expected: int) -> dict[str, Any]:
    """Return the times of starts on a platform: the first one, then from each place where the weights can be."""
    found: dict[str, Any] = {}
    files = served.weights(path)
    for case in ("first", "page cache", "no page cache", "warm"):
        freed = still = 0.0
        if case != "warm":
            freed = coldstart.evict(served)
        if case == "page cache":
            into_page_cache(files)
        elif case == "no page cache":
            still = out_of_page_cache(files)
        times, tier = coldstart.called(served, name, {"answer": expected})
        found[case] = {**times, "tier": tier, "freed": freed, "still cached": still}
    return found


def warm_calls(client: httpx.Client, name: str, calls: int = 50) -> dict[str, float]:
    """Return what a warm call takes, and what of that is its run."""
    whole, run = [], []
    for _ in range(calls):
        began = time.perf_counter()
        response = client.post(f"/function/{name}", content=b'{"seed": 7}')
        whole.append(time.perf_counter() - began)
        run.append(phases(response)["run"])
    added = statistics.median(a - b for a, b in zip(whole, run, strict=True))
    return {"p50": statistics.median(whole), "run": statistics.median(run), "added": added, "calls": calls}


# --- a swap storm ---


def storm(on: Machine, home: Path) -> dict[str, Any]:
    """Return what a swap storm of 20 models does, with room for five."""
    given = argparse.Namespace(
        calls=40 if on.quick else 300, load=0.65, skew=1.0, size=16 if on.quick else 512 if on.cuda else 64, seed=1,
        sleep=20.0,
    )  # fmt: skip
    drawn, facts = swap.storm(home / "storm", given, devices=1, room=5, device=on.device)
    room = swap.occupation(drawn.source, ROOT, (), on.spec(on.memory))
    held = swap.held_by_workers
    if on.nvml is not None:
        nvml, index = on.nvml, on.index
        before = nvml.used(index)
        held = lambda _: {on.device: nvml.used(index) - before}  # noqa: E731
    kind = "cuda" if on.cuda else "cpu"
    meets = swap.Storm(drawn.source, drawn.sequence, drawn.times, 1, 5, kind, held)
    return {**facts, "occupation": room, **swap.summary([meets.over(ROOT, (), room)])}


def tests(on: Machine) -> dict[str, Any]:
    """Return what the GPU tests print."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-ra", "-p", "no:cacheprovider"]
    env = {**os.environ, "GPUFAAS_TESTS": "all"}
    limit = max(30.0, on.left_s)
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=limit, check=False, env=env)
    except subprocess.TimeoutExpired:
        return {"not run": f"not over after {limit:.0f} s"}
    return {"status": done.returncode, "said": done.stdout[-6000:]}


# --- all of it ---


def section(run: Callable[..., Any], *args: object) -> Any:
    """Return what *run* finds. A failure of one section costs none of the others: a GPU may not be lent again."""
    try:
        return run(*args)
    except (Exception, SystemExit) as exc:
        text = traceback.format_exc()
        say(f"  failed: {type(exc).__name__}: {exc}", markup=False)
        return {"not run": f"it failed: {type(exc).__name__}: {exc}"[:300], "traceback": text[-4000:]}


def show(bundle: dict[str, Any]) -> None:
    shown = Table(title=f"starts on {bundle['machine']['name']}, ms", title_justify="left")
    columns = ("model", "MiB", "how", "case", "tier", "all", "load", "first run", "beyond load + run")
    for place, heading in enumerate(columns):
        shown.add_column(heading, justify="left" if place in (0, 2, 3, 4) else "right")
    models = {
        name: each for name, each in bundle.get("starts", {}).items() if isinstance(each, dict) and "bytes" in each
    }
    for name, of in models.items():
        size = f"{of['bytes'] / MiB:.0f}"
        for how, each in of.items():
            if how == "bytes":
                continue
            cases = each.items() if "page cache" in each else [("", each)]
            for case, times in cases:
                if "not run" in times:
                    shown.add_row(name, size, how, case, f"not run: {times['not run']}")
                    continue
                cells = (
                    times.get("all", times.get("took")),
                    times.get("load"),
                    times.get("first run", times.get("run")),
                )
                texts = ["" if cell is None else f"{1e3 * cell:.1f}" for cell in (*cells, times.get("beyond"))]
                shown.add_row(name, size, how, case, times.get("tier", ""), *texts)
    Console(width=max(Console().width, 130)).print(shown)
    for name, value in bundle.items():
        if name not in ("machine", "tests") and not (name == "starts" and models):
            print(f"{name}: {json.dumps(value)[:1000]}")
    print(f"tests/gpu: {bundle['tests'].get('said', str(bundle['tests']))[-300:].strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("gpu-bundle.json"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--quick", action="store_true", help="the smallest of each, no tests: tries the script")
    given = parser.parse_args()
    random.seed(1)
    if given.device == "cpu" and (gpus := gpus_here()):
        say(f"NVML finds {gpus} GPU(s), and torch {torch.__version__} cannot use them: this measures a CPU device.")
        say("For the GPU, install a torch with CUDA that its driver supports.")
    try:
        on = Machine(given.device, time.monotonic() + 60 * given.minutes, given.quick)
    except InvalidSpec as exc:
        parser.error(str(exc).replace("--device cpu:0=SIZE", "--device cpu"))
    if on.cuda and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} cannot use {given.device}: install one with CUDA that its driver supports"
        )
    bundle: dict[str, Any] = {"machine": on.facts()}
    if not on.cuda:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gpufaas-gpu-") as folder:
        sections: dict[str, tuple[float, Callable[[], object]]] = {
            "transfer": (20, lambda: transfers(on, Path(folder))),
            "starts": (60, lambda: starts(on, Path(folder))),
            "storm": (90, lambda: storm(on, Path(folder))),
            "together": (40, lambda: together(on)),
            "profiles": (30, lambda: profiles(on)),
            "tests": (30, lambda: tests(on) if not on.quick else {"not run": "--quick"}),
        }
        for name, (needs_s, run) in sections.items():
            say(f"[bold]{name}[/] ({on.left_s:.0f} s left)")
            bundle[name] = section(run) if on.left_s > needs_s else {"not run": "out of time"}
            given.out.write_text(json.dumps(bundle, indent=1) + "\n")
    show(bundle)
    say(f"written: {given.out} ({given.out.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
