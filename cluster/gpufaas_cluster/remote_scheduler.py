"""
The scheduler at the other end of a link (ports: `ports.PlacementPort`, `ports.Scheduler`).

There is one link to the scheduler that leads, with any number of calls in flight on it (`remote_placement.py`). A new
link, to the same scheduler or to the next, begins with what this gateway has: it names the calls that run, and places
those that wait again, with their age.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gpufaas_cluster import control
from gpufaas_cluster.connection import Identity, Link
from gpufaas_cluster.leader_link import LeaderLink
from gpufaas_cluster.remote_placement import NO_LEADER_S, RemotePlacement
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import GrantRefused, InvalidSpec
from gpufaas_core.explanation import Explanation
from gpufaas_core.messages import Profiled
from gpufaas_core.model import CallId, EngineStatus, Function, FunctionId, NodeId, NodeView, Seconds, Taken

_PLAN_S: Final[Seconds] = 120.0
"""A plan takes no longer: that of now, and the next one (`shell.SOLVE_LIMIT_S`)."""
_NO_STATUS: Final = EngineStatus("", (), {}, {})


class RemoteScheduler(RemotePlacement):
    """See module. `leaders` keeps the connection; one event loop owns it."""

    def __init__(self, me: Identity, *, on_view: Callable[[control.ClusterState], None] = lambda _: None) -> None:
        """:param on_view: called with the state of the cluster when it changes"""
        super().__init__()
        self.me = me
        self.name = f"{me.id}.{me.boot}"
        self.leaders = LeaderLink(me, self)
        self._on_view = on_view
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._lost_at: float | None = self._loop.time()
        """Since when `view` is not of now; None: it is."""

    def unlinked(self, nodes: list[NodeId]) -> None:
        """Tell the scheduler which nodes are not reached from here."""
        if nodes != self._unlinked:
            self._unlinked = nodes
            self._send(control.UnreachedNodes(nodes))

    def deploy(
        self,
        function: Function,
        worker: WorkerSpec,  # noqa: ARG002 - the port's
        succeeds: FunctionId | None = None,  # noqa: ARG002
    ) -> None:
        """A revision may be called from here. The scheduler learns of it from etcd."""
        self._digests[function.id] = function.digest

    def remove(self, function: FunctionId, drain: bool) -> None:  # noqa: ARG002 - the port's
        """See `deploy`."""
        self._digests.pop(function, None)

    async def probe(self, function: Function, worker: WorkerSpec) -> None:
        await self.ask("probe", msgspec.json.encode((function, worker)).decode())
        self.deploy(function, worker)

    def end_probe(self, function: FunctionId) -> None:
        self.remove(function, drain=False)
        self._send(control.Query(0, "end_probe", function))

    def profiled(self, function: FunctionId, kind: str, taken: Taken) -> None:
        self._send(control.Query(0, "profiled", msgspec.json.encode(Profiled(function, kind, taken)).decode()))

    def scale(self, function: FunctionId, copies: int) -> None:
        if self._link is None:
            raise GrantRefused("no scheduler leads at the moment: scale again in a few seconds")
        self._link.send(control.ScaleFunction(function, copies))

    def counted(self, functions: dict[str, tuple[int, int, int, int]]) -> None:
        self._send(control.CallCounts(functions))

    def status(self) -> EngineStatus:
        """Return what the scheduler last sent: at most half a second old while one leads, else with its age."""
        status = _NO_STATUS if self.view is None else self.view.status
        return status if self._lost_at is None else replace(status, age_s=self._loop.time() - self._lost_at)

    async def explain(self, call: CallId) -> Explanation | None:
        granted = self.kept.ran_by(call)
        found: Explanation | None = msgspec.json.decode(
            await self.ask("explain", granted or call), type=Explanation | None
        )
        if found is None or granted is None:
            return found
        rule = f"it ran at once, by a grant that this gateway had kept, of call {granted}: {found.rule}"
        return replace(found, call=CallId(call), waited_s=0.0, rule=rule)

    async def planner(self, why: str) -> dict[str, Any]:
        """Return the status of the leader's planner; with *why*, once it has made a plan. Empty: there is none."""
        said: dict[str, Any] = msgspec.json.decode(await self.ask("planner", why, _PLAN_S if why else NO_LEADER_S))
        return said

    async def ask(self, what: str, value: str, limit_s: Seconds = NO_LEADER_S) -> bytes:
        """
        Return the scheduler's answer, JSON.

        :raises InvalidSpec: what was asked cannot be
        :raises GrantRefused: no scheduler leads, or it went away
        """
        if self._link is None:
            raise GrantRefused("no scheduler leads at the moment: ask again in a few seconds")
        self._serial += 1
        number = self._serial
        future = self._asked[number] = self._loop.create_future()
        self._link.send(control.Query(number, what, value))
        try:
            answer: bytes = await asyncio.wait_for(future, limit_s)
        except TimeoutError:
            raise GrantRefused("the scheduler does not answer: ask again in a few seconds") from None
        finally:
            self._asked.pop(number, None)
        return answer

    def nodes(self) -> list[NodeView]:
        """Return the nodes as the scheduler last said; while none says, with a note of those that are not reached."""
        nodes = [] if self.view is None else self.view.nodes
        if self._lost_at is None:
            return nodes
        return [
            replace(each, note="not reached by this gateway") if each.id in self._unlinked else each for each in nodes
        ]

    async def drain(self, node: str, drain: bool) -> None:
        await self.ask("drain" if drain else "undrain", node)

    @property
    def connected(self) -> bool:
        return self._link is not None

    def begin(self, link: Link) -> None:
        self._linked(link)

    def end(self) -> None:
        self._lost_at = self._lost_at or self._loop.time()
        for question in self._asked.values():
            if not question.done():
                question.set_exception(GrantRefused("the scheduler went away: ask again in a few seconds"))
        self._asked.clear()
        self._lost()

    def heard(self, message: object) -> None:
        if isinstance(message, control.Granted):
            self._granted(message.grant, message.keep_s)
        elif isinstance(message, control.CallRejected):
            self._rejected(message)
        elif isinstance(message, control.CallUnknown):
            self._unknown(message.call)
        elif isinstance(message, control.ClusterState):
            self.view = message
            self._ready = None
            self._lost_at = None if self.connected else self._lost_at
            self._on_view(message)
        elif isinstance(message, control.QueryReply):
            future = self._asked.pop(message.number, None)
            if future is not None and not future.done():
                if message.error:
                    future.set_exception(InvalidSpec(message.error))
                else:
                    future.set_result(message.value)
