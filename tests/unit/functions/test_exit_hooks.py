"""What a worker does at its end: what its author left, and not what the fork server had."""

import subprocess
import sys
import textwrap

import pytest

BOTH = """
    import atexit, os, sys, time, weakref
    from gpufaas_functions import exit_hooks
    exit_hooks.EXIT_S = 0.1
    atexit.register(print, "of the fork server")
    weakref.finalize(atexit, print, "of the fork server")
    class Old: pass
    old = Old()
    weakref.finalize(old, print, "finalizer of an old object")
    exit_hooks.forget()
    if not os.fork():
        atexit.register(print, "of the author")
        weakref.finalize(weakref, print, "finalizer of the author")
        del old
        {}
        exit_hooks.run()
        sys.stdout.flush()
        os._exit(0)
    os.wait()
    sys.stdout.flush()
    os._exit(0)
"""
GONE = "finalizer of an old object"
"""It is called since the object is gone."""


def run(more: str = "") -> tuple[list[str], str]:
    program = textwrap.dedent(BOTH).format(more)
    done = subprocess.run([sys.executable, "-u", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines(), done.stderr


def test_a_fork_does_what_was_left_in_it_and_not_what_was_left_before() -> None:
    assert run() == ([GONE, "of the author", "finalizer of the author"], "")


def test_one_that_raises_is_told_and_the_others_run() -> None:
    printed, said = run("atexit.register(lambda: 1 / 0)")

    assert printed == [GONE, "of the author", "finalizer of the author"]
    assert "ZeroDivisionError" in said


@pytest.mark.parametrize("begun", ["", "exit_hooks.limit(); exit_hooks.EXIT_S = 600; "])
def test_one_that_does_not_end_is_ended_and_its_place_is_told(begun: str) -> None:
    """*begun*: its end has begun before, as of one whose tasks are cancelled first: it has no more time for that."""
    printed, said = run(f"{begun}atexit.register(time.sleep, 600)")

    assert printed == [GONE]
    assert said.startswith("Timeout (")
    assert "exit_hooks.py" in said
