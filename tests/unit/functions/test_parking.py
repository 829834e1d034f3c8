"""What a worker does when it is parked and woken. There is no GPU: a module that notes where it was moved stands in."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from gpufaas_core.wire.heads import ParkedHead, WakeHead, WokenHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import FrameReader
from gpufaas_functions.parking import ModelParking


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.moved: list[str] = []

    def to(self, device: str) -> "Module":  # type: ignore[override]
        self.moved.append(device)
        return self


class Memory:
    """That of a worker on a GPU."""

    released = synchronized = 0

    def release(self) -> None:
        self.released += 1

    def synchronize(self) -> None:
        self.synchronized += 1

    def held(self) -> int:
        return 7


def parking(model: Any, device: str = "cuda:0", **hooks: Any) -> ModelParking:
    return ModelParking(SimpleNamespace(**hooks), model, device, Memory())  # type: ignore[arg-type]


def asked(of: ModelParking, kind: int, head: msgspec.Struct | None = None) -> Any:
    answer = of.answer(kind, b"" if head is None else msgspec.msgpack.encode(head))
    assert answer is not None
    ((kind, header, _),) = FrameReader().feed(answer)
    return msgspec.msgpack.decode(header, type=ParkedHead if kind == Kind.PARKED else WokenHead)


def test_a_module_leaves_the_gpu_and_comes_back() -> None:
    model = Module()
    worker = parking(model)

    assert worker.can
    assert asked(worker, Kind.PARK) == ParkedHead(7)
    woken = asked(worker, Kind.WAKE, WakeHead())
    assert model.moved == ["cpu", "cuda:0"]
    assert (woken.failed, [name for name, _ in woken.phases]) == ("", ["transfer", "check"])


def test_the_hooks_of_a_handler_move_what_is_no_module() -> None:
    did: list[str] = []
    worker = parking(
        {"engine": object()},
        park=lambda _: did.append("parks"),
        wake=lambda _, device: did.append(f"wakes on {device}"),
    )

    assert worker.can
    asked(worker, Kind.PARK)
    asked(worker, Kind.WAKE, WakeHead())
    assert did == ["parks", "wakes on cuda:0"]


def test_nothing_is_moved_that_the_driver_has_moved() -> None:
    model = Module()
    assert asked(parking(model), Kind.WAKE, WakeHead(moves=False)).failed == ""
    assert model.moved == []


@pytest.mark.parametrize(
    ("model", "device", "hooks", "can"),
    [
        ({"a": torch.ones(2)}, "cuda:0", {}, False),
        ({"a": torch.ones(2)}, "cpu", {}, True),
        (object(), "cuda:0", {"park": print}, False),  # and no wake
        (Module(), "cuda:0", {}, True),
    ],
)
def test_what_can_be_parked(model: Any, device: str, hooks: dict[str, Any], can: bool) -> None:
    assert parking(model, device, **hooks).can is can


@pytest.mark.parametrize("of", [lambda tensor: {"a": tensor}, lambda tensor: [(1, tensor)], lambda tensor: tensor])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_samples_of_all_tensors_are_compared(of: Any, dtype: torch.dtype) -> None:
    tensor = torch.ones(1000, dtype=dtype)
    worker = parking(of(tensor), "cpu")
    assert asked(worker, Kind.WAKE, WakeHead()).failed == ""
    tensor.zero_()
    assert asked(worker, Kind.WAKE, WakeHead()).failed == "its self-check gave another answer than after its load"


def test_tensors_that_show_no_values_do_not_matter() -> None:
    odd = {"meta": torch.ones(3, device="meta"), "empty": torch.empty(0), "t": torch.ones(4, 5).t(),
           "sparse": torch.ones(2, 2).to_sparse()}  # fmt: skip
    assert asked(parking(odd, "cpu"), Kind.WAKE, WakeHead()).failed == ""


def test_the_check_of_a_handler_replaces_the_samples() -> None:
    says = {"b": 1, "a": [0.5]}
    tensor = torch.ones(3)
    worker = parking([tensor], "cpu", self_check=lambda _: says)
    tensor.zero_()
    assert asked(worker, Kind.WAKE, WakeHead()).failed == ""
    says["b"] = 2
    assert asked(worker, Kind.WAKE, WakeHead()).failed


def test_what_hooks_raise_is_said() -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("the engine is stuck")

    worker = parking(object(), park=fails, wake=fails)
    assert asked(worker, Kind.PARK).failed == "it could not be parked: RuntimeError: the engine is stuck"
    assert asked(worker, Kind.WAKE, WakeHead()).failed == "it could not be woken: RuntimeError: the engine is stuck"


def test_other_frames_are_for_others() -> None:
    assert parking(Module()).answer(Kind.LIMIT, b"") is None
