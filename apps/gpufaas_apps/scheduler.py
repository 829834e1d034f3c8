"""
``gpufaas scheduler``: waits until no scheduler leads, then leads: runs the engine, and serves gateways and nodes.

All that it needs is in etcd (functions, profiles, what the last leader wrote behind) and at the nodes (what they hold).
"""

import contextlib
import logging

from gpufaas_adapters.etcd.client import Etcd
from gpufaas_adapters.etcd.election import campaign
from gpufaas_apps.cluster import advertised, identity, leader_addresses, listening, opened
from gpufaas_apps.options import DEFAULT_SCHEDULER_PORT, SchedulerOptions
from gpufaas_apps.process import asked_to_stop, first_of, prepare_process, run_loop, settle
from gpufaas_apps.status import Status, status_served
from gpufaas_apps.term import Term
from gpufaas_apps.watchdog import notify
from gpufaas_cluster.connection import Identity, split_address
from gpufaas_cluster.scheduler_metrics import scheduler_metrics
from gpufaas_cluster.scheduler_server import SchedulerServer
from gpufaas_core.errors import StorageAway

log = logging.getLogger("scheduler")


def run(options: SchedulerOptions) -> None:
    prepare_process()
    run_loop(SchedulerApp(options, identity(options.cluster, "scheduler")).run())


class SchedulerApp:
    """One scheduler of a cluster, which leads or stands by."""

    def __init__(self, options: SchedulerOptions, me: Identity) -> None:
        self._options = options
        self._server = SchedulerServer(me)
        self._status = Status(ready=lambda: "waits for etcd", metrics=lambda: scheduler_metrics(self._server.leads))
        self._address = ""

    async def run(self) -> None:
        """Serve until the process is asked to stop. Then resign, so that another leads at once, and close the port."""
        options, stop = self._options, asked_to_stop()
        listen = listening(options.listen, options.advertise, DEFAULT_SCHEDULER_PORT)
        host, _ = split_address(listen)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._server.close)
            port = await self._server.open(listen)
            self._address = advertised(listen, options.advertise, port)
            status_port = await stack.enter_async_context(
                status_served(self._status, host, options.cluster.status_port)
            )
            print(f"✓ scheduler  {self._server.me.id} at {self._address}, status at port {status_port}", flush=True)
            settle()
            notify("READY=1")
            await first_of(self._take_part(), stop.wait())

    async def _take_part(self) -> None:
        """Run the tasks of a scheduler in a cluster, without end. An engine that fails ends them."""
        async with opened(self._options.cluster) as etcd:
            self._status.ready = lambda: ""  # a standby is ready to take over
            await first_of(self._lead_in_turn(etcd), self._follow_leader(etcd))

    async def _follow_leader(self, etcd: Etcd) -> None:
        async for address in leader_addresses(etcd):
            self._server.address_of_leader = "" if address == self._address else address

    async def _lead_in_turn(self, etcd: Etcd) -> None:
        """Lead whenever no other scheduler does."""
        while True:
            leadership = await campaign(
                etcd, self._server.me.id, self._address, on_trouble=lambda exc: log.warning("etcd.trouble %s", exc)
            )
            print(f"✓ leads      epoch {leadership.epoch}", flush=True)
            try:
                await Term(self._options, self._server, etcd, leadership).run()
            except StorageAway as exc:
                # etcd went away after the election and before the state was read: nothing was decided yet.
                log.warning("leader.cannot_begin epoch=%d reason=%s", leadership.epoch, exc)
            finally:
                self._server.step_down()
                if leadership.lost.is_set():
                    await leadership.abandon()
                else:
                    await leadership.resign()
            log.warning("leader.ended epoch=%d", leadership.epoch)
