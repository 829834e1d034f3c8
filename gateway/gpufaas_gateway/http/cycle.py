"""What uvicorn knows of a request that it does not answer itself: to it, that is a cycle and a task of its own."""

import asyncio
from typing import Any, Self

from gpufaas_core.driven import Driven


class Cycle(Driven):
    """
    A request whose state uvicorn reads and writes under these names (`RequestResponseCycle`), on its connection.

    A cycle is in `ServerState.tasks` while it runs: uvicorn waits for those when it stops, and cancels them in the end.
    """

    __slots__ = (
        "_tasks", "body", "chunked_encoding", "disconnected", "keep_alive", "more_body", "response_complete",
        "response_started", "waiting_for_100_continue",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop, tasks: set[Any], keep_alive: bool, expects: bool) -> None:
        """
        :param keep_alive: the connection stays open after its answer
        :param expects: its caller sends the body when we say that we read it
        """
        super().__init__(loop)
        self._tasks = tasks
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expects
        self.body: bytes | bytearray = b""
        """What came of its body and was not received yet."""
        self.more_body = True
        self.disconnected = False
        """Its connection was lost before it was answered."""
        self.response_started = False
        """Some of the answer was sent."""
        self.chunked_encoding = False
        self.response_complete = False

    @property
    def message_event(self) -> Self:
        """uvicorn sets it when the connection is lost."""
        return self

    def set(self) -> None:
        """Wake who waits for the body."""

    def on_body(self, piece: bytes) -> None:
        """A piece of the body has come."""

    def ended(self) -> None:
        self._tasks.discard(self)
