"""
Weights from a safetensors file to a GPU: read into pinned buffers and copied on streams of their own, at the same time.

A few lanes share the file's chunks. Each lane is a thread with a stream and two buffers: while one buffer is copied to
the device, the other is filled (a read releases Python's lock). All tensors lie in one allocation, each where GPUs like
it, so that a load leaves no gaps between blocks of the allocator. Where no memory can be pinned the copies are slower,
and a line in the function's log says so.

Written by torch's documentation and tested with a target that copies late; not run on a real GPU.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpufaas_core.errors import InvalidSpec, LoadFailed
from gpufaas_core.units import Bytes, MiB
from gpufaas_functions.memory import is_out_of_memory
from gpufaas_functions.staged import Entry, entries

if TYPE_CHECKING:
    from torch import Tensor

CHUNK: Final = 8 * MiB
"""Read and copied at once. Much smaller ones do not fill a PCIe link; larger ones overlap less of a small model."""
LANES: Final = 4
"""One processor copies some 10 GB/s from the page cache or host memory, less than the link takes."""
ALIGNMENT: Final = 512
"""The alignment of each tensor on the device, as torch's allocator has it. Files align to 8 bytes, which kernels read
slowly."""
LOADER: Final = "GPUFAAS_LOADER"
"""Environment variable: the name of the loader to use; see `LOADERS`."""


class CudaTarget:
    """A CUDA device that tensors are copied to."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch: Any = torch
        self._device = torch.device(device)
        self._made_on: Any = None
        self._pins = True

    def empty(self, size: Bytes) -> "Tensor":
        """Return *size* bytes of its memory."""
        self._made_on = self._torch.cuda.current_stream(self._device)
        made: Tensor = self._torch.empty(size, dtype=self._torch.uint8, device=self._device)
        return made

    def buffer(self, size: Bytes) -> "Tensor":
        """Return *size* bytes of host memory that it copies from."""
        made: Tensor
        if self._pins:
            try:
                made = self._torch.empty(size, dtype=self._torch.uint8, pin_memory=True)
                return made
            except RuntimeError as exc:  # a limit of the container's, or of the driver's
                self._pins = False
                why = str(exc).partition("\n")[0]
                print(f"gpufaas: weights are copied more slowly: no memory can be pinned here: {why}", file=sys.stderr)
        made = self._torch.empty(size, dtype=self._torch.uint8)
        return made

    @contextlib.contextmanager
    def lane(self) -> Iterator[None]:
        """In the context, copies of this thread go beside those of other lanes."""
        stream = self._torch.cuda.Stream(self._device)
        if self._made_on is not None:
            stream.wait_stream(self._made_on)  # the memory may have been another tensor's a moment ago
        with self._torch.cuda.stream(stream):
            yield

    def copy(self, to: "Tensor", source: "Tensor") -> Callable[[], None]:
        """Begin a copy. What is returned waits for its end; until then *source* must not change."""
        to.copy_(source, non_blocking=True)
        copied = self._torch.cuda.Event()
        copied.record()
        wait: Callable[[], None] = copied.synchronize
        return wait


class _Chunk(NamedTuple):
    """Bytes of the file that are read at once."""

    first: Bytes
    size: Bytes
    parts: list[tuple[Bytes, Bytes, Bytes]]
    """Where they go: offset in the chunk, offset on the device, bytes."""


def load(path: str | Path, target: CudaTarget) -> "dict[str, Tensor]":
    """Return the tensors of the safetensors file *path* on *target*. Raises as `entries`."""
    tensors = entries(path, path)
    places, end = [], 0
    for each in tensors:
        places.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = places[-1] + each.size
    whole = target.empty(end)
    chunks = _chunks(tensors, places)
    lanes = max(1, min(LANES, len(chunks), len(os.sched_getaffinity(0))))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        shares = [chunks[lane::lanes] for lane in range(lanes)]
        if lanes == 1:
            _run_lane(descriptor, shares[0], whole, target)
        else:
            with ThreadPoolExecutor(lanes, "transfer") as threads:
                list(threads.map(lambda share: _run_lane(descriptor, share, whole, target), shares))
    except _Shorter:
        raise LoadFailed(f"{path} is damaged: it became shorter while it was read: build the function again") from None
    finally:
        os.close(descriptor)
    return {
        each.name: whole[at : at + each.size].view(each.dtype).view(each.shape)
        for each, at in zip(tensors, places, strict=True)
    }


class _Shorter(Exception):
    """The file ends too early."""


def _run_lane(descriptor: int, chunks: Sequence[_Chunk], whole: "Tensor", target: CudaTarget) -> None:
    buffers: list[Tensor] = []
    copied: list[list[Callable[[], None]]] = [[], []]
    with target.lane():
        for turn, chunk in enumerate(chunks):
            if turn < 2:
                buffers.append(target.buffer(max(each.size for each in chunks)))
            _wait(copied[turn % 2])
            buffer = buffers[turn % 2]
            _read(descriptor, buffer.numpy().data[: chunk.size], chunk.first)
            copied[turn % 2] = [
                target.copy(whole[at : at + size], buffer[offset : offset + size]) for offset, at, size in chunk.parts
            ]
        for each in copied:
            _wait(each)


def _wait(copies: Sequence[Callable[[], None]]) -> None:
    for wait in copies[-1:]:  # those of a lane end in order
        wait()


def _read(descriptor: int, into: memoryview, first: Bytes) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], first + done)
        if not count:
            raise _Shorter
        done += count


def _chunks(tensors: Sequence[Entry], places: Sequence[Bytes]) -> list[_Chunk]:
    """Return the pieces of the file, at most `CHUNK` long, in order. :param places: of the tensors on the device"""
    chunks: list[_Chunk] = []
    for tensor, place in zip(tensors, places, strict=True):
        done = 0
        while done < tensor.size:
            if not chunks or chunks[-1].size == CHUNK:
                chunks.append(_Chunk(tensor.at + done, 0, []))
            last = chunks[-1]
            size = min(tensor.size - done, CHUNK - last.size)
            last.parts.append((last.size, place + done, size))
            chunks[-1] = last._replace(size=last.size + size)
            done += size
    return chunks


# --- which loader ---


def to_cuda(path: str | Path, device: str) -> "dict[str, Tensor]":
    """
    Return the tensors of the safetensors file *path* on *device*, by the loader that `LOADER` names, else by `load`.

    :raises InvalidSpec: there is no such loader
    :raises LoadFailed: the file is damaged
    :raises UnknownType: only safetensors knows a type of its tensors
    """
    name = os.environ.get(LOADER, "own")
    if name not in LOADERS:
        raise InvalidSpec(f"{LOADER}={name}: there are {', '.join(LOADERS)}")
    try:
        return LOADERS[name](path, device)
    except ImportError as exc:
        raise InvalidSpec(f"{LOADER}={name} needs {exc.name}: put it into requirements.txt") from exc
    except LoadFailed:
        raise
    except Exception as exc:
        if name == "own" or is_out_of_memory(exc):
            raise
        raise LoadFailed(f"{path} cannot be loaded by {name}: {' '.join(str(exc).split())}") from exc


def _by_fastsafetensors(path: str | Path, device: str) -> "dict[str, Tensor]":
    from fastsafetensors import fastsafe_open  # from 0.5 on: tensors outlive the file

    with fastsafe_open(filenames=[str(path)], nogds=True, device=device) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def _by_streamer(path: str | Path, device: str) -> "dict[str, Tensor]":
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))  # into host memory that it uses again
        return {name: tensor.to(device, copy=True) for name, tensor in streamer.get_tensors()}


LOADERS: Final[dict[str, Callable[[str | Path, str], "dict[str, Tensor]"]]] = {
    "own": lambda path, device: load(path, CudaTarget(device)),
    "fastsafetensors": _by_fastsafetensors,
    "runai": _by_streamer,
}
"""By name. `benchmarks/gpu.py` measures those that are installed; another than our own is used where one sets it."""
