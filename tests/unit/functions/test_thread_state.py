"""What `load` sets for its thread holds in the other threads that run the author's code."""

import asyncio
import contextvars
import decimal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpufaas_functions.thread_state import ThreadState, give_loops

OURS: contextvars.ContextVar[str] = contextvars.ContextVar("ours", default="nothing")
kept: list[object] = []


def stay(context: Any) -> None:
    context.__enter__()
    kept.append(context)


def loaded(load: Callable[[], object]) -> ThreadState:
    """Return the state of a thread that has run *load*, and has ended."""

    def run() -> ThreadState:
        load()
        return ThreadState()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def in_another(state: ThreadState, look: Callable[[], object]) -> object:
    """Return what *look* finds in a thread that serves with *state*."""
    found: list[object] = []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(state.run, lambda: found.append(look())).result()
    return found[0]


@pytest.mark.parametrize(
    ("load", "look", "expected"),
    [
        (lambda: torch.set_grad_enabled(False), lambda: torch.ones(1, requires_grad=True).exp().requires_grad, False),
        (lambda: stay(torch.inference_mode()), lambda: torch.ones(1).is_inference(), True),
        (lambda: torch.set_default_device("meta"), lambda: torch.ones(1).device.type, "meta"),
        (lambda: stay(torch.autocast("cpu", torch.half)), lambda: (torch.eye(2) @ torch.eye(2)).dtype, torch.half),
        (lambda: np.seterr(divide="raise"), lambda: np.geterr()["divide"], "raise"),
        (lambda: np.set_printoptions(precision=2), lambda: np.get_printoptions()["precision"], 2),
        (lambda: setattr(decimal.getcontext(), "prec", 5), lambda: decimal.getcontext().prec, 5),
        (lambda: OURS.set("loaded"), OURS.get, "loaded"),
    ],
    ids=[
        "grad mode", "inference mode", "default device", "autocast", "numpy's errors", "numpy's output", "decimal",
        "a context variable",
    ],
)  # fmt: skip
def test_what_load_sets_for_its_thread_is_set_in_the_others(
    load: Callable[[], object], look: Callable[[], object], expected: object
) -> None:
    state = loaded(load)

    assert in_another(state, look) == expected
    assert in_another(state, look) == expected, "each time"
    assert in_another(loaded(lambda: None), look) != expected, "it is load's doing"


def test_a_thread_that_changes_its_decimal_context_in_place_changes_no_other_one() -> None:
    state = loaded(lambda: setattr(decimal.getcontext(), "prec", 5))

    in_another(state, lambda: setattr(decimal.getcontext(), "prec", 77))

    assert in_another(state, lambda: decimal.getcontext().prec) == 5


def test_torch_is_as_quick_as_before_where_nothing_was_set() -> None:
    """A default device, also one that is the default, is a mode that each function of torch goes through."""
    assert in_another(loaded(lambda: None), torch._C._len_torch_function_stack) == 0


# --- event loops ---


@pytest.fixture
def policy() -> Iterator[None]:
    before = asyncio.get_event_loop_policy()
    give_loops()
    yield
    asyncio.set_event_loop_policy(before)


def files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.usefixtures("policy")
def test_each_thread_has_an_event_loop_of_its_own_once_it_asks_for_one() -> None:
    state = loaded(lambda: None)

    def asks() -> list[asyncio.AbstractEventLoop]:
        first = asyncio.get_event_loop()
        assert first.run_until_complete(asyncio.sleep(0, "it runs")) == "it runs"
        assert asyncio.get_event_loop() is first
        first.close()
        asyncio.run(asyncio.sleep(0))  # takes the loop away, in the main thread, too
        asyncio.get_event_loop().close()
        return [first]

    def sets() -> bool:
        mine = asyncio.new_event_loop()
        asyncio.set_event_loop(mine)
        try:
            return asyncio.get_event_loop() is mine
        finally:
            mine.close()

    before = files()
    assert in_another(state, files) == before, "who does not ask pays nothing"
    assert in_another(state, asks) != in_another(state, asks)
    assert in_another(state, sets), "a loop that the author has set stays"
