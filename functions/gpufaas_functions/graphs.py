"""
CUDA graphs for an author's `load`: the kernels of a model are launched as one, which saves small models most of a call.

Written by torch's documentation and tested with a stand-in; not run on a real GPU.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from torch import Tensor

_WARM_UPS: Final = 3
"""Runs before the capture, as torch's documentation has it: libraries choose kernels and take memory in them."""


def graphed(model: "Callable[[Tensor], Any]", example: "Tensor") -> "Callable[[Tensor], Any]":
    """
    Return *model*, captured as a CUDA graph for inputs like *example*; itself where *example* is not on a GPU.

    *model* takes one tensor, returns tensors (one, or a tuple, list or dict of them), and does the same whatever the
    values are. An input of another shape, type or device runs without the graph. Gradients are not computed.
    """
    return _Graphed(model, example) if example.is_cuda else model


class _Graphed:
    """See `graphed`. Calls from several threads take turns: a graph has one input and one output."""

    def __init__(self, model: "Callable[[Tensor], Any]", example: "Tensor") -> None:
        import torch as _torch

        self._torch = torch = cast(Any, _torch)
        self._model = model
        self._lock = threading.Lock()
        self._input = example.clone()
        beside = torch.cuda.Stream(example.device)
        beside.wait_stream(torch.cuda.current_stream(example.device))
        with torch.no_grad(), torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                model(self._input)
        torch.cuda.current_stream(example.device).wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self._graph):
            self._output = model(self._input)

    def __call__(self, given: "Tensor") -> Any:
        own = self._input
        with self._torch.no_grad():
            if (given.shape, given.dtype, given.device) != (own.shape, own.dtype, own.device):
                return self._model(given)
            with self._lock:
                own.copy_(given)
                self._graph.replay()
                return _copied(self._output)


def _copied(output: Any) -> Any:
    """Return copies of the tensors in *output*, which the next replay writes over."""
    if isinstance(output, dict):
        return {key: _copied(each) for key, each in output.items()}
    if isinstance(output, (tuple, list)):
        return type(output)(map(_copied, output))
    return output.clone()
