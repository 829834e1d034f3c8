"""Pickles are judged by the names in them: those of tensors alone need no annotation. Nothing of them is run."""

import collections
import os
import pickle
from pathlib import Path

import pytest
import torch

from gpufaas_cli.source_files import loads_as_tensors


class Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("false",)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", ["state", "parameters", "more"])
def test_what_torch_reads_as_tensors_is_such_a_pickle(tmp_path: Path, kind: str, zipped: bool) -> None:
    content = {
        "state": torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict(),
        "parameters": collections.OrderedDict(a=torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))),
        "more": {
            "epoch": 3,
            "size": torch.Size([2]),
            "dtype": torch.float16,
            "names": {"a"},
            "sparse": torch.eye(2).to_sparse(),
        },
    }[kind]
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)

    assert loads_as_tensors(tmp_path / "a.pt")
    torch.load(tmp_path / "a.pt", weights_only=True)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("content", [Runs(), torch.nn.Linear(1, 1), {"weight": torch.ones(1), "more": Runs()}])
def test_what_calls_anything_else_is_not(tmp_path: Path, content: object, zipped: bool) -> None:
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)

    assert not loads_as_tensors(tmp_path / "a.pt")


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"a": 1}), pickle.dumps(Runs(), 4), b"PK\3\4broken"])
def test_what_torch_has_not_written_is_not(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pkl").write_bytes(content)

    assert not loads_as_tensors(tmp_path / "a.pkl")
