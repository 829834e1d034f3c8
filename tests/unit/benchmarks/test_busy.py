"""What benchmarks/busy.py makes of its rounds, and of what the kernel says that a process has used."""

import subprocess
import sys

import pytest


def row(us: float) -> dict[str, float]:
    return {"rps": 100, "us": us, "user": 3, "kernel": 1, "waits": 2, "displaced": 0, "faults": 0}


def test_a_server_is_compared_with_another_one_round_by_round() -> None:
    from busy import OURS, times

    found = {(OURS, 16): [row(400), row(900), row(600)], ("raw epoll", 16): [row(100), row(300), row(100)]}

    assert times(found, OURS, "raw epoll", 16) == pytest.approx(4.0)
    assert times(found, OURS, "Starlette", 16) is None


def test_the_part_in_the_kernel_is_that_of_all_rounds() -> None:
    from busy import medians

    rows = [{**row(100), "user": 0, "kernel": 1}, {**row(300), "user": 7, "kernel": 0}, row(200) | {"user": 0}]

    assert medians(rows)["kernel_us"] == pytest.approx(200 * 2 / 9)


def test_only_the_platform_is_judged() -> None:
    from busy import OURS, bars

    found = {(OURS, 16): [row(150), row(900), row(190)], (OURS, 64): [row(300)], ("raw epoll", 16): [row(500)]}

    assert [each.verdict for each in bars(found)] == ["met", "MISSED"]


BUSY = """
import sys, time
print(flush=True)
sys.stdin.readline()
until = time.thread_time() + 0.05
while time.thread_time() < until:
    pass
print(flush=True)
sys.stdin.readline()
"""


def test_what_a_process_uses_is_counted_by_call() -> None:
    from busy import Used

    with subprocess.Popen([sys.executable, "-S", "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin
        assert child.stdout
        child.stdout.readline()
        before = Used(child.pid)
        for turn in range(2):
            child.stdin.write(b"\n")
            child.stdin.flush()
            if not turn:
                child.stdout.readline()
                used = Used(child.pid).since(before, 10)

    assert used["us"] >= 5_000
    assert used["user"] >= 0
    assert used["kernel"] >= 0
    assert used["waits"] >= 0
