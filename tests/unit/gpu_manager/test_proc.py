import os
import subprocess
import sys
import time

from gpufaas_gpu_manager.proc import cpu_seconds


def test_what_a_process_and_the_children_it_waited_for_used() -> None:
    before = cpu_seconds(os.getpid())

    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    subprocess.run(
        [sys.executable, "-c", "import time\nwhile time.process_time() < 0.2: pass"], check=True, env={}, timeout=60
    )

    assert 0.25 <= cpu_seconds(os.getpid()) - before < 5


def test_a_process_that_is_gone_used_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    assert cpu_seconds(ended.pid) == 0.0
