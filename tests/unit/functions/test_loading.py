"""Loading weights: mapped and not copied, complete or refused with a reason."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpufaas_core.errors import InvalidSpec, LoadFailed

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

from gpufaas_functions import load_module, load_weights  # noqa: E402


class Small(nn.Module):
    """Parameters, a saved buffer and one that is not saved."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("scale", torch.arange(1.0, 3.0), persistent=False)

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        return self.norm(self.layer(x)) * self.scale


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Small, Path]:
    torch.manual_seed(1)
    module = Small().eval()
    module.norm.running_mean.uniform_()
    save_file(module.state_dict(), tmp_path / "weights.safetensors")
    return module, tmp_path / "weights.safetensors"


@pytest.mark.slow
def test_a_loaded_module_answers_as_the_saved_one(saved: tuple[Small, Path]) -> None:
    module, path = saved
    x = torch.randn(5, 3)

    loaded = load_module(Small, path, "cpu")

    assert torch.equal(loaded(x), module(x))
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_buffers_that_are_not_saved_get_their_values(saved: tuple[Small, Path]) -> None:
    loaded = load_module(Small, saved[1])

    assert loaded.scale.tolist() == [1.0, 2.0]
    assert "scale" not in loaded.state_dict()
    assert nn.Linear(1, 1).weight.device.type == "cpu"  # the second build left no trace


def test_parameters_are_the_mapped_file_and_not_a_copy(tmp_path: Path) -> None:
    """Loading 64 MiB adds next to nothing to the memory that is really used."""
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.zeros(4096, 4096), "bias": torch.zeros(4096)}, path)
    before = anonymous_bytes()

    loaded = load_module(lambda: nn.Linear(4096, 4096), path)

    assert loaded.weight.shape == (4096, 4096)
    assert anonymous_bytes() - before < 16 * 1024 * 1024
    assert str(path) in Path("/proc/self/maps").read_text()


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@pytest.mark.slow
def test_building_on_meta_imports_nothing_heavy(tmp_path: Path) -> None:
    """An initialiser on the meta device pulls in sympy: a second and 65 MB for each worker."""
    save_file({"weight": torch.zeros(10, 4)}, tmp_path / "weights.safetensors")
    program = f"""
import sys, torch
from gpufaas_functions import load_module
before = set(sys.modules)
table = load_module(lambda: torch.nn.Embedding(10, 4), {str(tmp_path / "weights.safetensors")!r})
assert table(torch.tensor([1])).tolist() == [[0.0] * 4]
print([name for name in set(sys.modules) - before if name.startswith(("sympy", "torch._decomp", "torch._refs"))])
"""

    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)

    assert done.stdout == "[]\n"


def test_safetensors_is_a_dict_of_tensors(saved: tuple[Small, Path]) -> None:
    weights = load_weights(saved[1])

    assert weights.keys() == saved[0].state_dict().keys()
    assert torch.equal(weights["layer.weight"], saved[0].layer.weight)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Small(4), "does not fit Small: .*layer.weight"),
        (
            lambda: nn.Sequential(nn.Linear(3, 2)),
            r"does not fit Sequential: it lacks 0.bias, 0.weight, it has besides ",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    saved: tuple[Small, Path], build: Callable[[], nn.Module], says: str
) -> None:
    with pytest.raises(LoadFailed, match=says):
        load_module(build, saved[1])


@pytest.mark.parametrize("left", [0, 4, 50, -1])
def test_a_damaged_file_is_named(saved: tuple[Small, Path], left: int) -> None:
    path = saved[1]
    os.truncate(path, left if left >= 0 else path.stat().st_size - 1)

    with pytest.raises(LoadFailed, match=f"{path} is damaged"):
        load_weights(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no weights at .*none.safetensors: put them beside handler.py"):
        load_weights(tmp_path / "none.safetensors")


@pytest.mark.slow
def test_an_exported_program_runs_without_its_source(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval()
    x = torch.randn(5, 3)
    torch.export.save(torch.export.export(module, (x,)), tmp_path / "model.pt2")

    loaded = load_weights(tmp_path / "model.pt2")

    assert torch.allclose(loaded(x), module(x))


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin", "model.ckpt", "model.pkl", "m.joblib"])
def test_pickles_are_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("GPUFAAS_ALLOW_PICKLE", raising=False)
    torch.save(nn.Linear(1, 1), tmp_path / name)

    with pytest.raises(
        InvalidSpec, match=rf"{name} is a pickle of more than tensors, which runs any code .*gpufaas.allow-pickle"
    ):
        load_weights(tmp_path / name)


def test_pickles_of_tensors_are_loaded_without_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUFAAS_ALLOW_PICKLE", raising=False)
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")

    assert load_weights(tmp_path / "model.pt")["weight"].tolist() == [1.0, 1.0]


def test_pickles_are_loaded_when_the_author_allowed_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFAAS_ALLOW_PICKLE", "1")
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")

    assert load_weights(tmp_path / "model.pt")["weight"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", [pytest.param("model.pt2", marks=pytest.mark.slow), "model.pt"])
def test_other_damaged_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("GPUFAAS_ALLOW_PICKLE", "1")
    (tmp_path / name).write_bytes(b"garbage")

    with pytest.raises(LoadFailed, match=rf"{name} cannot be loaded"):
        load_weights(tmp_path / name)


def test_onnx_without_onnxruntime_says_what_to_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    (tmp_path / "model.onnx").write_bytes(b"")

    with pytest.raises(InvalidSpec, match=r"put onnxruntime into requirements\.txt"):
        load_weights(tmp_path / "model.onnx")


def test_a_kind_without_loader_says_which_there_are(tmp_path: Path) -> None:
    (tmp_path / "model.h5").write_bytes(b"")

    with pytest.raises(InvalidSpec, match=r"no loader for \.h5: save as \.safetensors"):
        load_weights(tmp_path / "model.h5")


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys, gpufaas_functions as f; f.load_module, f.Event; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=30)

    assert done.stdout == "False\n"
