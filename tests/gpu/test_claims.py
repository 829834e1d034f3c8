"""
Claims about devices, on a real GPU where there is one, and the same on a CPU device: memory within its budget in a swap
storm, a model that takes all there is, transfers, MPS.
"""

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import Platform, make_platform  # noqa: F401 - a fixture

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import GiB, MiB
from gpufaas_gpu_manager.mps import PROGRAM
from gpufaas_gpu_manager.nvml import Nvml

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def nvml() -> Nvml | None:
    with contextlib.suppress(InvalidSpec):
        return Nvml() if Nvml().count() else None
    return None


needs_gpu = pytest.mark.skipif(nvml() is None, reason="no NVIDIA GPU here (NVML finds none)")
on_both = pytest.mark.parametrize(
    "kind", [pytest.param("cuda", marks=[needs_gpu, pytest.mark.gpu]), pytest.param("cpu", marks=pytest.mark.long)]
)
HOG = """
    import torch

    def load(device):
        return device

    def handle(model, event, context):
        taken = []
        while True:
            taken.append(torch.ones(8 * 1024 * 1024, device=model))
"""
SMALL = """
    import torch

    def load(device):
        return torch.ones(1024, 1024, device=device)

    def handle(model, event, context):
        return str(int((model @ model)[0, 0]))
"""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", sys.argv[:1])


@on_both
@pytest.mark.timeout(500)
def test_a_swap_storm_answers_all_and_never_holds_more_than_the_device(kind: str, tmp_path: Path) -> None:
    import swap

    from gpufaas_gpu_manager.machine_memory import available_memory

    cuda = nvml() if kind == "cuda" else None
    device = "cpu" if cuda is None else "cuda:0"
    size = 16 if cuda is None else 256
    assert available_memory() > 4 * GiB
    given = argparse.Namespace(calls=40, load=0.5, skew=1.0, size=size, seed=1, sleep=20.0)
    drawn, _ = swap.storm(tmp_path, given, devices=1, room=5, device=device)
    held = swap.held_by_workers
    if cuda is not None:
        import pynvml

        used = lambda: pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used  # noqa: E731
        before = used()
        held = lambda _: {device: used() - before}  # noqa: E731
    large = f"{kind}:0={2 if cuda is None else 8}GiB"
    room = swap.occupation(drawn.source, BENCHMARKS.parent, (), large)

    storm = swap.Storm(drawn.source, drawn.sequence, drawn.times, 1, 5, kind, held)
    found = swap.summary([storm.over(BENCHMARKS.parent, (), room)])

    assert found["calls"] == 40
    assert 0 < found["misses"] < 1
    assert found["reserved"] <= 1
    assert 0 < found["held"] <= 1


@on_both
def test_a_model_that_takes_all_there_is_gets_an_error_and_its_neighbour_lives(
    kind: str,
    make_platform: Callable[..., Platform],  # noqa: F811 - the fixture
) -> None:
    memory, small = ("3GiB", "1GiB") if kind == "cuda" else ("600MiB", "100MiB")
    platform = make_platform("--device", f"{kind}:0={memory}").start()
    neighbour = platform.deploy("neighbour", SMALL, memory=small)
    hog = platform.deploy("hog", HOG, memory=small)
    assert platform.call(neighbour).text == "1024"

    answers = [platform.call(hog) for _ in range(2)]

    assert [each.status_code for each in answers] == [507] * 2
    assert [each.headers["x-gpufaas-error"] for each in answers] == ["out-of-memory"] * 2
    assert platform.call(neighbour).text == "1024"
    (device,) = platform.status()["devices"]
    assert device["used"] <= device["device"]["memory"]


@needs_gpu
@pytest.mark.gpu
def test_weights_reach_a_gpu_at_four_fifths_of_a_pinned_copy(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from gpufaas_functions import transfer

    size = GiB
    save_file({str(index): torch.ones(16 * MiB) for index in range(size // (64 * MiB))}, tmp_path / "w.safetensors")
    host = torch.ones(size, dtype=torch.uint8, pin_memory=True)
    to = torch.empty(size, dtype=torch.uint8, device="cuda:0")

    def took(run: Callable[[], object]) -> float:
        every = []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            torch.cuda.synchronize()
            every.append(time.perf_counter() - began)
        return min(every)

    pinned = took(lambda: to.copy_(host, non_blocking=True))
    loaded = took(lambda: transfer.load(tmp_path / "w.safetensors", transfer.CudaTarget("cuda:0")))

    found = transfer.load(tmp_path / "w.safetensors", transfer.CudaTarget("cuda:0"))
    assert all(bool((tensor == 1).all()) for tensor in found.values())
    assert pinned / loaded >= 0.8


@needs_gpu
@pytest.mark.gpu
def test_blocks_of_torchs_allocator_grow_in_place_in_a_worker(
    make_platform: Callable[..., Platform],  # noqa: F811 - the fixture
) -> None:
    """A torch with CUDA reads that when it is imported, in the fork server."""
    platform = make_platform("--device", "cuda:0=4GiB").start()
    settings = 'torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]'
    path = platform.deploy("asks", SMALL.replace("str(int((model @ model)[0, 0]))", f"str({settings})"), memory="1GiB")

    assert platform.call(path).text == "True"


@needs_gpu
@pytest.mark.gpu
def test_a_captured_model_answers_as_the_model_does() -> None:
    import torch

    from gpufaas_functions import graphed

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda().eval()
    fast = graphed(model, torch.zeros(4, 64, device="cuda:0"))

    with torch.no_grad():
        inputs = [torch.randn(4, 64, device="cuda:0") for _ in range(3)] + [torch.randn(2, 64, device="cuda:0")]
        answers = [fast(each) for each in inputs]
        assert all(torch.allclose(a, model(each), atol=1e-5) for a, each in zip(answers, inputs, strict=True))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"{PROGRAM} is not installed")
def test_two_workers_share_a_gpu_by_mps(make_platform: Callable[..., Platform]) -> None:  # noqa: F811 - the fixture
    platform = make_platform("--device", "cuda:0=4GiB", "--isolation", "none").start()
    paths = [
        platform.deploy(name, f"{SMALL}\n    # {name}", memory="1500MiB", sharing="share", compute="50")
        for name in ("one", "two")
    ]

    answers = [platform.begin(path) for path in paths]

    assert [each.result().text for each in answers] == ["1024"] * 2
    assert "its workers take turns" not in platform.said()
