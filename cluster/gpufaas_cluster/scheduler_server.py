"""Listens for gateways and nodes. A scheduler that does not lead tells them the address of the one that does."""

import asyncio

from gpufaas_cluster import control
from gpufaas_cluster.connection import Identity, Link, listen
from gpufaas_cluster.leader import Leader


class SchedulerServer:
    """Accepts links, and passes them to `leads` while this scheduler leads. One event loop owns it."""

    def __init__(self, me: Identity) -> None:
        self.me = me
        self.address_of_leader = ""
        """The address of the other scheduler that leads, as far as it is known."""
        self.leads: Leader | None = None
        """The term of this scheduler; None: it does not lead."""
        self._server: asyncio.Server | None = None

    async def open(self, address: str) -> int:
        """Listen; return the port."""
        self._server = await listen(address, self.me, self._accept)
        return int(self._server.sockets[0].getsockname()[1])

    def step_down(self) -> None:
        """This scheduler does not lead any more."""
        leader, self.leads = self.leads, None
        if leader is not None:
            leader.end()

    async def close(self) -> None:
        self.step_down()
        if self._server is not None:
            self._server.close()

    def _accept(self, link: Link, hello: control.ClientHello) -> int | control.Turned:
        leader, me = self.leads, self.me.id
        if leader is not None and not leader.may_act():
            return control.Turned("not_leader", f"scheduler {me} stood still, and asks whether it still leads")
        if leader is None or not leader.open:
            other = self.address_of_leader
            where = f"the scheduler at {other} leads" if other else "none leads yet"
            return control.Turned("not_leader", f"scheduler {me} does not lead: {where}", other)
        return leader.accept(link, hello)
