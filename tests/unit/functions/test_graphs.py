"""CUDA graphs for authors, with a stand-in for torch's: what is captured runs again at each replay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpufaas_functions import graphed


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:
        return True


class FakeCuda:
    """Captures what `Model` computes, as a graph of its kernels would."""

    def __init__(self) -> None:
        self.captured: list[Callable[[], object]] | None = None
        self.replays = 0
        self.streams = 0
        fake = self

        class CUDAGraph:
            def __init__(self) -> None:
                self.kernels: list[Callable[[], object]] = []

            def replay(self) -> None:
                fake.replays += 1
                for kernel in self.kernels:
                    kernel()

        self.CUDAGraph = CUDAGraph

    def Stream(self, _device: object) -> SimpleNamespace:
        self.streams += 1
        return SimpleNamespace(wait_stream=lambda _: None)

    def current_stream(self, _device: object) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda _: None)

    @contextmanager
    def stream(self, _stream: object) -> Iterator[None]:
        yield

    @contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.captured = graph.kernels
        yield
        self.captured = None


class Model:
    """Doubles what it is given, and says how often it was called itself."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.calls = 0

    def __call__(self, given: torch.Tensor) -> dict[str, Any]:
        assert not torch.is_grad_enabled()
        self.calls += 1
        out = torch.empty_like(given)
        torch.mul(given, 2, out=out)
        if self.cuda.captured is not None:
            self.cuda.captured.append(lambda: torch.mul(given, 2, out=out))
        return {"twice": out, "all": (out,)}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def example(*values: float) -> torch.Tensor:
    return torch.tensor(values).as_subclass(OnGpu)


def test_an_input_like_the_example_replays_the_graph_and_each_answer_is_a_copy(cuda: FakeCuda) -> None:
    model = Model(cuda)
    fast = graphed(model, example(0.0, 0.0))
    before = model.calls

    one, two = fast(example(1.0, 2.0)), fast(example(3.0, 4.0))

    assert (model.calls, cuda.replays) == (before, 2)
    assert (one["twice"].tolist(), two["all"][0].tolist()) == ([2.0, 4.0], [6.0, 8.0])
    assert type(one["all"]) is tuple


def test_another_shape_runs_without_the_graph(cuda: FakeCuda) -> None:
    model = Model(cuda)
    fast = graphed(model, example(0.0, 0.0))
    before = model.calls

    assert fast(example(1.0))["twice"].tolist() == [2.0]
    assert (model.calls, cuda.replays) == (before + 1, 0)


def test_it_is_captured_after_runs_on_a_stream_of_its_own(cuda: FakeCuda) -> None:
    model = Model(cuda)

    graphed(model, example(0.0))

    assert (model.calls, cuda.streams, cuda.replays) == (4, 1, 0)


def test_on_a_cpu_the_model_stays_as_it_is() -> None:
    model = torch.nn.Linear(2, 2)

    assert graphed(model, torch.zeros(2)) is model
