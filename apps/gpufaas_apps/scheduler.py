"""
``gpufaas scheduler``: waits until nobody leads, then leads: the engine, and where gateways and nodes connect to.

What it needs is in etcd (functions, profiles, what the last leader wrote behind) and with the nodes (what they hold).
"""

import asyncio
import contextlib
import logging
from contextlib import aclosing

from msgspec.structs import replace

from gpufaas_apps.options import DEFAULT_SCHEDULER_PORT, SchedulerOptions
from gpufaas_apps.service import (
    Status,
    advertised,
    first_of,
    identity,
    leader_addresses,
    listening,
    on_signals,
    opened,
    run_service,
    status_served,
)
from gpufaas_apps.watchdog import notify
from gpufaas_cache_manager.write_behind import WriteBehind
from gpufaas_core.connection import split_address
from gpufaas_core.errors import StorageAway, StorageFailed
from gpufaas_core.model import NodeId
from gpufaas_core.scaling import ScalingRule, read_scaling_rule
from gpufaas_scheduler.journal import Header, Journal
from gpufaas_scheduler.metrics import scheduler_metrics
from gpufaas_scheduler.scaler import Scaler, Watched
from gpufaas_scheduler.server import SchedulerServer
from gpufaas_scheduler.service import SchedulerService
from gpufaas_store.election import TTL_S, Leadership, campaign
from gpufaas_store.etcd import Etcd, Listed
from gpufaas_store.functions import EntryChanged, EntryRemoved, EtcdFunctionStore, FunctionEntry
from gpufaas_store.state import EtcdState, read_state

log = logging.getLogger("scheduler")

_SAVE_EVERY_S = 5.0
_DRAINED = "v1/drained/"


def run(options: SchedulerOptions) -> None:
    run_service(_main(options))


async def _main(options: SchedulerOptions) -> None:
    me = identity(options.cluster, "scheduler")
    stop = asyncio.Event()
    on_signals(stop)
    server = SchedulerServer(me)
    listen = listening(options.listen, options.advertise, DEFAULT_SCHEDULER_PORT)
    port = await server.open(listen)
    address = advertised(listen, options.advertise, port)
    status = Status(ready=lambda: "waits for etcd", metrics=lambda: scheduler_metrics(server))
    host, _ = split_address(listen)
    async with status_served(status, host, options.cluster.status_port) as status_port:
        print(f"✓ scheduler  {me.id} at {address}, status at port {status_port}", flush=True)
        notify("READY=1")
        serving = asyncio.create_task(_serve(options, server, address, status))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            serving.cancel()
            stopping.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await server.close()


async def _serve(options: SchedulerOptions, server: SchedulerServer, address: str, status: Status) -> None:
    async with opened(options.cluster) as etcd:
        status.ready = lambda: ""  # a standby is ready to take over
        following = asyncio.create_task(_follow(etcd, server, address))
        try:
            while True:
                leadership = await campaign(
                    etcd, server.me.id, address, on_trouble=lambda exc: log.warning("etcd.trouble %s", exc)
                )
                print(f"✓ leads      epoch {leadership.epoch}", flush=True)
                try:
                    await _lead(options, server, etcd, leadership)
                except StorageAway as exc:
                    # It went between the election and the first look at what is there: nothing was decided yet.
                    log.warning("leader.cannot_begin epoch=%d reason=%s", leadership.epoch, exc)
                finally:
                    server.step_down()
                    if leadership.lost.is_set():
                        await leadership.abandon()
                    else:
                        await leadership.resign()
                log.warning("leader.ended epoch=%d", leadership.epoch)
        finally:
            following.cancel()


async def _follow(etcd: Etcd, server: SchedulerServer, mine: str) -> None:
    async for address in leader_addresses(etcd):
        server.leader = "" if address == mine else address


async def _lead(options: SchedulerOptions, server: SchedulerServer, etcd: Etcd, leadership: Leadership) -> None:
    """Return when another one may lead; raise when the engine fails."""
    policy = options.policy
    header = Header(
        policy=policy.policy,
        o3_limit=policy.o3_limit,
        wait_bound_s=policy.wait_bound_s,
        replacement=policy.replacement,
        epoch=leadership.epoch,
    )
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_fatal(error: BaseException) -> None:
        if not failed.done():
            failed.set_exception(error)

    with contextlib.ExitStack() as stack:
        journal = None
        if policy.journal is not None:
            path = policy.journal.with_name(f"{policy.journal.name}.{leadership.epoch}")
            journal = stack.enter_context(Journal(path, header))
        service = SchedulerService(header.engine(), journal=journal, on_fatal=on_fatal)
        store = EtcdFunctionStore(etcd)
        entries: dict[str, FunctionEntry] = {}
        awaited = {NodeId(key.removeprefix("v1/nodes/")) for key in await etcd.keys("v1/nodes/")}
        listed = asyncio.Event()
        server.may_act = lambda: leadership.still_mine(etcd.clock())
        state = EtcdState(etcd, leadership.compare())
        behind = WriteBehind(state, service.changed_docs, service.doc, leadership.epoch)
        service.on_event = behind.note
        server.begin(service, leadership.epoch)
        server.drained = {NodeId(key.removeprefix(_DRAINED)) for key in await etcd.keys(_DRAINED)}
        drains: asyncio.Queue[tuple[NodeId, bool]] = asyncio.Queue()
        server.on_drain = lambda node, drain: drains.put_nowait((node, drain))

        async def keep_drains() -> None:
            while True:
                node, drain = await drains.get()
                try:
                    await (etcd.put(_DRAINED + node, b"{}") if drain else etcd.delete(_DRAINED + node))
                except StorageFailed as exc:
                    log.warning("drain.not_kept node=%s reason=%s", node, exc)

        async def follow_functions() -> None:
            seen: set[str] = set()
            async with aclosing(store.watch_entries()) as changes:
                async for change in changes:
                    match change:
                        case EntryChanged(entry):
                            await changed(entry)
                            seen.add(entry.record.full_name)
                        case EntryRemoved(name):
                            seen.discard(name)
                            removed(name)
                        case Listed():
                            for name in [each for each in entries if each not in seen]:
                                removed(name)
                            listed.set()

        async def changed(entry: FunctionEntry) -> None:
            name = entry.record.full_name
            old = entries.get(name)
            if entry.function is None or entry.worker is None or not entry.is_complete:
                return  # half of it is still to come
            entries[name] = entry
            if old is None or old.record.revision != entry.record.revision:
                profiles = {}
                try:
                    profiles = await store.read_profiles(entry.function.digest)
                except StorageFailed as exc:
                    log.warning("profiles.not_read, are learnt again: %s", exc)
                function = replace(entry.function, profiles={**entry.function.profiles, **profiles})
                server.deploy(function, entry.worker)
                if old is not None and old.function is not None:
                    server.remove(old.function.id, drain=True)

        def removed(name: str) -> None:
            old = entries.pop(name, None)
            if old is not None and old.function is not None:
                server.remove(old.function.id, drain=False)

        def watched() -> dict[str, Watched]:
            counted, cpu_s = server.counted(), server.cpu_seconds()
            return {
                name: Watched(entry.record.function_id, rule, *counted[name], cpu_s.get(entry.record.function_id, 0.0))
                for name, entry in entries.items()
                if name in counted and (rule := _rule_of(entry)) is not None
            }

        async def keep() -> None:
            """Save profiles every so often; what is not saved is learnt again."""
            while True:
                await asyncio.sleep(_SAVE_EVERY_S)
                for each in service.take_learnt():
                    worker = server.names.get(each.function)
                    if worker is not None:
                        try:
                            await store.write_profile(worker.digest, each.kind, each.profile)
                        except StorageFailed as exc:
                            log.warning("profile.not_saved %s", exc)

        async def begin() -> None:
            await listed.wait()
            server.lead(awaited, await read_state(etcd, TTL_S))
            await behind.run()
            await asyncio.Event().wait()

        stopped = asyncio.Event()
        scaler = Scaler(watched, service.status, service.scale)
        try:
            await first_of(
                leadership.lost.wait(), failed, follow_functions(), keep(), keep_drains(), begin(), scaler.run(stopped)
            )
        finally:
            if server.serving and not leadership.lost.is_set():
                await behind.flush()  # for whoever leads next


def _rule_of(entry: FunctionEntry) -> ScalingRule | None:
    spec = entry.record.spec
    return read_scaling_rule(spec.labels or {}, spec.annotations)
