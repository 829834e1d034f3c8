"""
What a worker does when it is parked, and when it is woken.

On a GPU, its model moves to host memory: by the handler's ``park(model)`` and ``wake(model, device)``, or, without
them, as a torch module. On a CPU device the model is there already, and only the hooks are called, if there are any.

A woken copy must answer as before. What ``self_check(model)`` of the handler returned after the load is compared with
what it returns after each wake; without one, samples of all parameters and buffers are.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from gpufaas_core.wire.heads import ParkedHead, WakeHead, WokenHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import encode_frame
from gpufaas_functions.answers import Memory, in_one_line
from gpufaas_functions.memory import trim

PARK: Final = "park"
WAKE: Final = "wake"
SELF_CHECK: Final = "self_check"

_SAMPLED: Final = 32
"""Tensors that are compared at most, spread over all of them."""
_VALUES: Final = 16
"""Values of each of these."""
_DEPTH: Final = 3
"""How deep tensors are looked for in containers and attributes."""

_decode_wake: Final = msgspec.msgpack.Decoder(WakeHead).decode


class ModelParking:
    """Of one worker, with its author's *handler*, and the *model* that it has loaded on *device*."""

    def __init__(self, handler: Any, model: Any, device: str, memory: Memory) -> None:
        """Keeps what the self-check says now; raises what the author's check raises."""
        self._model = model
        self._device = device
        self._memory = memory
        self._park: Any = getattr(handler, PARK, None)
        self._wake: Any = getattr(handler, WAKE, None)
        self._check: Callable[[Any], Any] | None = getattr(handler, SELF_CHECK, None)
        self._hooked = callable(self._park) and callable(self._wake)
        self._moves = device != "cpu"
        self._known = self._checked()

    @property
    def can(self) -> bool:
        """Whether the model can be moved."""
        torch = sys.modules.get("torch")
        return self._hooked or not self._moves or (torch is not None and isinstance(self._model, torch.nn.Module))

    def answer(self, kind: int, header: bytes) -> bytes | None:
        """Do what a frame of the manager asks, and return the answer to it; None: it is for others."""
        if kind == Kind.PARK:
            return encode_frame(Kind.PARKED, self._parked())
        if kind == Kind.WAKE:
            return encode_frame(Kind.WOKEN, self._woken(_decode_wake(header)))
        return None

    def _parked(self) -> ParkedHead:
        try:
            if self._hooked:
                self._park(self._model)
            elif self._moves:
                self._model.to("cpu")
            if self._moves:
                self._memory.release()
            else:
                trim()  # no garbage is collected: that would copy pages of the fork server
            return ParkedHead(self._memory.held())
        except Exception as exc:
            return ParkedHead(0, f"it could not be parked: {in_one_line(exc)}")

    def _woken(self, head: WakeHead) -> WokenHead:
        began = time.perf_counter()
        try:
            if head.moves and self._hooked:
                self._wake(self._model, self._device)
            elif head.moves and self._moves:
                self._model.to(self._device)
            self._memory.synchronize()
            moved = time.perf_counter()
            reason = "" if self._checked() == self._known else "its self-check gave another answer than after its load"
            checked = time.perf_counter()
            return WokenHead(reason, [("transfer", moved - began), ("check", checked - moved)])
        except Exception as exc:
            return WokenHead(f"it could not be woken: {in_one_line(exc)}", [])

    def _checked(self) -> bytes:
        if self._check is not None:
            said = self._check(self._model)
            return bytes(said) if isinstance(said, bytes | bytearray) else msgspec.json.encode(said, order="sorted")
        tensors = list(_tensors(self._model))
        step = max(1, len(tensors) // _SAMPLED)
        digest = hashlib.blake2b(digest_size=16)
        for each in tensors[::step]:
            digest.update(f"{tuple(each.shape)} {each.dtype} ".encode())
            digest.update(_sample(each))
        return digest.digest()


def _tensors(model: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield the tensors of *model*: of a module its parameters and buffers, else those in containers and attributes."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if isinstance(model, torch.Tensor):
        yield model
    elif isinstance(model, torch.nn.Module):
        yield from model.parameters()
        yield from model.buffers()
    elif depth:
        if isinstance(model, dict):
            inner = list(model.values())
        elif isinstance(model, list | tuple):
            inner = list(model)
        else:
            inner = list(getattr(model, "__dict__", {}).values())
        for each in inner:
            yield from _tensors(each, depth - 1)


def _sample(tensor: Any) -> bytes:
    """Return some values of *tensor*, from all parts of it; nothing if they are not to be had."""
    import torch

    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.is_contiguous() or not tensor.numel():
        return b""
    flat = tensor.detach().reshape(-1)
    picked = flat[:: max(1, flat.numel() // _VALUES)][:_VALUES].contiguous()
    return bytes(picked.view(torch.uint8).tolist())
