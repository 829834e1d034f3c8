"""
The memory of workers on a GPU follows the rule of CPU devices: held to what is reserved, which grows with their need.

On a GPU that is a folder (tests/fakes/cuda.py). On a real one: tests/gpu.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.cuda import FolderGpu
from tests.integration.conftest import Platform, until

from gpufaas_core.units import MiB

TOTAL, CONTEXT, KERNELS = 2000 * MiB, 60 * MiB, 40 * MiB
TAKER = """
    import torch

    def load(device):
        torch.take(50 << 20)
        return device

    def handle(model, event, context):
        torch.take(int(event.text or 1) << 20)
        torch.give()
        return model
"""
FOLDER = "--device", "cuda:0=1000MiB", "--isolation", "none"
"""Its memory is counted in files, in which each process sees all others; a worker within walls does not."""
pytestmark = pytest.mark.slow


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderGpu:
    gpu = FolderGpu(tmp_path / "gpu", TOTAL, CONTEXT, KERNELS)
    monkeypatch.setenv("PYTHONPATH", str(gpu.modules))
    return gpu


def reserved(platform: Platform) -> int:
    (device,) = platform.status()["devices"]
    return sum(each["memory"] for each in device["resident"])


def test_who_declares_nothing_is_lent_the_device_and_occupies_its_context_and_its_peak(
    make_platform: Callable[..., Platform], gpu: FolderGpu
) -> None:
    platform = make_platform(*FOLDER).start()
    path = platform.deploy("taker", TAKER, memory="")

    assert platform.call(path, b"600").text == "cuda:0"

    # 50 MiB of the model are still there when the call takes 600, beside all that is not torch's.
    until(lambda: 750 * MiB <= reserved(platform) < 900 * MiB, "it is measured")
    assert gpu.most <= 1000 * MiB + CONTEXT, "the workers, and one standby's context"


def test_a_call_that_runs_out_of_memory_says_so_and_the_next_one_has_more(
    make_platform: Callable[..., Platform], gpu: FolderGpu
) -> None:
    platform = make_platform(*FOLDER).start()
    path = platform.deploy("taker", TAKER, memory="300Mi")

    first = platform.call(path, b"220")  # of 190, by the account of torch
    (worker,) = platform.workers()
    again = [platform.call(path, b"220") for _ in range(3)]

    assert (first.status_code, first.headers["x-gpufaas-error"]) == (507, "out-of-memory"), first.text
    assert "CUDA out of memory" in first.text
    assert again[-1].status_code == 200, again[-1].text
    assert platform.workers() == [worker], "the same one, told over its connection"
    assert gpu.most <= 1000 * MiB + CONTEXT, "the workers, and one standby's context"


def test_what_was_lent_is_given_back_when_another_model_needs_it(
    make_platform: Callable[..., Platform], gpu: FolderGpu
) -> None:
    platform = make_platform(*FOLDER).start()
    path = platform.deploy("taker", TAKER, memory="")
    other = platform.deploy("other", TAKER, memory="500Mi")
    assert platform.call(path, b"100").status_code == 200

    assert platform.call(other, b"300").status_code == 200

    assert platform.call(path, b"100").headers["x-gpufaas-start"] == "hit"
    assert gpu.most <= 1000 * MiB + CONTEXT, "the workers, and one standby's context"


def test_a_model_that_takes_all_it_gets_stays_within_the_device_and_its_neighbour_lives(
    make_platform: Callable[..., Platform], gpu: FolderGpu
) -> None:
    platform = make_platform(*FOLDER).start()
    neighbour = platform.deploy("neighbour", TAKER, memory="200Mi")
    hog = platform.deploy(
        "hog",
        """
        import time, torch

        def slowly(device, reserved=torch.cuda.memory_reserved):
            time.sleep(0.1)
            return reserved(device)

        def load(device):
            torch.cuda.memory_reserved = slowly  # its next call is there before it has said what it holds
            return None

        def handle(model, event, context):
            while True:
                torch.take(10 << 20)
        """,
        memory="300Mi",
    )
    assert platform.call(neighbour, b"10").status_code == 200

    answers = [platform.call(hog) for _ in range(3)]

    assert {each.status_code for each in answers} == {507}
    assert gpu.most_of_one <= reserved(platform) - 200 * MiB, "what torch does not know of is counted, too"
    assert gpu.most <= 1000 * MiB + CONTEXT, "the workers, and one standby's context"
    assert platform.call(neighbour, b"10").text == "cuda:0"


SAYS = """
    import os, gpu_folder

    def load(device):
        return None

    def handle(model, event, context):
        return {"pid": os.getpid(), "gpu": os.environ["CUDA_VISIBLE_DEVICES"]}
"""


def test_a_standby_has_made_its_context_and_its_worker_is_charged_for_it(
    make_platform: Callable[..., Platform], gpu: FolderGpu
) -> None:
    platform = make_platform(*FOLDER).start()
    until(lambda: list(gpu.held().values()) == [CONTEXT], "a standby has a context, and nothing else has one")
    (standby,) = gpu.held()
    path = platform.deploy("says", SAYS, memory="300Mi")
    other = platform.deploy("other", TAKER, memory="")

    said = platform.call(path).json()

    assert said == {"pid": standby, "gpu": "GPU-folder"}
    assert platform.call(other, b"100").status_code == 200
    assert standby in [each.pid for each in platform.workers()]
    until(lambda: CONTEXT + 50 * MiB < reserved(platform) - 300 * MiB < 400 * MiB, "the context is in what is measured")
    until(lambda: list(gpu.held().values()).count(CONTEXT) == 2, "a worker without tensors, and the next standby")


def test_a_function_with_variables_of_contexts_and_one_beside_a_gpu_that_is_full_are_forked(
    make_platform: Callable[..., Platform], gpu: FolderGpu
) -> None:
    gpu.fill(TOTAL - CONTEXT + 1)
    platform = make_platform(*FOLDER).start()
    until(lambda: "a standby cannot use its GPU" in platform.said(), "it says so")
    gpu.fill(0)
    path = platform.deploy("says", SAYS, memory="300Mi", env={"CUDA_LAUNCH_BLOCKING": "1"})

    said = platform.call(path).json()

    assert said["gpu"] == "GPU-folder"
    assert platform.status()["standbys"]["taken"] == 0
