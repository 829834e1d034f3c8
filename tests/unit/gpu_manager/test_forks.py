"""The environment of a fork server: its imports read some of it for all workers."""

import pytest

from gpufaas_gpu_manager.forks import environment


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}),
    ],
)
def test_torchs_allocator_is_set_before_torch_is_imported_unless_the_operator_has_done_so(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], found: dict[str, str]
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, text in given.items():
        monkeypatch.setenv(name, text)

    assert {name: text for name, text in environment().items() if "ALLOC_CONF" in name} == found
