"""Weights to a device: complete and in place whatever their sizes, and no buffer is filled before its copy is over."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufaas_core.errors import InvalidSpec, LoadFailed

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

from gpufaas_functions import load_weights, transfer  # noqa: E402
from gpufaas_functions.transfer import ALIGNMENT, CudaTarget  # noqa: E402

pytestmark = pytest.mark.slow  # torch is imported
KiB = 1024


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK", 64 * KiB)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """Tensors that are larger than a chunk, of one chunk, small, unaligned, scalar and empty."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "large": torch.rand(300, 300, generator=generator),
        "chunk": torch.rand(16 * KiB, generator=generator),
        "half": torch.rand(7, generator=generator).half(),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 4),
        "ints": torch.arange(33),
    }
    save_file(tensors, tmp_path / "weights.safetensors")
    return tensors, tmp_path / "weights.safetensors"


class HostTarget:
    """Host memory in place of a device: nothing goes on in the background."""

    def empty(self, size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8)

    buffer = empty

    def lane(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def copy(self, to: Any, source: Any) -> Callable[[], None]:
        to.copy_(source)
        return lambda: None


class LateTarget(HostTarget):
    """Copies only when it is waited for, as a GPU may. Notes which threads copied."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.buffers = 0

    def buffer(self, size: int) -> Any:
        self.buffers += 1
        return super().buffer(size)

    def lane(self) -> contextlib.AbstractContextManager[None]:
        pending: list[tuple[Any, Any]] = []
        self._pending = getattr(self, "_pending", threading.local())
        self._pending.copies = pending
        return contextlib.nullcontext()

    def copy(self, to: Any, source: Any) -> Callable[[], None]:
        pending = self._pending.copies
        pending.append((to, source))
        self.threads.add(threading.get_ident())

        def wait() -> None:
            for ours, theirs in pending:
                ours.copy_(theirs)
            pending.clear()

        return wait


@pytest.mark.usefixtures("small_chunks")
def test_each_tensor_arrives_though_copies_end_late(saved: tuple[dict[str, Any], Path]) -> None:
    tensors, path = saved
    target = LateTarget()

    found = transfer.load(path, target)

    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert target.buffers <= 2 * transfer.LANES


@pytest.mark.usefixtures("small_chunks")
def test_all_tensors_lie_in_one_allocation_where_kernels_like_them(saved: tuple[dict[str, Any], Path]) -> None:
    found = transfer.load(saved[1], HostTarget())

    storages = {tensor.untyped_storage().data_ptr() for tensor in found.values()}
    offsets = [tensor.storage_offset() * tensor.element_size() for tensor in found.values()]
    assert len(storages) == 1
    assert all(offset % ALIGNMENT == 0 for offset in offsets)


def test_a_file_that_is_cut_off_is_refused_with_a_line(saved: tuple[dict[str, Any], Path]) -> None:
    path = saved[1]
    os.truncate(path, path.stat().st_size - 10)

    with pytest.raises(LoadFailed, match="is damaged"):
        transfer.load(path, HostTarget())


def test_a_file_that_shrinks_while_it_is_read_is_refused(saved: tuple[dict[str, Any], Path]) -> None:
    path = saved[1]

    class Cutting(HostTarget):
        def empty(self, size: int) -> Any:
            os.truncate(path, path.stat().st_size // 2)
            return super().empty(size)

    with pytest.raises(LoadFailed, match="became shorter"):
        transfer.load(path, Cutting())


# --- CUDA, by a stand-in for torch that notes what it is told ---


class FakeTorch:
    """What `CudaTarget` uses of torch."""

    uint8 = torch.uint8

    def __init__(self, pins: bool) -> None:
        self.told: list[str] = []
        self._pins = pins
        self.cuda = SimpleNamespace(
            current_stream=lambda device: f"stream of {device}",
            Stream=self._stream, stream=self._within, Event=self._event,
        )  # fmt: skip

    def device(self, name: str) -> str:
        return name

    def empty(self, size: int, dtype: Any, device: str = "", pin_memory: bool = False) -> Any:
        if pin_memory and not self._pins:
            raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS\nmore")
        self.told.append(f"empty {device or ('pinned' if pin_memory else 'pageable')}")
        return torch.empty(size, dtype=dtype)

    def _stream(self, device: str) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.told.append(f"wait for {other}"), device=device)

    @contextlib.contextmanager
    def _within(self, stream: Any) -> Iterator[None]:
        self.told.append(f"lane on {stream.device}")
        yield

    def _event(self) -> Any:
        return SimpleNamespace(
            record=lambda: self.told.append("record"), synchronize=lambda: self.told.append("synchronize")
        )


def cuda(fake: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> CudaTarget:
    target = CudaTarget("cpu")
    monkeypatch.setattr(target, "_torch", fake)
    monkeypatch.setattr(target, "_device", "cuda:0")
    return target


@pytest.mark.usefixtures("small_chunks")
def test_a_gpu_gets_copies_from_pinned_memory_on_streams_that_wait_for_its_allocation(
    saved: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake = FakeTorch(pins=True)

    found = transfer.load(saved[1], cuda(fake, monkeypatch))

    assert torch.equal(found["large"], saved[0]["large"])
    assert fake.told[0] == "empty cuda:0"
    assert fake.told.count("empty cuda:0") == 1
    assert fake.told.count("wait for stream of cuda:0") == fake.told.count("lane on cuda:0") >= 1
    assert "empty pageable" not in fake.told
    assert fake.told[-1] == "synchronize"
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("small_chunks")
def test_without_permission_to_pin_copies_are_pageable_and_a_line_says_so(
    saved: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transfer, "LANES", 1)
    fake = FakeTorch(pins=False)

    found = transfer.load(saved[1], cuda(fake, monkeypatch))

    assert torch.equal(found["chunk"], saved[0]["chunk"])
    assert fake.told.count("empty pageable") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "no memory can be pinned here: CUDA error: OS call failed" in line


# --- other loaders ---


@pytest.mark.parametrize(("name", "says"), [("quickest", "there are own, fastsafetensors"), ("runai", "requirements")])
def test_a_loader_that_is_not_there_is_named(
    saved: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.setenv(transfer.LOADER, name)
    monkeypatch.setitem(__import__("sys").modules, "runai_model_streamer", None)

    with pytest.raises(InvalidSpec, match=says):
        transfer.to_cuda(saved[1], "cuda:0")


@pytest.mark.parametrize(
    ("name", "package"), [("fastsafetensors", "fastsafetensors"), ("runai", "runai_model_streamer")]
)
def test_other_loaders_give_the_same_tensors(
    saved: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, package: str
) -> None:
    """Where they are installed: they load to a CPU, too."""
    pytest.importorskip(package)
    monkeypatch.setenv(transfer.LOADER, name)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(saved[1].read_bytes()[:-100])

    found = transfer.to_cuda(saved[1], "cpu")

    assert found.keys() == saved[0].keys()
    assert all(torch.equal(found[each], saved[0][each]) for each in found)
    with pytest.raises(LoadFailed, match=f"cut.safetensors cannot be loaded by {name}: "):
        transfer.to_cuda(cut, "cpu")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(ValueError("Corrupted\n File"), LoadFailed), (RuntimeError("CUDA out of memory"), RuntimeError)],
)
def test_what_another_loader_raises_is_a_failed_load_unless_memory_lacks(
    saved: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception]
) -> None:
    def fail(*_: object) -> Any:
        raise raised

    monkeypatch.setenv(transfer.LOADER, "runai")
    monkeypatch.setitem(transfer.LOADERS, "runai", fail)

    with pytest.raises(expected, match="by runai: Corrupted File$" if expected is LoadFailed else "out of memory"):
        transfer.to_cuda(saved[1], "cuda:0")


def test_weights_for_a_gpu_take_this_way(saved: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CudaTarget", lambda device: HostTarget())  # noqa: ARG005 - as it is called

    found = load_weights(saved[1], "cuda:0")

    assert found.keys() == saved[0].keys()
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1
