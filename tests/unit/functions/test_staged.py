"""Staged weights as a worker reads them: tensors over a mapping, headers that lie, readers of others."""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.waiting import until

from gpufaas_core.errors import LoadFailed
from gpufaas_functions import staged
from gpufaas_functions.loading import load_weights

Attach = Callable[[Path], int]


@pytest.fixture
def attach() -> Iterator[Attach]:
    """Stage a file of the disk, as a worker finds it."""
    made: list[int] = []

    def one(path: Path, seals: int = fcntl.F_SEAL_WRITE) -> int:
        copy = os.memfd_create("gpufaas-weights", os.MFD_ALLOW_SEALING)
        made.append(copy)
        os.write(copy, path.read_bytes())
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, seals)
        staged.attach([str(path)], [copy])
        return copy

    yield one
    staged._files.clear()
    staged._used.clear()
    for each in made:
        os.close(each)


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(first: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


def test_tensors_are_those_of_safetensors(tmp_path: Path, attach: Attach) -> None:
    made = {
        "half": torch.randn(3, 5).half(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "bf": torch.randn(2, 2).bfloat16(),
        "flags": torch.tensor([True, False]),
        "long": torch.arange(4),
    }
    save_file(made, tmp_path / "w.safetensors", metadata={"format": "pt"})
    expected = load_file(tmp_path / "w.safetensors")
    attach(tmp_path / "w.safetensors")
    found = load_weights(tmp_path / "w.safetensors")
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name].dtype == each.dtype
        assert torch.equal(found[name], each)
    assert staged.used() == 1


def test_tensors_that_are_not_aligned_are_copied(tmp_path: Path, attach: Attach) -> None:
    header = json.dumps({"a": tensor(0, 1, [1], "U8"), "b": tensor(1, 9, [2])}).encode()
    values = torch.tensor([1.0, 2.0])
    (tmp_path / "w.safetensors").write_bytes(raw(header + b" " * (-len(header) % 8), b"x" + values.numpy().tobytes()))
    attach(tmp_path / "w.safetensors")
    assert torch.equal(load_weights(tmp_path / "w.safetensors")["b"], values)


def test_what_is_written_into_tensors_is_not_written_into_the_file(tmp_path: Path, attach: Attach) -> None:
    save_file({"a": torch.zeros(1 << 20)}, tmp_path / "w.safetensors")
    copy = attach(tmp_path / "w.safetensors")
    load_weights(tmp_path / "w.safetensors")["a"].fill_(1.0)
    assert not any(os.pread(copy, 1 << 23, 100))
    assert not load_weights(tmp_path / "w.safetensors")["a"].any()


def test_all_pages_are_mapped_before_anything_reads_the_tensors(tmp_path: Path, attach: Attach) -> None:
    """One after another, in the first inference, they take a tenth of its time."""
    save_file({"weight": torch.zeros(4 * 2**20)}, tmp_path / "w.safetensors")
    descriptor = attach(tmp_path / "w.safetensors")

    weights = load_weights(tmp_path / "w.safetensors")

    def all_mapped() -> bool:
        smaps = Path("/proc/self/smaps").read_text()
        own = smaps[smaps.index(f" {os.fstat(descriptor).st_ino} ") :]
        return re.findall(r"\n(?:Size|Rss): +(\d+)", own)[:2] == [size, size]

    size = str(-(-os.fstat(descriptor).st_size // 4096) * 4)
    until(all_mapped)
    assert weights["weight"].shape == (4 * 2**20,)


def test_the_mapping_goes_with_the_last_tensor(tmp_path: Path, attach: Attach) -> None:
    def mapped() -> bool:
        return "gpufaas-weights" in Path("/proc/self/maps").read_text()

    save_file({"a": torch.zeros(1 << 20), "b": torch.zeros(8)}, tmp_path / "w.safetensors")
    attach(tmp_path / "w.safetensors")
    found = load_weights(tmp_path / "w.safetensors")
    kept = found["b"]
    del found
    assert mapped()
    del kept
    until(lambda: not mapped(), "the thread that maps its pages may have it a little longer")


LIES = {
    "longer than the file": raw({"a": tensor(0, 8, [2])}, bytes(8), length=1 << 62),
    "a header of gigabytes": raw({"a": tensor(0, 8, [2])}, bytes(8), length=200_000_000),
    "no JSON": raw(b"{'a'", bytes(8)),
    "a list": raw([1, 2], bytes(8)),
    "beyond the file": raw({"a": tensor(0, 800, [200])}, bytes(8)),
    "less than the file": raw({"a": tensor(0, 8, [2])}, bytes(80)),
    "overlapping": raw({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, bytes(12)),
    "a gap": raw({"a": tensor(0, 8, [2]), "b": tensor(12, 20, [2])}, bytes(20)),
    "another shape": raw({"a": tensor(0, 8, [3])}, bytes(8)),
    "a negative shape": raw({"a": tensor(0, 8, [-1, -2])}, bytes(8)),
    "backwards": raw({"a": tensor(8, 0, [2])}, bytes(8)),
    "negative": raw({"a": tensor(-8, 0, [2])}, bytes(8)),
    "huge numbers": raw({"a": tensor(0, 8, [1 << 62, 1 << 62])}, bytes(8)),
    "no file at all": b"\x01",
    "nothing": b"",
    "nested": raw(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
}


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_fails_the_load_with_one_clear_line(
    tmp_path: Path, attach: Attach, lie: str, where: str
) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(LIES[lie])
    if where == "host":
        attach(path)
    with pytest.raises(LoadFailed, match=r"w\.safetensors is damaged: .*: build the function again") as caught:
        load_weights(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_type_that_only_safetensors_knows_is_left_to_it(
    tmp_path: Path, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a": torch.ones(8)}, tmp_path / "w.safetensors")
    monkeypatch.delitem(staged._TYPES, "F32")
    attach(tmp_path / "w.safetensors")
    assert load_weights(tmp_path / "w.safetensors")["a"].sum() == 8


def test_a_memory_file_that_can_be_changed_is_left_out(tmp_path: Path, attach: Attach) -> None:
    save_file({"a": torch.ones(8)}, tmp_path / "w.safetensors")
    attach(tmp_path / "w.safetensors", fcntl.F_SEAL_GROW)  # type: ignore[call-arg]
    assert staged.descriptor_of(tmp_path / "w.safetensors") is None


def test_a_file_that_was_replaced_is_read_from_the_disk(tmp_path: Path, attach: Attach) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.ones(8)}, path)
    attach(path)
    save_file({"a": torch.zeros(8)}, tmp_path / "new")
    os.replace(tmp_path / "new", path)
    assert not load_weights(path)["a"].any()


def test_a_descriptor_that_the_author_closed_is_not_used(tmp_path: Path, attach: Attach) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.ones(8)}, path)
    copy = attach(path)
    kept = os.dup(copy)
    os.close(copy)
    try:
        assert staged.descriptor_of(path) is None
        assert load_weights(path)["a"].sum() == 8
    finally:
        os.dup2(kept, copy)
        os.close(kept)


def test_readers_are_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    for module, name in ((safetensors, "safe_open"), (safetensors.torch, "safe_open"), (torch, "load")):
        monkeypatch.setattr(module, name, getattr(module, name))
    staged.install()
    first = torch.load
    staged.install()
    assert torch.load is first
    with contextlib.suppress(FileNotFoundError):
        torch.load("/no/such/file")
