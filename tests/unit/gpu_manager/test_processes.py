"""A worker that was reaped has no process: another process may have its id."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpufaas_gpu_manager.launch.processes import ForkedProcess


@pytest.mark.parametrize("reaped", [True, False])
def test_what_has_the_process_id_of_a_reaped_worker_is_not_killed(reaped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as other:
        worker = SimpleNamespace(limits=None, pid=other.pid, reaped=reaped)
        nothing = cast(Any, None)

        ForkedProcess(cast(Any, worker), nothing, nothing, nothing, nothing).kill()

        other.communicate(b"\n")
    assert other.returncode == (0 if reaped else -9)
