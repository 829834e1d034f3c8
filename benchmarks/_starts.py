"""What coldstart.py and swap.py share: models, the same start by hand, phases of an answer, the page cache."""

import contextlib
import ctypes
import json
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import torch
from safetensors.torch import save_file

MiB: Final = 1 << 20
BODY: Final = b'{"seed": 7}'
WEIGHTS: Final = frozenset(("load", "read", "transfer", "init"))
"""The phases of a start that are the load itself; the other phases of a load are what the platform adds."""

_LAYERS: Final = '''
"""{layers} linear layers of {width} x {width}."""

import json
import time
from pathlib import Path

import torch
from gpufaas_functions import load_module
from torch import nn

def build():
    return nn.Sequential(*(nn.Linear({width}, {width}, bias=False) for _ in range({layers})))


def load(device):
    return load_module(build, Path(__file__).parent / "weights.safetensors", device)


def handle(model, event, context):
    seed = json.loads(event.body)["seed"]
    with torch.inference_mode():
        time.sleep({sleep_s})
        given = torch.rand({rows}, {width}, generator=torch.Generator().manual_seed(seed))
        return {{"mean": round(model(given.to(model[0].weight.device)).mean().item(), 6)}}
'''
_BY_HAND: Final = """
import gc, json, os, sys, time
import torch, safetensors.torch
gc.freeze()  # else a collection in a fork writes to, and so copies, all that was imported
class Event: body = sys.argv[2].encode()
for line in sys.stdin:
    if os.fork() == 0:
        torch.set_num_threads(int(sys.argv[1]))
        sys.path.insert(0, line.strip())
        import handler
        began = time.perf_counter()
        model = handler.load(sys.argv[3])
        loaded = time.perf_counter()
        answer = handler.handle(model, Event, None)
        ended = time.perf_counter()
        handler.handle(model, Event, None)
        again = time.perf_counter() - ended
        times = {"all": ended - began, "load": loaded - began, "run": ended - loaded, "again": again}
        print(json.dumps({"times": times, "answer": answer}), flush=True)
        os._exit(0)
    os.wait()
    print("gone", flush=True)
"""


def write_layers(
    folder: Path, size_mib: int, *, width: int, rows: int = 1, seed: int = 0, sleep_s: float = 0.0
) -> None:
    """
    Write a handler whose weights have *size_mib* MiB.

    :param width: of a layer, which has so many times so many float32
    :param rows: of the input; more of them are more work
    :param sleep_s: that each call sleeps besides: a device that computes leaves the processor free
    """
    layers = max(1, size_mib * MiB // (4 * width * width))
    folder.mkdir(parents=True)
    (folder / "handler.py").write_text(_LAYERS.lstrip().format(layers=layers, width=width, rows=rows, sleep_s=sleep_s))
    generator = torch.Generator().manual_seed(seed)
    scale = (3 / width) ** 0.5  # keeps the deviation of what comes in
    weights = {
        f"{index}.weight": torch.empty(width, width).uniform_(-scale, scale, generator=generator)
        for index in range(layers)
    }
    save_file(weights, folder / "weights.safetensors")


class ByHand:
    """A process with torch that starts models without the platform: each in a fresh fork, which loads and runs once."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    def start(self, folder: Path) -> tuple[dict[str, float], Any]:
        """Return the times in seconds (``all``, ``load``, ``run``, ``again``: the second run) and the answer."""
        assert self._child.stdin
        assert self._child.stdout
        self._child.stdin.write(f"{folder}\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line.startswith("{"):
            raise SystemExit(f"{folder}: its handler does not run by hand")
        self._child.stdout.readline()  # it is gone, and so is its mapping of the weights
        found = json.loads(line)
        return found["times"], found["answer"]


@contextlib.contextmanager
def by_hand(threads: int, device: str = "cpu") -> Iterator[ByHand]:
    command = [sys.executable, "-c", _BY_HAND, str(threads), BODY.decode(), device]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # of the import, as in the platform's fork server
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as child:
        yield ByHand(child)


def phases(response: httpx.Response) -> dict[str, float]:
    """Return the phases of Server-Timing in seconds, without ``load-`` in front of their names."""
    found = re.findall(r"([\w-]+);dur=([\d.]+)", response.headers["server-timing"])
    each = {name: float(ms) / 1e3 for name, ms in found}
    if any(name.startswith("load-") for name in each):
        each.pop("load", None)  # their sum
    return {name.removeprefix("load-"): seconds for name, seconds in each.items()}


def beyond_load_and_run(took_s: float, by_phase: Mapping[str, float]) -> float:
    """Return what a start took beside waiting in the queue, the load itself and the run."""
    return took_s - sum(each for name, each in by_phase.items() if name in WEIGHTS | {"queue", "run", "batch"})


def into_page_cache(files: list[Path]) -> None:
    """Read *files*."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(MiB):
                pass


def out_of_page_cache(files: list[Path]) -> float:
    """Ask the kernel to drop *files* from its page cache; return the share of their pages that are still there."""
    there = pages = 0
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            found = _resident(file.fileno(), path.stat().st_size)
        there, pages = there + sum(found), pages + len(found)
    return there / max(1, pages)


def _resident(descriptor: int, size: int) -> list[int]:
    """Return 1 for each page of a file that is in the page cache, else 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    at = ctypes.c_void_p(address)
    failed = libc.mincore(at, ctypes.c_size_t(size), found)
    libc.munmap(at, ctypes.c_size_t(size))
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return [each & 1 for each in found]
