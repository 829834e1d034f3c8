"""
A fork server that was stopped (SIGSTOP, a debugger) took every later load with it: calls waited for their time limits,
nothing said why, and with a dozen loads outstanding the platform itself hung on the fork server's full socket.
"""

import signal
from pathlib import Path

import pytest
from tests.integration.conftest import ECHO, ECHO_MODEL, HTTP, Platform, all_ended, until

pytestmark = pytest.mark.timeout(120)


WAITS = """
import os, sys, time
while "gpufaas_gpu_manager.zygote" in sys.orig_argv and os.path.exists({gate!r}):
    time.sleep(0.01)
"""
"""A sitecustomize: fork servers do not begin while that file exists."""


def test_a_stopped_fork_server_is_replaced_and_its_workers_go_on(
    make_platform: object, open_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = open_path / "gate"
    (open_path / "sitecustomize.py").write_text(WAITS.format(gate=str(gate)))
    monkeypatch.setenv("PYTHONPATH", str(open_path))
    platform: Platform = make_platform("--device", "cpu:0=600MiB").start()  # type: ignore[operator]
    warm, cold = platform.deploy("warm", ECHO_MODEL), platform.deploy("cold", ECHO_MODEL)
    platform.call(warm, b"loads")
    stopped = platform.fork_server()
    (survivor,) = platform.workers()

    gate.touch()
    stopped.suspend()
    waiting = platform.begin(cold, b"placed on the next one")
    until(lambda: platform.http.get("/readyz").status_code == 503, "/readyz shows it")
    assert "fork server" in platform.http.get("/readyz").text
    gate.unlink()
    answer = waiting.result()

    assert (answer.status_code, answer.text) == (200, "placed on the next one")
    until(lambda: platform.http.get("/readyz").status_code == 200, "a standby may have answered before")
    again = platform.call(warm, b"still loaded")
    assert (again.text, again.headers["x-gpufaas-start"]) == ("still loaded", "hit")
    assert survivor.is_running()
    assert "the fork server is stuck: it is stopped" in platform.said(), "one that hangs otherwise is given 60 s"

    # When the last of its workers has ended, so does the stopped one, and the device has its memory back.
    platform.remove("warm")
    platform.remove("cold")  # its worker may have been a standby of the stopped one
    all_ended([stopped, survivor])
    until(lambda: not any(each["used"] for each in platform.status()["devices"]), "the memory is free")
    assert platform.stop() == 0


@pytest.mark.long
def test_a_dozen_loads_while_it_is_stopped_do_not_hang_the_platform(make_platform: object) -> None:
    """The kernel's queue of the socket between them takes some ten messages."""
    platform: Platform = make_platform("--device", "cpu:0=2GiB").start()  # type: ignore[operator]
    paths = [platform.deploy(f"f{number}", ECHO, HTTP) for number in range(16)]
    platform.fork_server().suspend()

    calls = [platform.begin(path, b"x") for path in paths]

    until(lambda: platform.queued() + platform.running() + sum(each.done() for each in calls) == len(calls))
    assert platform.http.get("/healthz").status_code == 200
    assert {call.result().text for call in calls} == {"x"}
    assert platform.stop() == 0


@pytest.mark.long
def test_nothing_is_left_when_the_platform_is_killed_beside_a_stopped_fork_server(make_platform: object) -> None:
    """A stopped process does not notice that its parent died: the fork server that replaced it ends it."""
    platform: Platform = make_platform("--device", "cpu:0=600MiB").start()  # type: ignore[operator]
    platform.call(platform.deploy("warm", ECHO_MODEL), b"x")
    stopped = platform.fork_server()
    stopped.suspend()
    until(lambda: "the fork server is stuck" in platform.said())
    until(lambda: platform.http.get("/readyz").status_code == 200)
    tree = platform.tree()
    assert stopped in tree

    platform.signal(signal.SIGKILL)
    platform.wait()

    all_ended(tree)


def test_nothing_is_left_when_the_platform_is_killed_just_after_its_fork_server_was_stopped(
    make_platform: object,
) -> None:
    """Nothing has noticed yet that it is stopped. The kernel lets it go on, and it finds its socket closed."""
    platform: Platform = make_platform("--device", "cpu:0=600MiB").start()  # type: ignore[operator]
    platform.call(platform.deploy("warm", ECHO_MODEL), b"x")
    tree = platform.tree()
    platform.fork_server().suspend()

    platform.signal(signal.SIGKILL)
    platform.wait()

    all_ended(tree)
