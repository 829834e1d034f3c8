"""Programs whose output is shown while they run."""

import collections
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from gpufaas_core.errors import InvalidSpec

_TAIL_LINES: Final = 20


def end_as_by_ctrl_c() -> None:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does: with what it has begun. After nohup, SIGHUP does not."""
    for each in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, signal.default_int_handler)


def run_shown(
    command: Sequence[str], folder: Path, env: Mapping[str, str], progress: Callable[[str], None],
    failed: Callable[[int], str],
) -> None:  # fmt: skip
    """
    Run *command* in *folder*, and give each line of its output to *progress*.

    :param failed: gives the beginning of the message, for an exit status that is not 0
    :raises InvalidSpec: the exit status is not 0; with the last lines
    """
    tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(
        command, cwd=folder, env=env, text=True, errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                tail.append(line.rstrip())
                progress(tail[-1])
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
            raise
    if process.returncode:
        last = next((line for line in reversed(tail) if line), "it printed nothing")
        shown = "".join(f"\n    {line}" for line in tail)
        raise InvalidSpec(f"{failed(process.returncode)}: {last}{shown}")
