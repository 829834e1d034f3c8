"""
What ``load`` sets for its thread holds in all calls. With several slots, it held for those in the main thread only: the
first call was right, and later ones had gradients, another device, and no event loop.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.integration.conftest import HTTP, TORCH, Platform

CALLS = 4
SETS = f"""
    import asyncio, contextvars, threading
    import numpy, torch

    ours = contextvars.ContextVar("ours", default="nothing")
    meet = threading.Barrier({CALLS})

    def load(device):
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        numpy.seterr(divide="raise")
        ours.set("loaded")

    def found():
        return [torch.is_grad_enabled(), str(torch.ones(1).device), numpy.geterr()["divide"], ours.get()]
"""
FOUND = [False, "meta", "raise", "loaded"]
THREADS = """
    def handle(model, event, context):
        meet.wait(60)  # so that each call has a thread
        loop = asyncio.get_event_loop()
        here = found() + [loop.run_until_complete(asyncio.sleep(0, "a loop"))]
        ours.set("a call")
        return here
"""
LOOP = """
    async def handle(model, event, context):
        here = await asyncio.to_thread(found) + found()
        ours.set("a call")
        return here
"""


def answers(platform: Platform, path: str) -> list[Any]:
    with ThreadPoolExecutor(CALLS) as callers:
        return [each.json() for each in callers.map(lambda _: platform.call(path), range(2 * CALLS))]


@pytest.mark.parametrize(
    ("source", "lang", "expected"),
    [
        (SETS + THREADS, TORCH, [*FOUND, "a loop"]),
        (SETS + "    load('cpu')\n" + THREADS.replace("model, ", ""), HTTP, [*FOUND, "a loop"]),
        (SETS + LOOP, TORCH, FOUND * 2),
    ],
    ids=["load", "import", "threads of an async handler"],
)
def test_what_load_sets_holds_in_every_call(platform: Platform, source: str, lang: str, expected: list[Any]) -> None:
    path = platform.deploy("sets", source, lang, slots=str(CALLS))

    assert answers(platform, path) == [expected] * (2 * CALLS)
