"""
The code inside a worker: the author's API (author), the worker's main program (runner), loaders of weights (loading).

Authors import from here. Modules are imported when they are used, so that a CPU function does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpufaas_functions.author import Context, Event
    from gpufaas_functions.graphs import graphed
    from gpufaas_functions.loading import load_module, load_weights

__all__ = ["Context", "Event", "graphed", "load_module", "load_weights"]

_HOME = {
    "Context": "author", "Event": "author", "graphed": "graphs", "load_module": "loading", "load_weights": "loading",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
