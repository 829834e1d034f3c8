"""
Watches what a worker writes to the node's disk: outside of a root of its own, and what its function has compiled.

No mechanism of the kernel holds a directory to a size for a user here. So the node looks, and ends a worker whose
directory holds too much. A file that has no name any more is not seen: RLIMIT_FSIZE limits each.
"""

import asyncio
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from gpufaas_core.files import remove_tree
from gpufaas_core.model import Seconds
from gpufaas_core.units import Bytes, GiB, format_bytes
from gpufaas_gpu_manager.isolation.levels import Own
from gpufaas_gpu_manager.timers import Timers

BYTES: Final[Bytes] = 4 * GiB
"""Of one directory: what is compiled for a large model has some hundred MiB."""
FILES: Final = 100_000
_LOOK_S: Final[Seconds] = 2.0


class WritingWorker(Protocol):
    own: Own
    reaped: bool
    timers: Timers

    def kill(self, reason: str) -> None: ...


def watch_disk(worker: WritingWorker) -> None:
    """Look at the directories of *worker* repeatedly, by its timer "disk", until that is cancelled."""
    loop = asyncio.get_running_loop()

    def look() -> None:
        looked = loop.run_in_executor(None, first_over, worker.own.write)
        looked.add_done_callback(lambda done: decide(done.result()))

    def decide(over: str) -> None:
        if worker.reaped:
            return
        if over:
            worker.kill(
                f"{over} holds more than {format_bytes(BYTES)} or {FILES:,} files: it is emptied; write less there"
            )
            loop.run_in_executor(None, remove_tree, Path(over))
        else:
            worker.timers.later("disk", _LOOK_S, look)

    if worker.own.write:
        worker.timers.later("disk", _LOOK_S, look)


def first_over(folders: Sequence[str], size: Bytes = BYTES, files: int = FILES) -> str:
    """Return the first of *folders* that holds more than so much; empty: none. Blocks; links are not followed."""
    return next((each for each in folders if _is_over(each, size, files)), "")


def _is_over(folder: str, size: Bytes, files: int) -> bool:
    left = [folder]
    for each in left:  # grows meanwhile
        try:
            with os.scandir(each) as found:
                for entry in found:
                    size -= entry.stat(follow_symlinks=False).st_blocks * 512
                    files -= 1
                    if size < 0 or files < 0:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
        except OSError as exc:
            if exc.errno == errno.ENAMETOOLONG:  # who nests so deep hides something
                return True
    return False
