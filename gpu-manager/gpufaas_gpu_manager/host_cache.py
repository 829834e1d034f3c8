"""
The host tier of a node: weights in memory, as sealed memory files that workers map. See `memory_file`.

What is kept within the budget is decided by a `Keeper`. Files are made by one thread, one after another, while starts
go on from the disk. They belong to the node, so that they survive workers, and go with it.
"""

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from gpufaas_core.bundle import WeightsFile
from gpufaas_core.errors import CorruptArtifact
from gpufaas_core.model import Bytes, Seconds
from gpufaas_core.units import MiB, format_bytes
from gpufaas_functions.staged import Identity, identity_of
from gpufaas_gpu_manager.machine_memory import available_memory
from gpufaas_gpu_manager.memory_file import Stopped, sealed_copy
from gpufaas_gpu_manager.parked_room import ParkedRoom, RoomKeeper

_LEFT: Final[Bytes] = 256 * MiB
"""Memory of the machine that stays free for others."""
_DISK: Final = 1_000 * MiB
"""Bytes per second that a start would read from the disk: one figure for all weights, since they lie on the same disk.
What a worker says is no measure: it maps a file, and reads it later, page by page."""
_NICE: Final = 10
MOST_GIVEN: Final = 250
"""Open files that one message to a new worker can carry, beside its two of output (SCM_MAX_FD of the kernel)."""


class Keeper(RoomKeeper, Protocol):
    """Decides what is kept (gpufaas_cache_manager.host_tier)."""

    budget: Bytes
    used: Bytes
    most: int

    def __contains__(self, key: str, /) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def asked(self, key: str, now: Seconds) -> None: ...

    def keep(self, key: str, size: Bytes, saves_s: Seconds) -> list[str] | None: ...

    def map(self, key: str) -> None: ...

    def unmap(self, key: str) -> bool: ...

    def drop(self, key: str) -> bool: ...

    def forget(self, key: str) -> None: ...


class Attached(NamedTuple):
    """Weights that a worker is given."""

    weights: WeightsFile
    descriptor: int


@dataclass(slots=True)
class HostCacheStatus:
    """For people and metrics."""

    budget: Bytes = 0
    used: Bytes = 0
    files: int = 0
    parked: int = 0
    """Workers that are parked."""
    parked_bytes: Bytes = 0
    """What they hold beside weights; in `used`."""
    note: str = ""
    """Why nothing more is kept; empty: all is well."""


class HostCache:
    """
    See module. Used on the event loop.

    :param keeper: decides what is kept; of no budget: nothing is
    :param on_said: gets a line for people
    :param on_corrupt: called in a thread with weights whose bytes are not those that their manifest says
    """

    def __init__(
        self,
        keeper: Keeper,
        on_said: Callable[[str], None] = lambda _: None,
        on_corrupt: Callable[[WeightsFile], None] = lambda _: None,
    ) -> None:
        self.on_changed: Callable[[], None] = lambda: None
        """Called when weights have come or gone."""
        self._keeper = keeper
        self.parked = ParkedRoom(keeper)
        self._on_said = on_said
        self._on_corrupt = on_corrupt
        self._files: dict[str, int] = {}
        self._given: dict[int, list[str]] = {}
        """The digests of what each worker may have mapped, whose files stay open meanwhile."""
        self._filling: dict[str, asyncio.Task[bool]] = {}
        self._unwanted: set[str] = set()
        """Of these, what no function has any more."""
        self._lock = asyncio.Lock()
        self._stop = threading.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._note = ""
        self._forbidden = False
        self._refused: set[str] = set()
        """Reasons that people were told."""

    # --- what workers get ---

    def attached(self, worker: int, weights: Sequence[WeightsFile], connections: int = 1) -> list[Attached]:
        """
        Return those of *weights* that are here. They stay until `release` of *worker*.

        :param connections: of the worker: what has no room beside them, the smallest weights, is left out
        """
        found = [Attached(each, self._files[each.sha256]) for each in weights if self._is_here(each)]
        room = max(0, MOST_GIVEN - connections)
        if len(found) > room:
            line = (
                f"a worker with {connections} connections can be given {room} of its {len(found)} files of weights, "
                f"{weights[0].path} among them: it reads the others from the disk"
            )
            self._say_once(line, self._on_said)
            found = sorted(found, key=lambda each: -each.weights.bytes)[:room]
        if found:
            self._given[worker] = [each.weights.sha256 for each in found]
            for digest in self._given[worker]:
                self._keeper.map(digest)
        return found

    def files_of(self, worker: int) -> frozenset[Identity]:
        """Return the memory files that *worker* may have mapped, which are not charged to it."""
        return frozenset(identity_of(self._files[each]) for each in self._given.get(worker, ()))

    def release(self, worker: int) -> None:
        """*worker* is gone with all its mappings."""
        for digest in self._given.pop(worker, ()):
            if self._keeper.unmap(digest):
                self._close(digest)

    def has(self, weights: Sequence[WeightsFile]) -> bool:
        """Whether all of *weights*, and at least one, are here."""
        return bool(weights) and all(map(self._is_here, weights))

    def _is_here(self, weights: WeightsFile) -> bool:
        return weights.sha256 in self._files and weights.sha256 in self._keeper

    # --- what is kept ---

    def asked(self, weights: Sequence[WeightsFile], folder: Path, now: Seconds) -> None:
        """A start has wanted *weights*, which are below *folder*: keep them in the background, if they are worth it."""
        if reason := self.refusal(weights):
            self._say_once(reason, self._say)
            return
        for each in weights:
            self._keeper.asked(each.sha256, now)
            if not self._is_here(each):
                self.stage(each, folder)

    def refusal(self, weights: Sequence[WeightsFile]) -> str:
        """Return why *weights*, those of one function, can never be here together; empty: they may."""
        keeper, size = self._keeper, sum(each.bytes for each in weights)
        if not keeper.budget:
            return "this node keeps no weights in host memory"
        if size > keeper.budget:
            what = weights[0].path if len(weights) == 1 else f"{weights[0].path} and {len(weights) - 1} more files"
            have = "has" if len(weights) == 1 else "have"
            return f"{what} {have} {format_bytes(size)}, more than --host-cache {format_bytes(keeper.budget)}"
        if len(weights) > (most := min(keeper.most, MOST_GIVEN - 1)):
            return (
                f"{weights[0].path} is one of {len(weights)} files of weights of a function, and at most {most} can be"
            )
        return ""

    def stage(self, weights: WeightsFile, folder: Path) -> asyncio.Task[bool]:
        """Bring *weights* here in the background. The result says whether they are here."""
        digest = weights.sha256
        task = self._filling.get(digest)
        if task is None:
            loop = asyncio.get_running_loop()
            task = self._filling[digest] = loop.create_task(self._keep(weights, folder))
            task.add_done_callback(lambda _: self._filled(digest))
        self._unwanted.discard(digest)
        return task

    def _filled(self, digest: str) -> None:
        self._filling.pop(digest, None)
        self._unwanted.discard(digest)

    def forget(self, digests: Sequence[str]) -> None:
        """No function has these weights any more."""
        for digest in digests:
            if digest in self._filling:
                self._unwanted.add(digest)
            self._keeper.forget(digest)
            if self._keeper.drop(digest):
                self._close(digest)

    def status(self) -> HostCacheStatus:
        keeper, parked = self._keeper, self._keeper.parked
        return HostCacheStatus(
            keeper.budget, keeper.used, len(self._files), len(parked), sum(parked.values()), self._note
        )

    async def close(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._filling.values(), return_exceptions=True)
        if self._thread is not None:
            self._thread.shutdown()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    async def _keep(self, weights: WeightsFile, folder: Path) -> bool:
        keeper, digest = self._keeper, weights.sha256
        if self._forbidden:
            return False
        async with self._lock:  # one at a time, so that the thread's next file is not planned for ever
            if self._stopped(digest):
                return False
            if digest in self._files:
                keeper.keep(digest, weights.bytes, weights.bytes / _DISK)
                return True
            if available_memory() - weights.bytes < _LEFT:
                self._say(f"the machine has no {format_bytes(weights.bytes)} of memory to spare")
                return False
            await self.parked.crowd_out(weights.bytes)
            victims = keeper.keep(digest, weights.bytes, weights.bytes / _DISK)
            if victims is None:
                return False
            keeper.map(digest)  # no victim of another one while it is filled
            for victim in victims:
                self._close(victim)
            made = False
            try:
                made = await self._fill(weights, folder)
            finally:
                if not made:
                    keeper.drop(digest)
                if keeper.unmap(digest):
                    self._close(digest)
            return digest in self._files

    def _stopped(self, digest: str) -> bool:
        return self._stop.is_set() or digest in self._unwanted

    async def _fill(self, weights: WeightsFile, folder: Path) -> bool:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "host-cache", _step_back)
        path, digest = folder / weights.path, weights.sha256
        try:
            self._files[digest] = await asyncio.get_running_loop().run_in_executor(
                self._thread, sealed_copy, path, weights.bytes, digest, lambda: self._stopped(digest)
            )
        except Stopped:
            return False
        except CorruptArtifact as exc:
            self._say(str(exc))
            await asyncio.to_thread(self._on_corrupt, weights)
            return False
        except OSError as exc:
            self._forbidden = isinstance(exc, PermissionError) or exc.errno == errno.ENOSYS
            self._say(f"{path.name}: {exc.strerror or exc}")
            return False
        self._note = ""
        self.on_changed()
        return True

    def _close(self, digest: str) -> None:
        descriptor = self._files.pop(digest, None)
        if descriptor is not None:
            os.close(descriptor)
            self.on_changed()

    def _say_once(self, reason: str, say: Callable[[str], None]) -> None:
        if reason not in self._refused:
            self._refused.add(reason)
            say(reason)

    def _say(self, reason: str) -> None:
        if reason != self._note:
            self._note = reason
            self._on_said(f"weights are not kept in host memory: {reason}: starts read them from the disk")


def _step_back() -> None:
    """Let workers go first: the thread has time until the next start."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
