"""
Loaders of weights, for an author's `load`. torch is imported inside the functions, so that importing this is cheap.

A file that the node keeps in host memory is read from there (`staged`).

The fast way builds the module on the meta device (no memory, no initialisation) and makes the mapped file its
parameters: nothing is copied, and pages are read when they are first used. On CPU safetensors maps privately and
writable (``rw-p``): untouched pages belong to the page cache, but the whole mapping counts in VmData, and so against
RLIMIT_DATA.
"""

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpufaas_core.errors import InvalidSpec, LoadFailed
from gpufaas_functions.memory import is_out_of_memory
from gpufaas_functions.staged import UnknownType, descriptor_of, source_of
from gpufaas_functions.staged import tensors as tensors_of
from gpufaas_functions.transfer import to_cuda

if TYPE_CHECKING:
    from torch import nn

ALLOW_PICKLE: Final = "GPUFAAS_ALLOW_PICKLE"
_PICKLED: Final = frozenset((".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".joblib"))

_spent: Final = {"read": 0.0, "transfer": 0.0}


@contextlib.contextmanager
def spending(what: str) -> Iterator[None]:
    """Count the time of the block as *what* of the load: ``read`` or ``transfer``."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _spent[what] += time.perf_counter() - began


def spent() -> dict[str, float]:
    """Return the seconds that loaders of this process have spent so far."""
    return dict(_spent)


def load_module(build: "Callable[[], nn.Module]", path: str | Path, device: str = "cpu") -> "nn.Module":
    """
    Return the module that *build* makes, with the weights in the safetensors file *path*, in eval mode on *device*.

    *build* is called on the meta device, so it must not use values of the tensors that it makes. Buffers that are not
    saved with the weights (``persistent=False``) get their values from a second call, which allocates only buffers.

    :raises LoadFailed: the weights do not fit the module; names what is missing, unknown or of another shape
    :raises FileNotFoundError: no such file
    """
    import torch

    weights = load_weights(path, device)
    if not isinstance(weights, dict):
        raise InvalidSpec(f"{path} is a model by itself: use load_weights; load_module takes .safetensors")
    with torch.device("meta"), _no_filling():
        module = build()
    _assign(module, weights, path)
    left = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if left:
        with _parameters_on_meta(), _no_filling():
            donor = build()
        for name in left:
            holder, _, last = name.rpartition(".")
            module.get_submodule(holder).register_buffer(last, donor.get_buffer(name), persistent=False)
    module.requires_grad_(False).eval()
    with spending("transfer"):
        return module.to(device)


def load_weights(path: str | Path, device: str = "cpu") -> Any:
    """
    Return what the file *path* holds, ready on *device*.

    ``.safetensors``: a dict of tensors, mapped, not copied, on CPU. ``.pt2`` (torch.export): a module to call.
    ``.onnx``: an onnxruntime session. Pickles: what ``torch.load`` returns; of
    tensors only, unless the author allows more.

    :raises InvalidSpec: the kind of file is unknown or refused; says why and what to do
    :raises LoadFailed: the file is damaged
    :raises FileNotFoundError: no such file
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}: put them beside handler.py, or let build.py make them")
    with spending("transfer" if device.startswith("cuda") else "read"):  # on a GPU both go on at the same time
        return _read(path, device)


def _read(path: Path, device: str) -> Any:
    match path.suffix.lower():
        case ".safetensors":
            return _load_safetensors(path, device)
        case ".pt2":
            import torch

            with _damage(path):
                return torch.export.load(path).module().to(device)
        case ".onnx":
            return _onnx_session(path, device)
        case suffix if suffix in _PICKLED:
            return _load_pickle(path, device)
        case suffix:
            raise InvalidSpec(f"{path.name}: no loader for {suffix or 'a file without suffix'}: {_KNOWN}")


_KNOWN: Final = "save as .safetensors (safetensors.torch.save_file), .pt2 (torch.export.save) or .onnx"


def _load_safetensors(path: Path, device: str) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with contextlib.suppress(UnknownType):
        if device.startswith("cuda"):
            return to_cuda(source_of(path), device)
        if device == "cpu" and (descriptor := descriptor_of(path)) is not None:
            return tensors_of(path, descriptor)
    try:
        return load_file(path, device=device)
    except SafetensorError as exc:
        raise LoadFailed(f"{path} is damaged: {exc}: build the function again") from exc


def _onnx_session(path: Path, device: str) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise InvalidSpec(f"{path.name} needs onnxruntime: put onnxruntime into requirements.txt") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    cuda = device.startswith("cuda")
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"] if cuda else ["CPUExecutionProvider"]
    with _damage(path):
        return onnxruntime.InferenceSession(str(path), options, providers=providers)


def _load_pickle(path: Path, device: str) -> Any:
    import torch

    allowed = os.environ.get(ALLOW_PICKLE, "").lower() in ("1", "true")
    try:
        with _damage(path):
            return torch.load(path, map_location=device, weights_only=not allowed)
    except LoadFailed as exc:
        if allowed or not isinstance(exc.__cause__, pickle.UnpicklingError | RuntimeError):
            raise
        raise InvalidSpec(
            f"{path.name} is a pickle of more than tensors, which runs any code that its maker put in: {_KNOWN}; or, "
            'if you trust its maker, set the annotation gpufaas.allow-pickle: "true"'
        ) from exc


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Raise `LoadFailed` for all errors but a lack of memory: readers of archives have no common one for damage."""
    try:
        yield
    except Exception as exc:
        if is_out_of_memory(exc):
            raise
        raise LoadFailed(f"{path} cannot be loaded: {' '.join(str(exc).split())}") from exc


def _assign(module: "nn.Module", weights: dict[str, Any], path: str | Path) -> None:
    missing_and_more = module.state_dict().keys() ^ weights.keys()
    if missing_and_more:
        missing = sorted(missing_and_more - weights.keys())
        more = sorted(missing_and_more & weights.keys())
        parts = [f"{what} {_few(names)}" for what, names in (("it lacks", missing), ("it has besides", more)) if names]
        raise LoadFailed(f"{path} does not fit {type(module).__name__}: {', '.join(parts)}")
    try:
        module.load_state_dict(weights, assign=True)
    except RuntimeError as exc:
        raise LoadFailed(f"{path} does not fit {type(module).__name__}: {' '.join(str(exc).split())}") from exc


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _no_filling() -> Any:
    """
    Keep initialisers from tensors on the meta device, which have no memory to fill.

    Without this the first ``normal_`` there (each nn.Embedding has one) imports torch's decompositions and sympy: 1 s
    and 65 MB in every worker, measured on `embed`.
    """
    from torch.overrides import TorchFunctionMode

    class NoFilling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if getattr(func, "__name__", "") in _FILLS:
                filled = args[0] if args else kwargs.get("tensor")
                if getattr(filled, "is_meta", False):
                    return filled
            return func(*args, **kwargs)

    return NoFilling()


_FILLS: Final = frozenset(
    ("normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_",
     "orthogonal_", "sparse_", "dirac_", "eye_", "constant_", "ones_", "zeros_", "fill_", "zero_", "bernoulli_",
     "exponential_", "log_normal_", "cauchy_", "geometric_", "random_")
)  # fmt: skip


def _parameters_on_meta() -> contextlib.AbstractContextManager[Any]:
    """Move each parameter to the meta device when it is registered, so that only buffers take memory."""
    from torch import nn
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def on_meta(_module: Any, _name: str, parameter: Any) -> Any:
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook: contextlib.AbstractContextManager[Any] = register_module_parameter_registration_hook(on_meta)
    return hook
