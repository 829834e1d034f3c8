"""
Weights that the node keeps in host memory, as a worker uses them: sealed memory files, given with its start.

A staged file is found by the path of the file in the bundle. Its mapping is private: an author may change the tensors,
and only the changed pages are copied. `install` makes safetensors and ``torch.load`` open a staged file in place of the
one on the disk, so that code which calls them directly starts from host memory, too. All other readers get the disk.
"""

import _thread
import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpufaas_core.errors import LoadFailed
from gpufaas_core.model import Bytes

Identity = tuple[int, int]
"""The device and inode of a file."""

HUGE: Final = 2 * 1024 * 1024
_FAILED: Final = ctypes.c_void_p(-1).value  # MAP_FAILED
_RESERVE_ONLY: Final = 0x4000  # MAP_NORESERVE
_FIXED: Final = 0x10  # MAP_FIXED
_POPULATE_READ: Final = 22  # MADV_POPULATE_READ of Linux 5.14
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_TYPES: Final = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "U16": "uint16",
    "I16": "int16", "F16": "float16", "BF16": "bfloat16", "U32": "uint32", "I32": "int32", "F32": "float32",
    "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64",
}  # fmt: skip
"""torch's names by those of safetensors."""
_MEMORY_FILE: Final = b" /memfd:"
_SIZE: Final = re.compile(rb"\n(Rss|Pss|Private_Dirty|Anonymous): +(\d+) kB")

_files: Final[dict[Identity, int]] = {}
"""Descriptors by the file on the disk that they stand for."""
_used: Final[set[int]] = set()


def attach(paths: Sequence[str], descriptors: Sequence[int]) -> None:
    """From now on the file of each path is read from the descriptor beside it. One that is not sealed is left out."""
    for path, descriptor in zip(paths, descriptors, strict=True):
        os.set_inheritable(descriptor, False)
        with contextlib.suppress(OSError):
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
                _files[_identity(os.stat(path))] = descriptor


def descriptor_of(path: str | Path) -> int | None:
    """Return the descriptor of the staged file that *path* names; None: there is none."""
    if not _files:
        return None
    try:
        descriptor = _files.get(_identity(os.stat(path)))
        if descriptor is None or not os.access(f"/proc/self/fd/{descriptor}", os.R_OK):
            return None
    except (OSError, TypeError, ValueError):
        return None
    _used.add(descriptor)
    return descriptor


def source_of(path: str | Path) -> str | Path:
    """Return a path that reads the staged file, if *path* names one; else *path*."""
    descriptor = descriptor_of(path)
    return path if descriptor is None else f"/proc/self/fd/{descriptor}"


def used() -> int:
    """Return how many staged files this worker has read."""
    return len(_used)


# --- tensors over a staged file ---


class UnknownType(Exception):
    """A type of tensors that only safetensors itself knows."""


class Entry(NamedTuple):
    """A tensor of a safetensors file."""

    name: str
    dtype: Any
    """torch's."""
    shape: list[int]
    at: Bytes
    """The place of its first byte in the file."""
    size: Bytes


def entries(source: str | Path, path: str | Path) -> list[Entry]:
    """
    Return the tensors of the safetensors file *source*, in the order of their bytes. None of these is read.

    :param path: the name of the file in errors
    :raises LoadFailed: its header lies
    :raises UnknownType: use safetensors
    """
    import torch
    from safetensors import SafetensorError, safe_open

    found: list[Entry] = []
    with open(source, "rb") as file:
        at = 8 + int.from_bytes(file.read(8), "little")  # how long the header is, then the header
    try:
        # It checks that there are no gaps. With "pt" it would map all of the file as private memory, which has a limit.
        with safe_open(source, framework="numpy") as opened:
            for name in opened.offset_keys():
                about = opened.get_slice(name)  # ten times as quick as to make the tensor
                shape, kind = about.get_shape(), about.get_dtype()
                if kind not in _TYPES:
                    raise UnknownType(kind)
                dtype = getattr(torch, _TYPES[kind])
                found.append(Entry(name, dtype, shape, at, prod(shape) * dtype.itemsize))
                at += found[-1].size
    except SafetensorError as exc:
        raise LoadFailed(f"{path} is damaged: {exc}: build the function again") from exc
    return found


def tensors(path: str | Path, descriptor: int) -> dict[str, Any]:
    """
    Return the tensors of the safetensors file *path*, which is staged as *descriptor*, over one private mapping. Raises
    as `entries`.
    """
    import torch

    about = entries(f"/proc/self/fd/{descriptor}", path)
    mapped = map_file(descriptor, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE)
    with contextlib.suppress(RuntimeError):  # no more threads: the first inference does it
        _thread.start_new_thread(_touch, (mapped,))
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    found = {}
    for name, dtype, shape, at, size in about:
        if not size:
            found[name] = torch.empty(shape, dtype=dtype)
            continue
        data = whole[at : at + size]
        if at % dtype.itemsize:  # old releases of safetensors did not align
            data = data.clone()
        found[name] = data.view(dtype).view(shape)
    return found


def _touch(mapped: "ctypes.Array[ctypes.c_char]") -> None:
    """Have the kernel map all pages while the module is built. The first inference would wait for each."""
    _libc.madvise(ctypes.addressof(mapped), len(mapped), _POPULATE_READ)


def map_file(descriptor: int, access: int, how: int) -> "ctypes.Array[ctypes.c_char]":
    """
    Return the whole file, mapped where pages of 2 MiB can be used. It is unmapped with the last user of the array.

    :param access: the PROT_ of mmap(2); *how* is its flags
    :raises MemoryError: there is no room for it
    """
    size = os.fstat(descriptor).st_size
    room = size + HUGE
    reserved = _libc.mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _RESERVE_ONLY, -1, 0)
    at = (reserved + HUGE - 1) // HUGE * HUGE if reserved != _FAILED else 0
    if not at or _libc.mmap(at, size, access, how | _FIXED, descriptor, 0) != at:
        if at:
            _libc.munmap(reserved, room)
        raise MemoryError(f"Cannot allocate memory: {size} bytes to map weights")
    found = (ctypes.c_char * size).from_address(at)
    weakref.finalize(found, _libc.munmap, reserved, room)
    return found


# --- other readers ---


def install() -> None:
    """Make the loaders of safetensors and torch that are imported here open staged files. Called before the fork."""
    for module, name in (("safetensors", "safe_open"), ("safetensors.torch", "safe_open"), ("torch", "load")):
        reader = getattr(sys.modules.get(module), name, None)
        if reader is not None and not hasattr(reader, "opens_staged"):
            setattr(sys.modules[module], name, _opening(reader))


def _opening(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return *original* with its first argument, a path, replaced by that of the staged file."""

    @functools.wraps(original, updated=())
    def opened(*args: Any, **kwargs: Any) -> Any:
        if _files and args:
            args = (source_of(args[0]), *args[1:])
        return original(*args, **kwargs)

    opened.opens_staged = True  # type: ignore[attr-defined]
    return opened


# --- memory ---


class Unchanged(NamedTuple):
    """Memory of a process that belongs to staged files: pages that it has mapped, and has not changed. In bytes."""

    resident: int = 0
    share: int = 0
    """Each page divided by the number of processes that have it mapped."""
    private: int = 0
    """Of pages that no other process has mapped."""


def unchanged() -> Unchanged:
    """Return what of this process's memory belongs to the staged files that it has read."""
    return unchanged_of("self", frozenset(map(identity_of, _used)))


def unchanged_of(process: int | str, files: frozenset[Identity]) -> Unchanged:
    """Return what of the memory of *process* belongs to *files*; nothing if it is gone."""
    if not files:
        return Unchanged()
    try:
        with open(f"/proc/{process}/smaps", "rb") as file:
            smaps = file.read()
    except OSError:
        return Unchanged()
    wanted = {b"%02x:%02x %d" % (os.major(device), os.minor(device), inode) for device, inode in files}
    total = [0, 0, 0]
    at = smaps.find(_MEMORY_FILE)
    while at >= 0:
        begin, end = smaps.rfind(b"\n", 0, at) + 1, smaps.find(b"\nVmFlags:", at)
        if b" ".join(smaps[begin:at].split()[3:5]) in wanted:
            sizes = dict(_SIZE.findall(smaps, at, end))
            changed = int(sizes[b"Anonymous"])
            for index, name in enumerate((b"Rss", b"Pss", b"Private_Dirty")):
                total[index] += max(0, int(sizes[name]) - changed) * 1024
        at = smaps.find(_MEMORY_FILE, at + 1)
    return Unchanged(*total)


def identity_of(descriptor: int) -> Identity:
    return _identity(os.fstat(descriptor))


def _identity(stat: os.stat_result) -> Identity:
    return stat.st_dev, stat.st_ino
