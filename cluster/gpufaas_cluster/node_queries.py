"""What a node answers when a gateway asks it about functions and their logs."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, cast

import msgspec

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.environment import measure
from gpufaas_core.errors import GpufaasError
from gpufaas_core.logs import FunctionLogs, LogQuery
from gpufaas_core.model import FunctionId
from gpufaas_core.wire.bodies import CHUNK_BYTES
from gpufaas_gpu_manager.node import Node

_line: Final = msgspec.json.Encoder().encode
_encode: Final = msgspec.msgpack.Encoder().encode


class NodeQueries:
    """:param id_: of the node, for messages"""

    def __init__(self, node: Node, logs: FunctionLogs, id_: str) -> None:
        self._logs = logs
        self._id = id_
        functions = node.functions
        self._answers: dict[str, tuple[Any, Callable[[Any], Awaitable[object]]]] = {
            "define": (WorkerSpec, functions.define),
            "check": (WorkerSpec, functions.check),
            "forget": (FunctionId, functions.forget),
            "usage": (FunctionId, node.host.usage_of),
            "environment": (None, lambda _: asyncio.to_thread(measure)),
            "known": (LogQuery, lambda query: asyncio.to_thread(logs.known, query.name, query.namespace)),
            "drop": (LogQuery, lambda query: asyncio.to_thread(logs.drop, query.name, query.namespace)),
        }
        """By query: the type of its value, and what answers it."""
        self._lines: dict[str, Callable[[LogQuery], AsyncGenerator[bytes]]] = {
            "logs": self._found_lines,
            "follow": self._followed_lines,
        }

    async def answer(self, what: str, value: bytes) -> bytes | AsyncGenerator[bytes]:
        """
        Return the answer in msgpack, or lines of JSON in pieces.

        :param value: in msgpack
        :raises GpufaasError: it cannot be answered
        """
        if what in self._lines:
            return self._lines[what](msgspec.msgpack.decode(value, type=LogQuery))
        if what not in self._answers:
            raise GpufaasError(f"node {self._id} does not know the query {what!r}: run the same release")
        kind, answer = self._answers[what]
        return _encode(await answer(msgspec.msgpack.decode(value, type=kind)))

    async def _found_lines(self, query: LogQuery) -> AsyncGenerator[bytes]:
        piece = bytearray()
        for line in await asyncio.to_thread(self._logs.query, query):
            piece += _line(line) + b"\n"
            if len(piece) > CHUNK_BYTES // 2:
                yield bytes(piece)
                piece.clear()
        if piece:
            yield bytes(piece)

    async def _followed_lines(self, query: LogQuery) -> AsyncGenerator[bytes]:
        async with aclosing(cast(Any, self._logs.follow(query))) as lines:
            async for line in lines:
                yield _line(line) + b"\n"
