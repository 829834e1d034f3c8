"""
The memory of a worker on its device, measured by the worker itself, and how a lack of memory is recognised.

Memory that exists at the fork belongs to the fork server and is not counted: see `mark_fork_point`.
"""

import contextlib
import ctypes
import resource
import sys
import threading
from typing import Final

import msgspec

from gpufaas_functions.areas import used
from gpufaas_functions.staged import unchanged

THREAD_STACK: Final = (4 if sys.version_info >= (3, 13) else 2) * 1024 * 1024
"""Stack of each thread but the main one, in bytes. The whole stack counts against the memory limit, and the default of
8 MiB is too much under a limit. From Python 3.13 on, JSON that nests 10,000 deep is parsed: that takes 3 MiB."""


def stacks(slots: int) -> int:
    """Return the bytes of the stacks of the threads that serve *slots*, beside the main one's (`slot_threads`)."""
    return (slots + 1) * THREAD_STACK if slots > 1 else 0


def use_small_stacks() -> None:
    """Make `THREAD_STACK` the default for new threads, Python's and those of native libraries."""
    threading.stack_size(THREAD_STACK)
    libc = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(64)  # pthread_attr_t: 56 bytes with glibc and musl, on 64 bits
    with contextlib.suppress(AttributeError):  # a libc without it keeps its default
        libc.pthread_attr_init(attributes)
        libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(THREAD_STACK))
        libc.pthread_setattr_default_np(attributes)


def trim() -> None:
    """Give freed heap back to the kernel."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class CpuMemory:
    """
    Occupation of this process on a CPU device: the memory that it added since the fork.

    The peak growth of the resident set (private data and mapped weights), plus the fork server's pages that it copied
    by writing to them, which the resident set does not show. At least the private writable memory that it has
    allocated, since the kernel compares that with the limit. So weights are counted in full as soon as they are mapped,
    wherever they are kept; pages of them that the worker alone has mapped are no copies of the fork server's. Memory
    for bodies that the node has lent (`areas`) is not counted.
    """

    def __init__(self, slots: int = 1, known: int = 0) -> None:
        """
        :param slots: the limit has room for the stacks of their threads, beside the reservation
        :param known: the peak that the platform knows of, from other workers of the function; 0: none
        """
        self._slots = slots
        self._known = known
        self._seen = 0
        self._called = False

    def synchronize(self) -> None:
        """Do nothing: on a CPU no work goes on in the background."""

    def held(self) -> int:
        """Return 0: the kernel's account is the worker's own."""
        return 0

    def limit(self, memory: int) -> None:
        """Do nothing: the kernel, or a watcher, holds the worker to its memory."""

    def loaded(self) -> int:
        """Return the occupation without pages that were copied: to find those takes 5 ms, with 1 GiB mapped 20 ms."""
        return self._grown(MemoryPoint.read())

    def peak(self) -> int:
        now = MemoryPoint.read()
        # Pages that it has written to and shares with no other: the kernel looks at every page.
        dirty = _kilobytes("/proc/self/smaps_rollup", (b"Private_Dirty",))[b"Private_Dirty"]
        dirty -= unchanged().private if now.shared else 0
        copied = max(0, dirty - max(0, now.anonymous - _FORK_POINT.anonymous))
        return self._grown(now) + copied

    def _grown(self, now: "MemoryPoint") -> int:
        self._seen = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        threads = min(max(0, threading.active_count() - 1) * THREAD_STACK, stacks(self._slots))
        return max(0, used.peak_without(self._seen * 1024) - _FORK_POINT.rss, now.data - _FORK_POINT.data - threads)

    def grown(self) -> int:
        """
        Return the new peak, or 0 if it is not above a known one; nearly always that costs one system call.

        The first call of a function is always measured: until then the platform reserves what it guessed, also for a
        small model.
        """
        # 256 KiB of growth (ru_maxrss is in KiB) is noise of the allocator; reading /proc for it would cost every call.
        if self._called and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= self._seen + 256:
            return 0
        self._called = True
        if self._known and self.loaded() <= self._known:
            return 0
        self._known = self.peak()
        return self._known

    def release(self) -> None:
        """Give freed heap back to the kernel after a failure."""
        import gc

        gc.collect()
        trim()


_contexts: Final[dict[str, int]] = {}
"""The bytes of this process's contexts, by CUDA device."""


def make_context(device: str) -> int:
    """Make this process's context on CUDA *device*, unless it has one; return its bytes."""
    if device not in _contexts:
        import torch

        free_before, _ = torch.cuda.mem_get_info(device)
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
        free_after, _ = torch.cuda.mem_get_info(device)
        # Others may allocate at the same moment: where the driver tells what each process has, the node puts it right.
        _contexts[device] = max(0, free_before - free_after - torch.cuda.memory_reserved(device))
    return _contexts[device]


class CudaMemory:
    """
    Occupation on a CUDA device: the context, and the peak that torch's allocator reserved.

    Reserved, not allocated: what lies between blocks is nobody else's. The allocator is held to the worker's memory, so
    that a model which takes all gets an out-of-memory error of its own, as on a CPU device.
    """

    def __init__(self, device: str, memory: int = 0) -> None:
        """:param memory: that the worker may occupy; 0: all"""
        import torch

        self._torch = torch
        self._device = device
        self._context = make_context(device)
        _, self._total = torch.cuda.mem_get_info(device)
        self._measured = 0
        if memory:
            self.limit(memory)
        self._seen = 0

    def synchronize(self) -> None:
        self._torch.cuda.synchronize(self._device)

    def held(self) -> int:
        return int(self._context + self._torch.cuda.memory_reserved(self._device))

    def limit(self, memory: int) -> None:
        """Hold the allocator to what *memory* bytes leave beside the context. What tensors have already stays."""
        if self.held() > memory:
            self.release()
        share = max(0, memory - self._context) / self._total
        self._torch.cuda.set_per_process_memory_fraction(min(1.0, share), self._device)

    def loaded(self) -> int:
        """Return the occupation after the load."""
        return self.peak()

    def peak(self) -> int:
        self._seen = self._torch.cuda.max_memory_reserved(self._device)
        return int(self._context + self._seen)

    def grown(self) -> int:
        """See `CpuMemory.grown`."""
        if self._measured > 1 and self._torch.cuda.max_memory_reserved(self._device) <= self._seen:
            return 0
        # Twice at least: the first call loads kernels, and one that fails says no more than its peak.
        self._measured += 1
        return self.peak()

    def release(self) -> None:
        self._torch.cuda.empty_cache()


class MemoryPoint(msgspec.Struct, frozen=True):
    """This process's memory at one moment, in bytes, from /proc."""

    rss: int = 0
    anonymous: int = 0
    data: int = 0
    """Private writable memory, resident or not: what RLIMIT_DATA counts."""
    shared: int = 0
    """Resident shared memory and memory files."""

    @classmethod
    def read(cls) -> "MemoryPoint":
        status = _kilobytes("/proc/self/status", (b"VmRSS", b"RssAnon", b"VmData", b"RssShmem"))
        return cls(status[b"VmRSS"], status[b"RssAnon"], status[b"VmData"], status[b"RssShmem"])


_FORK_POINT = MemoryPoint()


def mark_fork_point(*, forked: bool = True) -> MemoryPoint:
    """
    Called in the fork server's child before it does anything: what comes on top from here on is the worker's own. Of a
    process that was not *forked*, but has imported torch itself, all but what it has mapped of libraries is.
    """
    global _FORK_POINT
    now = MemoryPoint.read()
    _FORK_POINT = now if forked else MemoryPoint(rss=now.rss - now.anonymous)
    return _FORK_POINT


def fork_point() -> MemoryPoint:
    """Return the memory at the fork that made this process; zeros in one that was not forked by the fork server."""
    return _FORK_POINT


def _kilobytes(path: str, names: tuple[bytes, ...]) -> dict[bytes, int]:
    found = dict.fromkeys(names, 0)
    with open(path, "rb") as file:
        for line in file:
            name, _, value = line.partition(b":")
            if name in found:
                found[name] = int(value.split()[0]) * 1024
    return found


_OUT_OF_MEMORY: Final = (
    "can't allocate memory",
    "CUDA out of memory",
    "Cannot allocate memory",
    "unable to mmap",
    "std::bad_alloc",
    "can't start new thread",  # of CPython, which does not say why: mostly the stack finds no room
    "pthread_create",
    "failed to map segment from shared object",  # of the loader, where a library finds no room
    "cannot map zero-fill pages",
)
"""What exceptions say that are no `MemoryError`."""


def _text_of(exc: Exception) -> str:
    try:
        return str(exc)
    except Exception:  # the author's class of it may not be able to
        return ""


def is_out_of_memory(exc: BaseException) -> bool:
    """
    Whether *exc* says that memory could not be had: Python's, torch's on the CPU, CUDA's, or the kernel's; for the
    stack of a thread, or for a library, too.
    """
    seen: set[int] = set()
    each: BaseException | None = exc
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        if isinstance(each, MemoryError) or type(each).__name__ == "OutOfMemoryError":
            return True
        if isinstance(each, Exception) and (text := _text_of(each)) and any(words in text for words in _OUT_OF_MEMORY):
            return True
        each = each.__cause__ or each.__context__
    return False
