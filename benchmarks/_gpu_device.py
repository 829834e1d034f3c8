"""What gpu.py asks of a device itself: what it is, how fast bytes reach it, batches, two processes at once."""

import contextlib
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from _platform import ROOT

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import Need
from gpufaas_functions import transfer
from gpufaas_gpu_manager.mps import Mps
from gpufaas_gpu_manager.nvml import Nvml

ARCHITECTURES: Final = ROOT / "functions" / "examples" / "common" / "architectures.py"
sys.path.insert(0, str(ARCHITECTURES.parent))
from _gpu_models import BUILD, GiB, wait  # noqa: E402

MiB: Final = 1 << 20
NO_GPU: Final = {"not run": "there is no GPU here"}
BATCHES: Final = (1, 8, 32, 128)


class HostTarget:
    """Host memory in place of a device: nothing goes on in the background."""

    def empty(self, size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8)

    buffer = empty

    def lane(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def copy(self, to: Any, source: Any) -> Callable[[], None]:
        to.copy_(source)
        return lambda: None


class Machine:
    """What is measured on, and until when."""

    def __init__(self, device: str, until: float, quick: bool) -> None:
        self.device = device
        self.cuda = device.startswith("cuda")
        self.until = until
        self.quick = quick
        self.threads = 0 if self.cuda else 1
        self.nvml = Nvml() if self.cuda else None
        self.index = int(device.partition(":")[2] or 0)
        self.memory = 2 * GiB
        if self.nvml is not None:
            self.memory = self.nvml.describe(self.index)[0] - GiB

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def spec(self, memory: int) -> str:
        return f"{'cuda' if self.cuda else 'cpu'}:{self.index}={memory // MiB}MiB"

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "python": platform.python_version(), "torch": torch.__version__, "processor": platform.machine(),
            "cores": len(os.sched_getaffinity(0)), "device": self.device, "name": "CPU", "quick": self.quick,
            "host_memory": psutil.virtual_memory().total, "load_average": os.getloadavg()[0],
            "commit": _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        }  # fmt: skip
        if self.nvml is not None:
            total, name, _ = self.nvml.describe(self.index)
            query = "driver_version,clocks.max.sm,power.limit,mig.mode.current,pcie.link.gen.max,pcie.link.width.max"
            smi = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv")
            found |= {"name": name, "memory": total, "driver": self.nvml.driver(), "nvidia_smi": smi}
        return found


def gpus_here() -> int:
    """Return the number of GPUs that NVML finds, whether or not torch can use them."""
    try:
        return Nvml().count()
    except InvalidSpec:
        return 0


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as exc:
        return f"not known: {exc}"


# --- transfer ---


def transfers(on: Machine, home: Path) -> dict[str, Any]:
    """Return bytes/s to the device: of plain copies, and of each loader with a file in the page cache."""
    size = (64 if on.quick else 1024) * MiB
    path = home / "transfer.safetensors"
    write_layers(path, size)
    found: dict[str, Any] = {"bytes": size}
    for kind in ("pageable", "pinned"):
        if kind == "pinned" and not on.cuda:
            found[kind] = NO_GPU
            continue
        host = torch.ones(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        to = torch.empty(size, dtype=torch.uint8, device=on.device)
        found[kind] = size / _timed(lambda host=host, to=to: to.copy_(host), on.device)
    loaders: dict[str, Callable[[], object]] = {"own": lambda: transfer.load(path, HostTarget())}
    if on.cuda:
        loaders = {name: lambda load=load: load(path, on.device) for name, load in transfer.LOADERS.items()}
    for name, load in loaders.items():
        try:
            found[name] = size / _timed(load, on.device)
        except ImportError as exc:
            found[name] = {"not run": f"{exc.name} is not installed"}
    if on.cuda:
        found["own, of pinned"] = found["own"] / found["pinned"]
    return found


def write_layers(path: Path, size: int) -> None:
    from safetensors.torch import save_file

    save_file({str(index): torch.ones(4 * MiB) for index in range(size // (16 * MiB))}, path)


def _timed(run: Callable[[], object], device: str, times: int = 5) -> float:
    """Return the median of the seconds of *times* runs, after two."""
    took = []
    for _ in range(times + 2):
        wait(device)
        began = time.perf_counter()
        run()
        wait(device)
        took.append(time.perf_counter() - began)
    return statistics.median(took[2:])


# --- batches, two at once ---


def profiles(on: Machine) -> dict[str, Any]:
    """Return latency and memory by model and batch size, as `gpufaas solve compute` has them; none that do not fit."""
    import architectures

    found: dict[str, Any] = {}
    names = ("squeezenet1_1",) if on.quick else ("alexnet", "squeezenet1_1", "resnet50", "densenet121", "vgg16")
    for name in names:
        found[name] = {}
        with torch.inference_mode():
            model = architectures.ARCHITECTURES[name]().eval().to(on.device)
            for batch in BATCHES[:1] if on.quick else BATCHES if on.cuda else BATCHES[:2]:
                try:
                    if on.cuda:
                        torch.cuda.reset_peak_memory_stats(on.device)
                    host = torch.rand(batch, 3, 224, 224)
                    took = _timed(lambda host=host, model=model: model(host.to(on.device)).argmax(1).cpu(), on.device)
                except torch.cuda.OutOfMemoryError:
                    break
                found[name][str(batch)] = {"latency_s": took, "goodput": batch / took}
                if on.cuda:
                    found[name][str(batch)]["reserved"] = torch.cuda.max_memory_reserved(on.device)
    return found


def together(on: Machine) -> dict[str, Any]:
    """Return the batches/s of one process alone and of each of two at once, by how they share the device."""
    found: dict[str, Any] = {"alone": rates(on, 1, {}), "two, taking turns": rates(on, 2, {})}
    if on.nvml is None:
        return {**found, "two, MPS with half each": NO_GPU}
    try:
        mps = Mps(on.nvml.describe(on.index)[2])
    except OSError as exc:
        return {**found, "two, MPS with half each": {"not run": str(exc)}}
    try:
        found["two, MPS with half each"] = rates(on, 2, mps.env(Need(50, "share"), 50, on.memory // 2))
        found["one of them, alone"] = rates(on, 1, mps.env(Need(50, "share"), 50, on.memory // 2))
    finally:
        mps.close()
    return found


def rates(on: Machine, count: int, env: dict[str, str]) -> list[float]:
    command = [sys.executable, __file__, on.device, "1" if on.quick else "4"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, env={**os.environ, **env}, **pipes) for _ in range(count)]
    for each in running:
        assert each.stdout is not None
        each.stdout.readline()
    for each in running:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    return [float(each.communicate(timeout=120)[0]) for each in running]


def loop(device: str, seconds: float) -> float:
    """Return the batches of 8 per second of one process; it begins when a line comes."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        model, host = BUILD["resnet50"]().eval().to(device), torch.rand(8, 3, 224, 224)
        model(host.to(device)).cpu()
        print("ready", flush=True)
        sys.stdin.readline()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            model(host.to(device)).cpu()
            count += 1
        return count / (time.perf_counter() - began)


if __name__ == "__main__":
    print(loop(sys.argv[1], float(sys.argv[2])), flush=True)
