"""
Ends what a test run started, once the run is over, however it ended.

Fixtures end their processes. They cannot when pytest is killed, and pytest-xdist kills its workers ten seconds after
Ctrl-C. So each process that a test starts has the mark of its run in its environment (`MARK`), and a process beside
pytest kills what has the mark when pytest is gone. ``leftovers.py MARK`` is that process: it waits until its standard
input is closed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

MARK: Final = "GPUFAAS_TEST_RUN"
_PATIENCE_S: Final = 30.0
"""A process that SIGKILL does not end by then waits for a dead disk or device."""


def pytest_configure() -> None:
    """Mark this process, and start the one that watches it; each worker of pytest-xdist has one of its own."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started with "&" by a script; children would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    mark = f"{os.getpid()}-{os.urandom(8).hex()}"
    theirs, _ours = os.pipe()  # children do not inherit our end: it is closed when this process ends
    watcher = subprocess.Popen([sys.executable, "-IS", __file__, mark], stdin=theirs, start_new_session=True)
    watcher.returncode = 0  # this process does not wait for it: it ends later
    os.close(theirs)
    os.environ[MARK] = mark  # only now: the watcher is not marked


def main(mark: str) -> None:
    while os.read(0, 4096):
        pass
    wanted = f"{MARK}={mark}".encode()
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        found = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit() and _has(each, wanted)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _has(process: Path, wanted: bytes) -> bool:
    try:
        return wanted in (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False


if __name__ == "__main__":
    main(sys.argv[1])
