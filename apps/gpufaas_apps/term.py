"""One term of a scheduler that leads: the engine, what it learns from etcd, and what is written behind to etcd."""

import asyncio
import contextlib
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, NoReturn

from msgspec.structs import replace

from gpufaas_adapters.etcd.client import Etcd, Listed
from gpufaas_adapters.etcd.deployed import DeployedFunctions, EntryChanged, EntryRemoved, FunctionEntry
from gpufaas_adapters.etcd.election import TTL_S, Leadership
from gpufaas_adapters.etcd.plans import EtcdPlans
from gpufaas_adapters.etcd.state import EtcdState, read_state
from gpufaas_apps.options import SchedulerOptions
from gpufaas_apps.process import first_of
from gpufaas_cache_manager.write_behind import WriteBehind
from gpufaas_cluster.leader import Leader
from gpufaas_cluster.scheduler_server import SchedulerServer
from gpufaas_core import compiled
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import StorageFailed
from gpufaas_core.model import Function, FunctionId, NodeId, Profile, Seconds
from gpufaas_core.plans import Snapshot
from gpufaas_core.scaling import ScalingRule, read_scaling_rule
from gpufaas_core.taken import joined
from gpufaas_planner.plans import Plans
from gpufaas_planner.shell import PlannerShell
from gpufaas_scheduler.journal import Header, Journal
from gpufaas_scheduler.scaler import Scaler, Watched
from gpufaas_scheduler.service import SchedulerService

if TYPE_CHECKING:
    from gpufaas_providers.broker import Broker

log = logging.getLogger("scheduler")

_SAVE_EVERY_S: Final[Seconds] = 5.0
_DRAINED: Final = "v1/drained/"
_NODES: Final = "v1/nodes/"


class Term:
    """Lasts from the election of this scheduler until another one may lead. `run` it once."""

    def __init__(self, given: SchedulerOptions, server: SchedulerServer, etcd: Etcd, leadership: Leadership) -> None:
        options, self._given = given.policy, given
        self._server = server
        self._etcd = etcd
        self._leadership = leadership
        self._header = Header(policy=options.policy, epoch=leadership.epoch)
        self._journal = options.journal
        self._planner = options.planner
        self._deployed = DeployedFunctions(etcd)
        self._entries: dict[str, FunctionEntry] = {}
        """The functions that the engine knows, by full name."""
        self._plan_store = EtcdPlans(etcd)
        self._planned = asyncio.Event()
        """The plan in force is known."""
        self._listed = asyncio.Event()
        """All functions of etcd are in `_entries`."""
        self._drains: asyncio.Queue[tuple[NodeId, bool]] = asyncio.Queue()
        self._leader: Leader
        """Since `run`."""
        self._failed: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Return when another scheduler may lead. Raise when the engine or a background task fails."""
        with contextlib.ExitStack() as stack:
            journal = None
            if self._journal is not None:
                path = self._journal.with_name(f"{self._journal.name}.{self._header.epoch}")
                journal = stack.enter_context(contextlib.closing(Journal(path, self._header)))
            service = SchedulerService(self._header.engine(), journal=journal, on_fatal=self._fail)
            log.info("engine.made policy=%s form=%s", self._header.policy, compiled.said())
            await self._lead(service)

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _lead(self, service: SchedulerService) -> None:
        leadership = self._leadership
        awaited = {NodeId(key.removeprefix(_NODES)) for key in await self._etcd.keys(_NODES)}
        state = EtcdState(self._etcd, leadership.compare())
        behind = WriteBehind(state, service.engine.take_changed, service.driver.doc, leadership.epoch)
        service.driver.on_event = behind.note
        leader = self._leader = self._server.leads = Leader(
            service,
            leadership.epoch,
            may_act=lambda: leadership.still_mine(self._etcd.clock()),
            drained={NodeId(key.removeprefix(_DRAINED)) for key in await self._etcd.keys(_DRAINED)},
            on_drain=lambda node, drain: self._drains.put_nowait((node, drain)),
        )
        self._plans = Plans(
            self._plan_store,
            lambda: {name: each.function for name, each in self._entries.items() if each.function is not None},
            lambda: [each.device for each in service.status().devices],
            tell=leader.plan,
        )
        # Nodes that were there under an older leader come back first: a plan without them would empty them.
        planner = PlannerShell(
            self._planner, lambda *asked: service.engine.snapshot(*asked) if leader.serving else Snapshot(), self._plans
        )
        leader.gateways.planner = planner.asked
        broker: Broker | None = None
        if self._given.offers:
            from gpufaas_apps.orders import broker_of  # most clusters order no nodes

            service.provider = broker = broker_of(self._given, self._etcd, leadership, service)
        scaler = Scaler(self._watched, service.status, service.scale)
        try:
            await first_of(
                leadership.lost.wait(), self._failed, self._follow_functions(), self._save_profiles(service),
                self._save_drains(), self._decide(awaited, behind, broker), scaler.run(asyncio.Event()),
                self._plan_store.follow(self._plans.learn, self._planned), planner.run(),
                broker.run() if broker is not None else asyncio.Event().wait(),
            )  # fmt: skip
        finally:
            if leader.serving and not leadership.lost.is_set():
                await behind.flush()  # for the next leader

    async def _decide(self, awaited: set[NodeId], behind: WriteBehind, broker: "Broker | None") -> None:
        """Begin to decide when all functions and the plan are known; from then on write the engine's state behind."""
        await self._listed.wait()
        await self._planned.wait()
        offered = None if broker is None else await broker.begin()
        self._leader.lead(awaited, await read_state(self._etcd, TTL_S), offered)
        await behind.run()
        await asyncio.Event().wait()  # the lead is lost: `leadership.lost` is set soon

    async def _save_drains(self) -> None:
        while True:
            node, drain = await self._drains.get()
            try:
                await (self._etcd.put(_DRAINED + node, b"{}") if drain else self._etcd.delete(_DRAINED + node))
            except StorageFailed as exc:
                log.warning("drain.not_kept node=%s reason=%s", node, exc)

    async def _save_profiles(self, service: SchedulerService) -> None:
        """Save learnt profiles every few seconds; what is not saved is learnt again."""
        while True:
            await asyncio.sleep(_SAVE_EVERY_S)
            for each in service.engine.take_learnt():
                worker = self._leader.deployed.workers.get(each.function)
                if worker is not None:
                    try:
                        await self._deployed.save_profile(worker.profiled, each.kind, each.profile)
                    except StorageFailed as exc:
                        log.warning("profile.not_saved %s", exc)

    # --- functions, as etcd has them ---

    async def _follow_functions(self) -> None:
        async with aclosing(self._deployed.watch()) as changes:
            async for change in changes:
                match change:
                    case EntryChanged(entry):
                        await self._changed(entry)
                    case EntryRemoved(name):
                        for each in _revisions(self._entries.pop(name, None)):
                            self._leader.deployed.remove(each, drain=False)
                    case Listed():
                        self._listed.set()

    async def _changed(self, entry: FunctionEntry) -> None:
        name = entry.record.full_name
        old = self._entries.get(name)
        if entry.function is None or entry.worker is None or not entry.is_complete:
            return  # half of it is still to come
        self._entries[name] = entry
        await self._deploy(entry.function, entry.worker)
        handover = entry.record.handover
        if (pending := handover.pending) is not None:
            await self._deploy(pending.function, pending.worker, entry.function.id)
        failed = "" if handover.failed is None else handover.failed.revision
        for each in _revisions(old) - _revisions(entry):
            self._leader.deployed.remove(each, drain=not failed or not each.endswith(f"@{failed}"))

    async def _deploy(self, function: Function, worker: WorkerSpec, succeeds: FunctionId | None = None) -> None:
        if function.id in self._leader.deployed.workers:
            return
        profiles: dict[str, Profile] = {}
        try:
            learnt, taken = [await self._deployed.profiles(each) for each in (worker.profiled, worker.taken_as)]
            profiles = joined(learnt, taken)
        except StorageFailed as exc:
            log.warning("profiles.not_read, are learnt again: %s", exc)
        function = replace(function, profiles={**function.profiles, **profiles})
        self._leader.deployed.deploy(function, worker, succeeds)

    def _watched(self) -> dict[str, Watched]:
        counted, cpu_s = self._leader.gateways.counted(), self._leader.nodes.cpu_seconds()
        return {
            name: Watched(entry.record.function_id, rule, *counted[name], cpu_s.get(entry.record.function_id, 0.0))
            for name, entry in self._entries.items()
            if name in counted and (rule := _rule_of(entry)) is not None
        }


def _revisions(entry: FunctionEntry | None) -> set[FunctionId]:
    """Return those that the engine knows of the function: the one that serves, and the one that is pending."""
    if entry is None:
        return set()
    pending = entry.record.handover.pending
    return {entry.record.function_id} | (set() if pending is None else {pending.record.function_id})


def _rule_of(entry: FunctionEntry) -> ScalingRule | None:
    spec = entry.record.spec
    rule = read_scaling_rule(spec.labels or {}, spec.annotations)
    return rule if rule is not None and rule.acts else None
