"""
A neighbour lives: while a function does its worst, all calls of another one are answered. `benchmarks/neighbour_lives`
measures how fast, in more ways. And what a function leaves behind is gone with its worker, also after kill -9.
"""

import time
from collections.abc import Callable

import pytest
from tests.integration.conftest import ECHO_MODEL, HELD, Platform, all_ended, until

Make = Callable[..., Platform]

HOSTILE = """
    import os, signal, subprocess, sys, threading, time

    COMPILED = os.environ["TORCHINDUCTOR_CACHE_DIR"]

    def bomb(end):
        while time.monotonic() < end:
            try:
                if not os.fork():
                    os.setsid()
            except OSError:
                pass
        os._exit(0)

    def burn(end):
        def spin():
            while time.monotonic() < end:
                pass
        for _ in range(15):
            if not os.fork():
                break
        for _ in range(4):
            threading.Thread(target=spin).start()
        spin()
        os._exit(0)

    def fill(end):
        held = []
        while time.monotonic() < end:
            for folder in ("/tmp", "/dev/shm", os.environ.get("GPUFAAS_SCRATCH", "/tmp")):
                try:
                    with open(f"{folder}/gpufaas-fill", "wb") as file:
                        for _ in range(200):
                            file.write(bytes(1 << 20))
                except OSError:
                    pass
                if os.path.exists(f"{folder}/gpufaas-fill"):
                    os.unlink(f"{folder}/gpufaas-fill")
        os._exit(0)

    def flood(end):
        while time.monotonic() < end:
            os.write(1, b"flood\\n" * 10_000)
        os._exit(0)

    def load(device):
        return None

    def handle(model, event, context):
        what, _, seconds = event.text.partition(" ")
        if what == "deep":
            os.makedirs(COMPILED, exist_ok=True)
            os.chdir(COMPILED)
            for _ in range(30):
                os.mkdir("d" * 200)
                os.chdir("d" * 200)
            time.sleep(60)
        elif what == "daemon":
            ends = os.pipe()
            if not os.fork():
                os.setsid()
                if os.fork():
                    os._exit(0)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
                os.write(ends[1], b"here")
                for each in range(3, 200):
                    if each != ends[1]:
                        try:
                            os.close(each)
                        except OSError:
                            pass
                if seconds:
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(600)
                os._exit(0)
            os.read(ends[0], 4)
        elif seconds and not os.fork():
            globals()[what](time.monotonic() + float(seconds))
        return f"{os.getpid()}"
"""


@pytest.mark.parametrize("attack", ["bomb", "burn", "fill", "flood"])
def test_during_an_attack_all_calls_of_a_neighbour_are_answered(platform: Platform, attack: str) -> None:
    hostile = platform.deploy("hostile", HOSTILE)
    neighbour = platform.deploy("neighbour", ECHO_MODEL)
    assert platform.call(neighbour, b"before").text == "before"
    assert platform.call(hostile, b"").status_code == 200

    assert platform.call(hostile, f"{attack} 2".encode()).status_code == 200
    end = time.monotonic() + 2
    while time.monotonic() < end:
        assert platform.call(neighbour, b"meanwhile").text == "meanwhile"

    assert platform.call(neighbour, b"after").text == "after"


@pytest.mark.parametrize("stopped", ["", " stopped"])
def test_a_daemon_that_leaves_its_session_ends_with_its_worker(platform: Platform, stopped: str) -> None:
    hostile = platform.deploy("hostile", HOSTILE)
    before = platform.tree()
    assert platform.call(hostile, f"daemon{stopped}".encode()).status_code == 200
    daemons = [each for each in platform.tree() if each not in before and each.name() != "standby"]
    assert len(daemons) >= 2, "a worker, and its daemon"

    platform.remove("hostile")

    until(lambda: platform.is_empty())
    all_ended(daemons)


@pytest.mark.slow
def test_daemons_also_stopped_ones_end_when_what_started_their_worker_is_killed(make_platform: Make) -> None:
    platform = make_platform("--device", "cpu:0=400MiB").start()
    hostile = platform.deploy("hostile", HOSTILE)
    for kill in (lambda: platform.fork_server().kill(), platform.kill):
        for each in (b"daemon", b"daemon stopped"):
            assert platform.call(hostile, each).status_code == 200
        left = platform.tree()
        assert len(left) >= 4, "the fork server, a worker, and two daemons"

        kill()

        all_ended(left)


def test_a_function_that_hides_files_in_what_it_compiles_is_ended_and_that_is_removed(platform: Platform) -> None:
    if HELD[1] == "none":
        pytest.skip("a function writes anywhere")
    hostile = platform.deploy("hostile", HOSTILE)

    answer = platform.call(hostile, b"deep")

    assert answer.status_code == 502
    assert "holds more than 4.0 GiB or 100,000 files" in platform.log("hostile")
    until(lambda: not list(platform.data.glob("compiled/*/hostile.*/*/d*")), "what it has written is removed")
