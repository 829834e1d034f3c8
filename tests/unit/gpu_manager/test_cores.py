"""Which cores workers get where the kernel does not limit their time."""

import pytest

from gpufaas_gpu_manager.cores import CpuShare, Pinning


@pytest.mark.parametrize(
    ("cores", "share", "threads"), [(0.6, 0, 1), (0.6, 50, 1), (4, 0, 4), (4, 50, 2), (4, 30, 2), (4, 25, 1)]
)
def test_as_many_threads_as_can_run_at_once(cores: float, share: int, threads: int) -> None:
    assert CpuShare("cpu-0", cores, share).threads == threads


def test_devices_have_cores_of_their_own_and_workers_those_that_the_fewest_have() -> None:
    pinning = Pinning(range(8))
    half, quarter = CpuShare("cpu-0", 4, 50), CpuShare("cpu-0", 4, 25)

    first, second, third = pinning.take(half), pinning.take(quarter), pinning.take(quarter)
    other = pinning.take(CpuShare("cpu-1", 3, 0))

    assert (first.cpus, second.cpus, third.cpus, other.cpus) == ((0, 1), (2,), (3,), (4, 5, 6))
    first.give_back()
    first.give_back()
    assert pinning.take(half).cpus == (0, 1), "and giving back twice is giving back once"
    assert pinning.take(CpuShare("cpu-0", 4)).cpus == (0, 1, 2, 3), "one without a share has all"


def test_more_devices_than_cores_have_some_in_common() -> None:
    pinning = Pinning([3, 5])

    assert [pinning.take(CpuShare(f"cpu-{each}", 0.6, 50)).cpus for each in range(3)] == [(3,), (5,), (3,)]
