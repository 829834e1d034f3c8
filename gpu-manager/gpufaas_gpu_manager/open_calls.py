"""The calls of a node that have a grant, by their id, and the grants that it does not open any more."""

import asyncio

from gpufaas_core.errors import WorkerCrashed
from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, Seconds
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.node_call import UNCLAIMED


class OpenCalls(dict[CallId, Exchange]):
    """See module."""

    def __init__(self, untaken_s: Seconds) -> None:
        """:param untaken_s: see `NodeSettings`"""
        self._untaken_s = untaken_s
        self.revoked: dict[CallId, float] = {}
        """The number of the last void grant, of calls that ended, or were stopped, before they arrived."""

    def by(self, grant: Grant) -> Exchange | None:
        """Return the exchange of the first call of *grant*; None: there is none, or that of an older grant is over."""
        exchange = self.get(grant.calls[0])
        if exchange is not None and exchange.finished and exchange.grant.number < grant.number:
            return None
        return exchange

    def over(self, exchange: Exchange) -> None:
        """*exchange* has no worker any more."""
        if exchange.state != UNCLAIMED:
            self.pop(exchange.grant.calls[0], None)
        else:
            # It failed before its call arrived: without it, the call would open the grant, and load, once more.
            asyncio.get_running_loop().call_later(self._untaken_s, self._forget_failed, exchange)

    def revoke(self, call: CallId, number: float) -> None:
        """Refuse grants of *call* up to *number*: they may be on their way here."""
        self.revoked[call] = max(number, self.revoked.get(call, number))
        asyncio.get_running_loop().call_later(self._untaken_s, self.revoked.pop, call, None)

    def is_revoked(self, grant: Grant) -> bool:
        return grant.call in self.revoked and grant.number <= self.revoked[grant.call]

    def close(self) -> None:
        """Fail all calls: the node stops."""
        for exchange in list(self.values()):
            exchange.fail(WorkerCrashed("the platform is stopping: call again when it is back"))
        self.clear()

    def _forget_failed(self, exchange: Exchange) -> None:
        if self.get(exchange.grant.call) is exchange:
            del self[exchange.grant.call]
