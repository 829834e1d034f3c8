"""What `load` sets for its thread holds in the other threads that run the author's code."""

import asyncio
import contextvars
import decimal
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvloop

from gpufaas_functions.thread_state import ThreadState

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
        (lambda: torch.set_autocast_enabled("cuda", True), lambda: torch.is_autocast_enabled("cuda"), True),
        (lambda: torch.set_autocast_dtype("cpu", torch.half), lambda: torch.get_autocast_dtype("cpu"), torch.half),
        (lambda: torch.set_autocast_cache_enabled(False), torch.is_autocast_cache_enabled, False),
        (lambda: torch.autograd.set_multithreading_enabled(False), torch._C._is_multithreading_enabled, False),
        (lambda: np.seterr(divide="raise"), lambda: np.geterr()["divide"], "raise"),
        (lambda: np.set_printoptions(precision=2), lambda: np.get_printoptions()["precision"], 2),
        (lambda: setattr(decimal.getcontext(), "prec", 5), lambda: decimal.getcontext().prec, 5),
        (lambda: OURS.set("loaded"), OURS.get, "loaded"),
    ],
    ids=[
        "grad mode", "inference mode", "default device", "autocast", "autocast on cuda", "its type", "its cache",
        "threads of backward", "numpy's errors", "numpy's output", "decimal", "a context variable",
    ],
)  # fmt: skip
def test_what_load_sets_for_its_thread_is_set_in_the_others(
    load: Callable[[], object], look: Callable[[], object], expected: object
) -> None:
    state = loaded(load)

    assert in_another(state, look) == expected
    assert in_another(state, look) == expected, "each time"
    assert in_another(loaded(lambda: None), look) != expected, "it is load's doing"


def test_torch_is_as_quick_as_before_where_nothing_was_set() -> None:
    """A default device, also one that is the default, is a mode that each function of torch goes through."""
    assert in_another(loaded(lambda: None), torch._C._len_torch_function_stack) == 0


def test_the_current_cuda_device_and_stream_are_those_of_load(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.local()
    for name, default in (("device", 0), ("stream", "the default one")):
        monkeypatch.setattr(torch.cuda, f"current_{name}", functools.partial(getattr, here, name, default))
        monkeypatch.setattr(torch.cuda, f"set_{name}", functools.partial(setattr, here, name))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def load() -> None:
        torch.cuda.set_device(1)
        torch.cuda.set_stream("a stream of load")  # type: ignore[arg-type]

    state = loaded(load)

    assert in_another(state, lambda: (torch.cuda.current_device(), torch.cuda.current_stream())) == (
        1,
        "a stream of load",
    )


# --- event loops ---


@pytest.fixture
def policy() -> Iterator[None]:
    """Python's own policy, which nobody has asked for a loop."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
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

    before = files()
    assert in_another(state, files) == before, "who does not ask pays nothing"
    assert in_another(state, asks) != in_another(state, asks)
    with ThreadPoolExecutor(1) as authors, pytest.raises(RuntimeError, match="no current event loop"):
        authors.submit(asyncio.get_event_loop).result()


@pytest.mark.usefixtures("policy")
def test_a_loop_that_the_author_has_set_stays_and_so_does_his_policy() -> None:
    def sets() -> bool:
        mine = asyncio.new_event_loop()
        asyncio.set_event_loop(mine)
        try:
            return asyncio.get_event_loop() is mine
        finally:
            mine.close()

    def asks() -> bool:
        loop = asyncio.get_event_loop()
        loop.close()
        return isinstance(loop, uvloop.Loop)

    state = loaded(uvloop.install)

    assert in_another(state, sets)
    assert in_another(state, asks)
