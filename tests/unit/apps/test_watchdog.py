"""A process whose event loop stands still says where, and can be stopped. Real processes, whose loops really stand."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S

PROGRAM = """
import asyncio, hashlib, logging, signal, sys, time
import uvloop
from gpufaas_apps import watchdog as its
from gpufaas_apps.watchdog import Watchdog, notify

def in_python():
    while True:
        pass

def in_c():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # half an hour; heeds no signal

def until_a_line_comes():
    sys.stdin.readline()

async def main(block, stall_s, grace_s, overdue_s):
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, block)
    its.STALL_S, its.OVERDUE_S = stall_s, overdue_s
    watchdog = Watchdog(loop, grace_s)
    watchdog.start()
    notify("READY=1")
    print("up", flush=True)
    await stop.wait()
    watchdog.stop()
    print("orderly", flush=True)

logging.basicConfig(format="%(name)s %(message)s")
loop = uvloop.new_event_loop()
loop.run_until_complete(main(globals()[sys.argv[1]], *map(float, sys.argv[2:])))
"""
"""Its loop stands from SIGUSR1 on."""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[subprocess.Popen[str]] = []

    def begin(
        block: str, *, stall_s: float = 0.3, grace_s: float = 20.0, overdue_s: float = 20.0, **env: str
    ) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, block, str(stall_s), str(grace_s), str(overdue_s)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **env},
        )  # fmt: skip
        made.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield begin
    for each in made:
        each.kill()
        each.communicate()


def stand(process: "subprocess.Popen[str]") -> str:
    """Let the loop stand; return what it says first of that."""
    process.send_signal(signal.SIGUSR1)
    assert process.stderr is not None
    assert select.select([process.stderr], [], [], LIMIT_S)[0], "it says that it stands"
    return os.read(process.stderr.fileno(), 65536).decode()  # `communicate` gives the rest


@pytest.mark.parametrize("where", ["in_python", "in_c"])
@pytest.mark.slow
def test_a_loop_that_stands_says_where_and_a_second_signal_ends_it(start: Start, where: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(LIMIT_S)
        process = start(where, NOTIFY_SOCKET=str(tmp_path / "notify"))
        said = stand(process)

        process.terminate()
        while systemd.recv(100) != b"STOPPING=1":
            pass  # until the first one is heard: two that come together are one
    time.sleep(0.4)  # two that are closer than 0.2 s are one, too
    assert process.poll() is None, "the first one asks"
    process.terminate()
    said += process.communicate(timeout=LIMIT_S)[1]

    assert process.returncode == 128 + signal.SIGTERM
    assert said.count("watchdog loop.stands for ") == 1
    assert f" {where}\n" in said.partition("process.ended")[0]
    assert "watchdog process.ended at once: a second SIGTERM" in said


def test_one_that_was_asked_and_does_not_end_is_ended(start: Start) -> None:
    process = start("in_c", grace_s=0.2, overdue_s=0.4)
    stand(process)

    process.terminate()
    _, said = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 1
    assert "it was asked to stop 0.6 s ago" in said


@pytest.mark.slow
def test_a_loop_that_turns_again_says_how_long_it_stood(start: Start) -> None:
    process = start("until_a_line_comes")
    said = stand(process)
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write("\n")
    process.stdin.flush()
    while "loop.turns again after" not in said:
        said += os.read(process.stderr.fileno(), 65536).decode()
    process.terminate()

    out, _ = process.communicate(timeout=LIMIT_S)

    assert (process.returncode, out) == (0, "orderly\n")
    assert said.startswith("watchdog loop.stands for ")


@pytest.mark.long
def test_a_process_that_was_stopped_and_goes_on_did_not_stand(start: Start) -> None:
    process = start("in_c", stall_s=2.0)
    process.send_signal(signal.SIGSTOP)
    time.sleep(5.0)
    process.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    process.terminate()

    out, said = process.communicate(timeout=LIMIT_S)

    assert (process.returncode, out, said) == (0, "orderly\n", "")


def test_systemd_hears_of_it_as_long_as_the_loop_turns(start: Start, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(LIMIT_S)
        began = time.monotonic()
        process = start("in_c", NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="200000")
        assert systemd.recv(100) == b"READY=1"
        assert [systemd.recv(100) for _ in range(5)] == [b"WATCHDOG=1"] * 5
        assert time.monotonic() - began > 4 * 0.05, "four in the time that systemd gives for one"

        stand(process)
        systemd.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                systemd.recv(100)
        time.sleep(0.5)
        with pytest.raises(BlockingIOError):
            systemd.recv(100)
        process.terminate()
        systemd.settimeout(LIMIT_S)
        assert systemd.recv(100) == b"STOPPING=1"
