"""Nothing that a test started outlives the test run, even when pytest is killed."""

import subprocess
import sys

import psutil
from tests.waiting import until

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
