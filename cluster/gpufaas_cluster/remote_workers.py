"""What the management routes ask of nodes elsewhere: to define and check functions; their usage and logs."""

import asyncio
import heapq
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

import msgspec

from gpufaas_cluster.connection import NotReached
from gpufaas_cluster.remote_nodes import NodeClient, RemoteNodes
from gpufaas_core.bundle import Manifest, WorkerSpec
from gpufaas_core.constraints import Constraint, satisfied
from gpufaas_core.environment import Environment, grouped
from gpufaas_core.errors import GpufaasError
from gpufaas_core.logs import LogLine, LogQuery
from gpufaas_core.model import Device, FunctionId, Seconds
from gpufaas_core.units import Bytes
from gpufaas_gateway.errors import Unavailable

log = logging.getLogger("nodes")
T = TypeVar("T")

_ASK_S: Final[Seconds] = 10.0
"""A node that has not answered within this is left out."""
_LINES: Final = 100
"""Lines of a log that wait for their reader; beyond that, nodes wait."""
_decode_manifest: Final = msgspec.msgpack.Decoder(Manifest).decode
_decode_environment: Final = msgspec.msgpack.Decoder(Environment).decode
_decode_usage: Final = msgspec.msgpack.Decoder(tuple[float, Bytes] | None).decode
_decode_known: Final = msgspec.msgpack.Decoder(bool).decode
_decode_line: Final = msgspec.json.Decoder(LogLine).decode


class RemoteWorkers:
    """`ports.Workers`: one node defines and checks a function; the scheduler tells all nodes that may run it."""

    def __init__(self, nodes: RemoteNodes) -> None:
        self._nodes = nodes
        self._defined: dict[FunctionId, str] = {}
        """The node on which this gateway defined a revision."""

    async def define(self, spec: WorkerSpec) -> Manifest:
        """
        Do `ports.Workers.define` on the first node with a device that satisfies *spec* and can be reached.

        :raises Unavailable: there is none now
        """
        why = "no node with a device for it is there"
        for node in self._candidates(spec.constraints):
            try:
                manifest = _decode_manifest(await node.ask("define", spec))
            except NotReached as exc:
                why = str(exc)
                continue
            self._defined[spec.function] = node.id
            return manifest
        raise Unavailable(f"{spec.name} cannot be prepared now: {why}; try again, or see what 'gpufaas node list' says")

    async def check(self, spec: WorkerSpec) -> None:
        """Do `ports.Workers.check` where the revision was defined; elsewhere if that node is gone."""
        node = self._nodes.get(self._defined.get(spec.function, ""))
        if node is not None and not node.down:
            try:
                await node.ask("check", spec)
                return
            except NotReached:
                pass
        await self.define(spec)
        node = self._nodes.get(self._defined[spec.function])
        try:
            if node is None:
                raise NotReached("its node left")
            await node.ask("check", spec)
        except NotReached as exc:
            raise Unavailable(f"{spec.name} cannot be checked now: {exc}; try again") from exc

    async def forget(self, function: FunctionId) -> None:
        """Do `ports.Workers.forget` on the node that defined it. The scheduler tells the others."""
        node = self._nodes.get(self._defined.pop(function, ""))
        if node is not None and not node.down:
            try:
                await node.ask("forget", function)
            except GpufaasError:
                pass  # it is gone, and so is what it had

    def devices(self) -> list[Device]:
        return self._nodes.devices()

    async def environments(self, constraints: Sequence[Constraint] = ()) -> list[Environment]:
        """Return what `ports.Workers.environments` says; a node whose release cannot answer is left out, too."""
        answers = await _each(self._candidates(constraints), lambda node: node.ask("environment", None))
        return grouped({id_: _decode_environment(each) for id_, each in answers.items()})

    async def usage_of(self, function: FunctionId) -> tuple[float, Bytes] | None:
        """Return the millicores and bytes that its workers use now on all nodes; None: it has none."""
        answers = await _each(self._nodes.nodes, lambda node: node.ask("usage", function))
        used = [each for each in map(_decode_usage, answers.values()) if each is not None]
        return (sum(cpu for cpu, _ in used), sum(memory for _, memory in used)) if used else None

    def _candidates(self, constraints: Sequence[Constraint]) -> list[NodeClient]:
        """Return the nodes that may have a function with *constraints*, those that are known to be alive first."""
        fit = [
            node
            for node in self._nodes.nodes
            if not node.down and any(satisfied(constraints, device.labels) for device in node.view.devices)
        ]
        return sorted(fit, key=lambda node: (node.view.draining, not node.linked, node.id))


class RemoteLogs:
    """
    `ports.LogReader` over all nodes, in the order of time; each node keeps its own lines.

    `query`, `known` and `drop` block: call them from any thread but the event loop's.
    """

    def __init__(self, nodes: RemoteNodes) -> None:
        self._nodes = nodes
        self._followers: set[asyncio.Queue[LogLine | None]] = set()

    def query(self, query: LogQuery) -> list[LogLine]:
        return _merged(self._wait(self._query_each(query)).values(), query.tail)

    def known(self, name: str, namespace: str) -> bool:
        answers = self._wait(_each(self._nodes.nodes, lambda node: node.ask("known", LogQuery(name, namespace))))
        return any(map(_decode_known, answers.values()))

    def drop(self, name: str, namespace: str) -> None:
        self._wait(_each(self._nodes.nodes, lambda node: node.ask("drop", LogQuery(name, namespace))))

    async def follow(self, query: LogQuery) -> AsyncGenerator[LogLine, None]:
        """Yield what `query` returns, then each line as it comes, also from nodes that come (back) later."""
        lines: asyncio.Queue[LogLine | None] = asyncio.Queue(_LINES)
        readers: dict[str, asyncio.Task[None]] = {}
        begin_at: dict[str, datetime] = {}

        async def read(node: NodeClient) -> None:
            begin = msgspec.structs.replace(query, since=begin_at.get(node.id, query.since), tail=0)
            try:
                async for raw in node.ask_lines("follow", begin):
                    line = _decode_line(raw)
                    await lines.put(line)
                    begin_at[node.id] = _after(line)
            except GpufaasError:
                pass  # it is gone; if it comes back, reading goes on from here

        def look() -> None:
            for node in self._nodes.nodes:
                if not node.down and (node.id not in readers or readers[node.id].done()):
                    readers[node.id] = asyncio.get_running_loop().create_task(read(node))

        self._followers.add(lines)
        try:
            by_node = await self._query_each(query)
            for line in _merged(by_node.values(), query.tail):
                yield line
            begin_at = {node: _after(found[-1]) for node, found in by_node.items() if found}
            self._nodes.watchers.add(look)
            look()
            while (following := await lines.get()) is not None:
                yield following
        finally:
            self._nodes.watchers.discard(look)
            self._followers.discard(lines)
            for reader in readers.values():
                reader.cancel()

    def end_followers(self) -> None:
        """End all followers: a server that stops must not wait for them."""
        for lines in self._followers:
            if lines.full():
                lines.get_nowait()
            lines.put_nowait(None)

    async def _query_each(self, query: LogQuery) -> dict[str, list[LogLine]]:
        """Return the lines by node; nodes that cannot be reached are left out."""

        async def lines_of(node: NodeClient) -> list[LogLine]:
            return [_decode_line(line) async for line in node.ask_lines("logs", query)]

        return await _each(self._nodes.nodes, lines_of)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._nodes.loop).result()


async def _each(nodes: Iterable[NodeClient], ask: Callable[[NodeClient], Coroutine[Any, Any, T]]) -> dict[str, T]:
    """Return the answers by node. A node that is gone, or fails, or takes too long, is left out."""
    answers: dict[str, T] = {}

    async def within(node: NodeClient) -> None:
        try:
            async with asyncio.timeout(_ASK_S):
                answers[node.id] = await ask(node)
        except (GpufaasError, TimeoutError) as exc:
            log.warning("a node is left out: %s", exc or f"no answer within {_ASK_S:g} s")

    await asyncio.gather(*(within(node) for node in nodes if not node.down))
    return answers


def _merged(by_node: Iterable[list[LogLine]], tail: int) -> list[LogLine]:
    lines = list(heapq.merge(*by_node, key=lambda line: line.timestamp))
    return lines[-tail:] if tail > 0 else lines


def _after(line: LogLine) -> datetime:
    """Return the moment after *line*: timestamps of a function's lines on a node strictly grow."""
    return datetime.fromisoformat(line.timestamp) + timedelta(microseconds=1)
