"""
The main program of a worker: import the handler, load the model, then serve calls slot by slot.

It runs in a process of its own, forked from the fork server (gpufaas_gpu_manager.zygote) with torch already imported.
One connection carries the calls of all its slots. One slot is served by the main thread, several by threads that lead
in turn (`slot_threads`); if the handler is async, one event loop serves them all (`async_server`). The worker ends when
its manager closes the connection, or ends.
"""

import contextlib
import ctypes
import os
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec

from gpufaas_core.model import Seconds
from gpufaas_core.taken import VARIABLE
from gpufaas_core.wire.heads import WARM, FailedHead, Imported, ReadyHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import encode_frame
from gpufaas_functions import answers, author_modules, batches, exit_hooks, staged
from gpufaas_functions.answers import SAID, Handle, Memory, from_the_author, in_one_line, traceback_of, utf8
from gpufaas_functions.areas import keep_bodies, leave_areas
from gpufaas_functions.batches import BatchHandler
from gpufaas_functions.begun import Counts
from gpufaas_functions.call_runner import Served
from gpufaas_functions.connection import NodeConnection
from gpufaas_functions.coroutines import is_async
from gpufaas_functions.emulated import Emulated, EmulatedHandler, EmulatedMemory
from gpufaas_functions.imports import Imports
from gpufaas_functions.inbox import Shared
from gpufaas_functions.loading import spent
from gpufaas_functions.memory import CpuMemory, CudaMemory, fork_point, is_out_of_memory
from gpufaas_functions.parking import ModelParking
from gpufaas_functions.slot_threads import OneSlot, SlotThreads

WARM_UP: Final = "warm_up"
"""The author's function, with the model, that does what a first call would do first."""


class WorkerStart(msgspec.Struct, frozen=True):
    """What the fork server gives a new worker, with its connection."""

    function: str
    bundle: str
    """Directory of the installed bundle."""
    handler: str
    kind: str
    device: str
    """What the handler's load() gets: ``cpu`` or ``cuda:0``."""
    slots: int
    """Calls, or batches, at once."""
    threads: int
    limit: int
    """Private memory in bytes that the worker may add after the fork; 0: the kernel sets no limit."""
    env: dict[str, str]
    check: bool = False
    """Only import the handler, and report whether that worked."""
    label: str = ""
    """The device's short name (``cpu:0``), for the process list."""
    device_memory: int = 0
    """On CUDA: what it may occupy in bytes, its context included; 0: all."""
    emulated: Emulated | None = None
    """On an emulated device: the author's handler is not run."""
    batch: int = 1
    """Calls that one ``handle_batch`` gets at most."""
    warm: bool = False
    """No call waits for it: the author's ``warm_up`` runs before it is ready."""
    weights: tuple[str, ...] = ()
    """Paths of the weights that the node keeps in host memory. Their descriptors come with the start, in this order."""
    counts: bool = False
    """The file is attached in which it counts what it begins (`begun`)."""
    parks: bool = False
    """The worker may be parked: it keeps what its self-check says after the load."""
    ports_limited: bool = False
    """The worker may connect to some TCP ports only."""
    known: int = 0
    """The peak memory that other workers of the function have had: this one measures its own only beyond that."""


def run(
    start: WorkerStart, control: socket.socket, files: socket.socket, counts: Counts,
    clocks: Sequence[socket.socket] = (), shared: "ctypes.Array[ctypes.c_char] | None" = None,
) -> int:  # fmt: skip
    """
    Serve until *control*, the connection to the node, is closed; return the exit status.

    :param files: over which open files of bodies come (`body_file`)
    :param counts: of what each slot begins (`begun`)
    :param clocks: on an emulated device, one for each slot
    :param shared: the memory that the node lends areas of (`areas`)
    """
    os.register_at_fork(after_in_child=control.close)  # a fork that returns from the handler would answer calls, too
    if "tempfile" in sys.modules:
        vars(sys.modules["tempfile"])["tempdir"] = None  # the fork server's: here TMPDIR is the scratch directory
    try:
        memory = _memory_of(start)
        imports = Imports(os.path.join(start.bundle, "function"))
        answers.ports_limited = start.ports_limited
        began = time.perf_counter()
        about = start.emulated
        handler = import_handler(start) if about is None else EmulatedHandler(about, start.function, clocks)
        is_loop = is_async(getattr(handler, "handle", None))
        if start.check:
            control.sendall(encode_frame(Kind.READY, ReadyHead(0, [], imported=imports.told())))
            return 0
        served, phases, imported = _load(start, handler, memory, imports, began)
    except BaseException as exc:
        _say_failed(control, exc)
        return 1  # every error of a load ends this worker
    os.register_at_fork(before=keep_bodies, after_in_child=leave_areas)
    head = ReadyHead(
        memory.loaded(), phases, fork_point().data, is_loop or start.slots > 1, memory.held(), staged.used(),
        served.parking is not None and served.parking.can, imported,
    )  # fmt: skip
    ready = encode_frame(Kind.READY, head)
    if is_loop:
        from gpufaas_functions.async_server import AsyncServer  # only where it is needed

        server = AsyncServer(served, Shared(counts, shared, files))
        os.register_at_fork(after_in_child=server.leave)
        exit_hooks.flush_at_exit(server.flush)
        server.serve(control, ready)
        return 0
    control.sendall(ready)
    connection = NodeConnection(control)
    os.register_at_fork(after_in_child=connection.leave)
    exit_hooks.flush_at_exit(connection.flush_at_exit)
    (OneSlot if start.slots == 1 else SlotThreads)(served, connection, Shared(counts, shared, files)).serve()
    return 0


def _load(
    start: WorkerStart, handler: Any, memory: Memory, imports: Imports, began: Seconds
) -> tuple[Served, list[tuple[str, Seconds]], Imported | None]:
    """
    Return what the worker serves, what the load took by phase, and what its imports were. Raises what the author's code
    raises.

    :param began: when its import began, by `time.perf_counter`
    """
    if start.kind != "model":
        loaded_s, imported = time.perf_counter() - began, imports.told()
        return Served(start.function, start.device, handler.handle, memory), _phases(loaded_s), imported
    model = handler.load(start.device)
    exit_hooks.kept.append(model)
    memory.synchronize()
    loaded_s = time.perf_counter() - began
    imported = imports.told(sum(spent().values()))
    warmed = _warm_up(handler, model, memory) if start.warm else []
    handle, together = _with_model(handler, model)
    if VARIABLE in start.env:
        from gpufaas_functions.metered import metered  # only where a profile is taken

        handle = metered(handle, together, memory, start.bundle, handler)
    parking = ModelParking(handler, model, start.device, memory) if start.parks else None
    served = Served(start.function, start.device, handle, memory, together if start.batch > 1 else None, parking)
    return served, _phases(loaded_s) + warmed, imported


def _phases(loaded_s: Seconds) -> list[tuple[str, Seconds]]:
    """Return the parts of a load that took so long: what loaders of weights have spent, and the rest."""
    told = spent()
    return [*((name, seconds) for name, seconds in told.items() if seconds), ("init", loaded_s - sum(told.values()))]


def _say_failed(control: socket.socket, exc: BaseException) -> None:
    """Say why the load failed: a summary to the manager, the whole traceback to the log."""
    text = utf8(traceback_of(from_the_author(exc)))
    head = FailedHead(in_one_line(exc), text[-16 * SAID :], is_out_of_memory(exc))
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
        control.sendall(encode_frame(Kind.FAILED, head))


def _warm_up(handler: Any, model: Any, memory: Memory) -> list[tuple[str, float]]:
    """Run the author's ``warm_up``, if there is one, and return its time. What it raises fails no load."""
    warm_up = getattr(handler, WARM_UP, None)
    if warm_up is None:
        return []
    began = time.perf_counter()
    try:
        warm_up(model)
        memory.synchronize()
    except BaseException as exc:
        text = utf8(traceback_of(from_the_author(exc)))
        sys.stderr.write(f"{text}gpufaas: {WARM_UP}() failed, and the model serves without it\n")
        memory.release()
    return [(WARM, time.perf_counter() - began)]


def _memory_of(start: WorkerStart) -> Memory:
    if start.emulated is not None:
        return EmulatedMemory(start.emulated)
    if start.device.startswith("cuda"):
        return CudaMemory(start.device, start.device_memory)
    return CpuMemory(start.slots, start.known)


def _with_model(handler: Any, model: Any) -> tuple[Handle, BatchHandler | None]:
    """Return the author's functions for one call and for several, with *model* as their first argument."""
    handle, handle_batch = getattr(handler, "handle", None), getattr(handler, batches.NAME, None)
    together = None if handle_batch is None else BatchHandler(partial(handle_batch, model))
    if handle is not None:
        return partial(handle, model), together
    assert together is not None
    return together.one, together


def import_handler(start: WorkerStart) -> Any:
    """
    Import the author's module and check that it has what its kind calls.

    :raises AttributeError: it lacks ``handle`` (or ``load``, or ``handle_batch``); other errors are the module's own
    """
    module = author_modules.import_handler(start.handler)
    names: tuple[str, ...] = ("load", "handle") if start.kind == "model" else ("handle",)
    if start.kind == "model" and callable(batch := getattr(module, batches.NAME, None)):
        batches.check(batch, start.handler)
        if is_async(getattr(module, "handle", None)):
            raise TypeError(
                f"{start.handler}.py: handle() is async, and {batches.NAME}() is not: an async handler gathers its "
                f"calls itself: remove {batches.NAME}, or write def handle"
            )
        names = ("load",) if getattr(module, "handle", None) is None else names
    elif start.batch > 1 and is_async(getattr(module, "handle", None)):
        raise TypeError(
            f"{start.handler}.py: handle() is async, and gathers its calls itself: remove gpufaas.batch-max, and set "
            "gpufaas.slots"
        )
    elif start.batch > 1:
        raise AttributeError(
            f"{start.handler}.py defines no function {batches.NAME}(), which gpufaas.batch-max {start.batch} needs"
        )
    if start.kind == "model" and getattr(module, WARM_UP, None) is not None:
        names += (WARM_UP,)
    for name in names:
        if not callable(getattr(module, name, None)):
            raise AttributeError(f"{start.handler}.py defines no function {name}()")
        if name != "handle" and is_async(getattr(module, name)):
            raise TypeError(f"{start.handler}.py: {name}() is async, and only handle() may be: write def {name}")
    return module
