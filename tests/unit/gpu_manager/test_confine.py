"""
The limits that a worker sets before a function's code runs. Each test has a process of its own: they cannot be undone.
"""

import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpufaas_gpu_manager.confine import CAP_SYS_ADMIN, may
from gpufaas_gpu_manager.memory_watch import used_by

MiB = 1024 * 1024


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(not may(CAP_SYS_ADMIN), reason="needs a capability to give up")
def test_a_capability_that_was_given_up_is_not_had_again_by_a_program_of_root() -> None:
    assert run("""
        import subprocess, sys
        from gpufaas_gpu_manager.confine import CAP_SYS_ADMIN, give_up, may
        give_up(CAP_SYS_ADMIN)
        asks = "from gpufaas_gpu_manager.confine import *; from gpufaas_gpu_manager.confine import may; print(may(21))"
        child = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True).stdout.strip()
        print(may(CAP_SYS_ADMIN), child, may(0))
    """) == "False False True"  # fmt: skip


def test_a_hard_limit_is_what_may_be_had_and_no_more() -> None:
    assert run(f"""
        import resource
        from gpufaas_gpu_manager.confine import CAP_SYS_RESOURCE, give_up, set_data_limit
        set_data_limit({500 * MiB}, {800 * MiB})
        give_up(CAP_SYS_RESOURCE)
        resource.setrlimit(resource.RLIMIT_DATA, ({800 * MiB}, {800 * MiB}))
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        except ValueError as exc:
            print(exc)
    """) == "not allowed to raise maximum limit"  # fmt: skip
    assert resource.getrlimit(resource.RLIMIT_DATA)[1] == resource.RLIM_INFINITY, "ours is as it was"


@pytest.mark.skipif(not may(CAP_SYS_ADMIN), reason="only with CAP_SYS_ADMIN")
def test_files_in_its_dev_shm_are_its_own() -> None:
    name = f"/dev/shm/gpufaas-test-{os.getpid()}"
    assert run(f"""
        import os
        from gpufaas_gpu_manager.confine import Confine, confine
        confine(Confine(own_shm=True))
        open({name!r}, "w").close()
        print(os.listdir("/dev/shm"))
    """) == f"['{Path(name).name}']"  # fmt: skip
    assert not Path(name).exists()


TAKES = {
    "private": "kept = bytearray(b'x' * SIZE)",
    "shared": "import mmap; kept = mmap.mmap(-1, SIZE); kept.write(b'x' * SIZE)",
    "a memory file that is not mapped": "import os; fd = os.memfd_create('x'); os.write(fd, b'x' * SIZE)",
    "in a child": "import os\nif os.fork() == 0: kept = bytearray(b'x' * SIZE)",
    "shared with a child": "import mmap, os; kept = mmap.mmap(-1, SIZE); os.fork(); kept.write(b'x' * SIZE)",
    "private, then forked": "import os; kept = bytearray(b'x' * SIZE); os.fork()",
}


@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES.keys())
def test_the_watcher_counts_memory_of_every_kind_once(take: str) -> None:
    code = f"import os, sys\nSIZE = {100 * MiB}\n{take}\nos.write(1, b'took\\n')\nsys.stdin.read()"
    began = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with began as process:
        assert process.stdout is not None
        for _ in range(2 if "fork" in take else 1):
            assert process.stdout.readline() == "took\n"
        used = used_by(process.pid)
        process.communicate("")
    assert 100 * MiB <= used < 150 * MiB
