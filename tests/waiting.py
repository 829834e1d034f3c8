"""Waiting for what happens in another process, thread or task."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

LIMIT_S: Final = 60.0
"""What a test waits for happens within this, also on a busy machine. No test waits so long on purpose."""
_LOOK_S: Final = 0.005


def until(claim: Callable[[], object], what: str | Callable[[], str] = "", timeout_s: float = LIMIT_S) -> None:
    """
    Return when *claim* is true.

    :param what: the claim in words, for the message; or returns them, so that they say what is so at the end
    :raises AssertionError: it is not true after *timeout_s*
    """
    end = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < end, _too_late(claim, what, timeout_s)
        time.sleep(_LOOK_S)


async def eventually(
    claim: Callable[[], object], what: str | Callable[[], str] = "", timeout_s: float = LIMIT_S
) -> None:
    """Return when *claim* is true, as `until`; other tasks run meanwhile."""
    end = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < end, _too_late(claim, what, timeout_s)
        await asyncio.sleep(_LOOK_S)


def _too_late(claim: Callable[[], object], what: str | Callable[[], str], timeout_s: float) -> str:
    return f"not within {timeout_s:g} s: {what() if callable(what) else what or claim}"
