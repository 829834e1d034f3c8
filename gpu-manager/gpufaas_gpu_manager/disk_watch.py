"""
Watches what a worker writes to the node's disk: what its function has compiled, and all where it has no own root.

The kernel holds no directory of a user to a size here: the node looks, and ends a worker whose directory has too much.
"""

import asyncio
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpufaas_core.files import remove_tree
from gpufaas_core.model import Seconds
from gpufaas_core.units import Bytes, GiB, format_bytes
from gpufaas_gpu_manager.worker import Worker

BYTES: Final[Bytes] = 4 * GiB
"""Of one directory: what is compiled for a large model has some hundred MiB."""
FILES: Final = 100_000
_LOOK_S: Final[Seconds] = 2.0


def watch_disk(worker: Worker) -> None:
    """Look at the directories of *worker* repeatedly, by its timer "disk", until that is cancelled."""
    loop = asyncio.get_running_loop()

    def look() -> None:
        loop.run_in_executor(None, first_over, worker.own.write).add_done_callback(decide)

    def decide(looked: "asyncio.Future[str]") -> None:
        if worker.reaped:
            return
        if over := looked.result():
            worker.kill(f"{over} holds more than {format_bytes(BYTES)} or {FILES:,} files: write less there")
            loop.run_in_executor(None, remove_tree, Path(over))
        else:
            worker.timers.later("disk", _LOOK_S, look)

    if worker.own.write:
        worker.timers.later("disk", _LOOK_S, look)


def first_over(folders: Sequence[str]) -> str:
    """Return the first of *folders* that holds too much; empty: none. Files without a name are not seen. Blocks."""
    for folder in folders:
        left, size, files = [folder], 0, 0
        for each in left:  # grows meanwhile
            try:
                with os.scandir(each) as found:
                    for entry in found:
                        size, files = size + entry.stat(follow_symlinks=False).st_blocks * 512, files + 1
                        left += [entry.path] if entry.is_dir(follow_symlinks=False) else []
                        if size > BYTES or files > FILES:
                            return folder
            except OSError as exc:
                if exc.errno == errno.ENAMETOOLONG:  # who nests so deep hides something
                    return folder
    return ""
