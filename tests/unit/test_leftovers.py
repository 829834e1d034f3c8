"""Nothing that a test started outlives the test run, even when pytest is killed."""

import signal
import subprocess
import sys

import psutil
from tests.waiting import until

STARTS_A_PROGRAM = """
import signal, subprocess, sys
from tests import leftovers

leftovers.pytest_configure()
subprocess.run([sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT))"])
"""
RUN = """
import subprocess, sys, time
from tests import leftovers

leftovers.pytest_configure()
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(started.pid, flush=True)
time.sleep(600)
"""


def test_what_a_killed_run_started_ends_with_it() -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    started = psutil.Process(int(run.stdout.readline()))
    assert started.is_running()

    run.kill()
    run.communicate()

    until(lambda: not started.is_running() or started.status() == psutil.STATUS_ZOMBIE, "it was killed")


def test_a_run_that_a_script_started_in_the_background_starts_programs_that_ctrl_c_ends() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what it starts with "&"
    try:
        done = subprocess.run([sys.executable, "-c", STARTS_A_PROGRAM], capture_output=True, text=True, check=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "default_int_handler" in done.stdout
