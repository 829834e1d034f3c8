"""A call, as `Calls` knows it."""

import asyncio

from gpufaas_core.messages import Grant, Outer
from gpufaas_core.model import CallId, Seconds
from gpufaas_core.wire.bodies import INLINE, UPGRADE
from gpufaas_gateway.call_headers import Header, ReadHead, asked_timeout, told_goal, told_size
from gpufaas_gateway.call_life import CallLife
from gpufaas_gateway.ports import CallExchange
from gpufaas_gateway.quotas import Passage
from gpufaas_gateway.request import Request


class Call(CallLife):
    """One call: what is known of it, and its life."""

    __slots__ = (
        "asked", "asked_size", "begun", "body", "crossing", "file", "goal_s", "grant", "id", "length", "mode", "name",
        "ours", "outer", "passage", "passed", "ran_out", "request", "size", "streams",
    )  # fmt: skip

    def __init__(
        self, request: Request, began: float, read: ReadHead, name: str, call_id: str, outer: Outer | None,
        ours: list[Header],
    ) -> None:  # fmt: skip
        """
        :param began: on the clock of `time.perf_counter`
        :param name: X-Call-Id: the caller's, or ours
        :param call_id: the scheduler's id of the call
        :param ours: headers of every answer to it
        """
        super().__init__(request.caller, request.driven or asyncio.current_task(), began)
        self.request = request
        self.name = name
        self.id = CallId(call_id)
        self.outer = outer
        self.ours = ours
        self.passed, _, self.length, self.asked = read
        """The headers that the function gets; Content-Length, -1: unknown; what its caller asks of the platform."""
        self.crossing = False
        """The platform's headers say which origins may read the answer; the function's are dropped."""
        self.passage: Passage | None = None
        self.body: bytes | memoryview = b""
        self.mode = INLINE
        self.file = ""
        self.size: float = 0.0
        """The size of the body in bytes, or `asked_size`: what the scheduler is told."""
        self.asked_size: float | None = None
        self.goal_s: Seconds | None = None
        self.grant: Grant | None = None
        self.begun: CallExchange | Exception | None = None
        """It began before its task knows of the grant, or could not."""
        self.ran_out = False
        """It ran out of memory once, and runs again."""
        self.streams = False
        """Its answer streams: the end of that ends the call."""

    def has_begun(self) -> CallExchange:
        """:raises GrantRefused: as `Calls._begin`"""
        begun, self.begun = self.begun, None
        if isinstance(begun, Exception):
            raise begun
        assert begun is not None
        return begun

    def ask(self, asked: dict[bytes, bytes]) -> None:
        """
        Take what its caller asks for. Of a WebSocket only the goal counts.

        :raises InvalidSpec: it cannot be read
        """
        if goal := asked.get(b"x-latency-goal"):
            self.goal_s = told_goal(goal)
        if self.mode == UPGRADE:
            return
        if size := asked.get(b"x-gpufaas-size"):
            self.asked_size = told_size(size)
        if timeout := asked.get(b"x-timeout"):
            self.exec_s = min(self.exec_s, asked_timeout(timeout))
