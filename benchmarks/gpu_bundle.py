"""
What anybody with a GPU can measure for us in under ten minutes, as one file to send back.

    python benchmarks/gpu_bundle.py [--device cuda:0] [--out gpu-bundle.json] [--quick]

Into the bundle go: the machine; the results of ``tests/gpu``; how fast weights reach the device; latency and memory of
five models by batch size (the same quantities as the table of `gpufaas plan compute`); and how much two processes that
run the same model at once slow each other down. Runs on a CPU, too, where it says so.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import nn

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "functions" / "examples" / "common"))
import architectures  # noqa: E402

MODELS: Final[dict[str, Callable[[], nn.Module]]] = {
    "alexnet": architectures.alexnet,
    "squeezenet1.1": architectures.squeezenet1_1,
    "resnet50": lambda: architectures.resnet(3, 4, 6, 3, expansion=4),
    "densenet121": lambda: architectures.densenet(6, 12, 24, 16),
    "vgg16": lambda: architectures.vgg(
        64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"
    ),
}
BATCHES: Final = (4, 8, 16, 32, 64, 128)
MiB: Final = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a GPU for us: one file to send back.")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("gpu-bundle.json"))
    parser.add_argument("--quick", action="store_true", help="one model, small batches, no tests: tries the script")
    parser.add_argument("--loop", metavar="MODEL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.loop:
        print(json.dumps(loop(given.loop, given.device)), flush=True)
        return
    say = Console(stderr=True).print
    names = ["squeezenet1.1"] if given.quick else list(MODELS)
    batches = BATCHES[:1] if given.quick else BATCHES
    bundle: dict[str, Any] = {"machine": machine(given.device)}
    say(f"[bold]{bundle['machine']['name']}[/]: weights to the device")
    bundle["transfer_bytes_per_s"] = transfers(given.device, (16 if given.quick else 256) * MiB)
    bundle["profiles"] = {}
    for name in names:
        say(f"{name}: batches of {', '.join(map(str, batches))}")
        bundle["profiles"][name] = profile(name, batches, given.device)
    bundle["slowdown_of_two"] = {}
    for name in names:
        say(f"{name}: two processes at once")
        bundle["slowdown_of_two"][name] = slowdown(name, given.device)
    if not given.quick:
        say("tests/gpu")
        bundle["tests"] = tests()
    given.out.write_text(json.dumps(bundle, indent=1) + "\n")
    say(f"written: {given.out} ({given.out.stat().st_size} bytes)")


def machine(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(), "torch": torch.__version__, "processor": platform.machine(),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"), "device": device, "name": "CPU",
    }  # fmt: skip
    if device.startswith("cuda"):
        of = torch.cuda.get_device_properties(device)
        found |= {"name": of.name, "memory_bytes": of.total_memory, "multiprocessors": of.multi_processor_count}
        query = "driver_version,clocks.max.sm,power.limit,mig.mode.current"
        found["nvidia_smi"] = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv")
    return found


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as exc:
        return f"not known: {exc}"


def transfers(device: str, size: int) -> dict[str, float]:
    """Return bytes per second from host memory to *device*, pageable and pinned."""
    found = {}
    for kind in ("pageable", "pinned"):
        if kind == "pinned" and not device.startswith("cuda"):
            continue
        host = torch.empty(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        took = _timed(lambda host=host: host.to(device, copy=True), device, 5)
        found[kind] = size / statistics.median(took)
    return found


def _timed(run: Callable[[], object], device: str, times: int) -> list[float]:
    took = []
    for _ in range(times + 2):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        took.append(time.perf_counter() - start)
    return took[2:]


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def profile(name: str, batches: tuple[int, ...], device: str) -> dict[str, dict[str, float]]:
    """Return latency, goodput and memory by batch size; a batch that does not fit is left out."""
    found: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        model = MODELS[name]().eval().to(device)
        for batch in batches:
            try:
                if device.startswith("cuda"):
                    torch.cuda.reset_peak_memory_stats(device)
                host = torch.rand(batch, 3, 224, 224)
                took = _timed(lambda host=host: model(host.to(device)).argmax(1).cpu(), device, 10)
            except torch.cuda.OutOfMemoryError:
                break
            latency = statistics.median(took)
            found[str(batch)] = {"latency_s": latency, "goodput": batch / latency}
            if device.startswith("cuda"):
                total = torch.cuda.get_device_properties(device).total_memory
                found[str(batch)]["memory_pct"] = 100 * torch.cuda.max_memory_reserved(device) / total
    return found


def loop(name: str, device: str, seconds: float = 4.0) -> float:
    """Return the batches of 8 per second of one process; it begins when a line comes."""
    with torch.inference_mode():
        model, host = MODELS[name]().eval().to(device), torch.rand(8, 3, 224, 224)
        _timed(lambda: model(host.to(device)).cpu(), device, 1)
        print("ready", flush=True)
        sys.stdin.readline()
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            model(host.to(device)).cpu()
            count += 1
        return count / (time.perf_counter() - start)


def slowdown(name: str, device: str) -> float:
    """Return how many times longer a batch takes when two processes run the model at once."""
    alone, together = (_rates(name, device, count) for count in (1, 2))
    return alone[0] / statistics.mean(together)


def _rates(name: str, device: str, count: int) -> list[float]:
    command = [sys.executable, __file__, "--device", device, "--loop", name]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    for each in running:
        assert each.stdout is not None
        each.stdout.readline()
    for each in running:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    return [float(each.communicate(timeout=120)[0]) for each in running]


def tests() -> str:
    """Return what the GPU tests print."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-ra", "-p", "no:cacheprovider"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False).stdout[-6000:]


if __name__ == "__main__":
    main()
