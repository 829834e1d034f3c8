"""
Quotas of namespaces.

Functions and memory are checked at deployment (`NamespaceQuotas.claim`). A `Gate` counts and limits calls; only
namespaces with a limit on calls have one, so that other calls cost one look-up.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from gpufaas_core.errors import Overloaded
from gpufaas_core.units import Bytes, format_bytes
from gpufaas_gateway.errors import QuotaExceeded
from gpufaas_gateway.ports import Store
from gpufaas_gateway.spec import Quota

log = logging.getLogger(__name__)

_NO_LIMITS = Quota()


@dataclass(slots=True, eq=False)
class Gate:
    """
    Counts the calls of one namespace at this gateway. One event loop owns it; everything is O(1).

    Calls that began before there was a limit are not counted.
    """

    namespace: str
    max_in_flight: int | None = None
    max_waiting: int | None = None
    in_flight: int = 0
    """Calls from their arrival to the end of their answer."""
    waiting: int = 0
    """The calls of them that have no grant."""

    def enter(self) -> "Passage":
        """
        Admit a call, which must call `Passage.leave` at its end.

        :raises Overloaded: the number of calls in flight is at its limit
        """
        limit = self.max_in_flight
        if limit is not None and self.in_flight >= limit:
            raise self.full("in flight", self.in_flight, limit, "--in-flight")
        self.in_flight += 1
        return Passage(self)

    def full(self, what: str, count: int, limit: int, option: str) -> Overloaded:
        return Overloaded(
            f"namespace {self.namespace} is at its quota of calls {what} ({count} of {limit}, at this gateway): call "
            f"again later, or raise it with 'gpufaas namespace quota {self.namespace} {option} N'"
        )


@dataclass(slots=True, eq=False)
class Passage:
    """One call in a `Gate`."""

    _gate: Gate
    _waits: bool = False
    _granted: bool = False

    def wait(self) -> None:
        """
        Count the call as waiting for a grant. A call whose grant was refused may always wait again.

        :raises Overloaded: the number of waiting calls is at its limit
        """
        if self._waits:
            return
        gate = self._gate
        if not self._granted and gate.max_waiting is not None and gate.waiting >= gate.max_waiting:
            raise gate.full("waiting for a device", gate.waiting, gate.max_waiting, "--waiting")
        self._waits = True
        gate.waiting += 1

    def granted(self) -> None:
        """Count the call as having its grant."""
        self._granted = True
        if self._waits:
            self._waits = False
            self._gate.waiting -= 1

    def leave(self) -> None:
        """Count the call as ended. Call this once."""
        self.granted()
        self._gate.in_flight -= 1


class NamespaceQuotas:
    """The quotas and gates of all namespaces. One event loop owns it."""

    def __init__(self, store: Store, on_changed: Callable[[str], None] = lambda _: None) -> None:
        """:param on_changed: called with a namespace whose `gate` may have changed"""
        self._store = store
        self._on_changed = on_changed
        self._quotas: dict[str, Quota] = {}
        self._gates: dict[str, Gate] = {}
        self._claims: dict[str, tuple[str, Bytes]] = {}
        """What running deployments have claimed, so that two at once do not exceed a quota together: namespace and
        memory, by ``NAME.NAMESPACE``."""
        self._writing = asyncio.Lock()
        """Keeps the store and this object in the same order."""

    async def load(self) -> None:
        """:raises StorageFailed: the store cannot be read"""
        found = await asyncio.to_thread(self._store.quotas)
        self.keep_only(set(found))
        for namespace, quota in found.items():
            self.adopt(namespace, quota)

    def get(self, namespace: str) -> Quota:
        """Return the limits of *namespace*; no limits if it has no quota, or does not exist."""
        return self._quotas.get(namespace, _NO_LIMITS)

    def gate(self, namespace: str) -> Gate | None:
        """Return the gate of *namespace*; None if its calls have no limit."""
        return self._gates.get(namespace)

    async def put(self, namespace: str, quota: Quota) -> None:
        """
        Store *quota* and apply it, replacing an earlier one; one without limits removes it. Functions and calls that
        exceed it stay.

        :raises StorageFailed: it could not be stored; nothing has changed
        """
        async with self._writing:
            if quota == _NO_LIMITS:
                await asyncio.to_thread(self._store.remove_quota, namespace)
            else:
                await asyncio.to_thread(self._store.put_quota, namespace, quota)
            self.adopt(namespace, quota)
        log.info("quota.set namespace=%s quota=%s", namespace, quota)

    def adopt(self, namespace: str, quota: Quota | None) -> None:
        """Apply a quota that the store has; None: the store has none."""
        if quota is None or quota == _NO_LIMITS:
            self._quotas.pop(namespace, None)
            self._gates.pop(namespace, None)
        else:
            self._quotas[namespace] = quota
            if quota.max_in_flight is None and quota.max_waiting is None:
                self._gates.pop(namespace, None)
            else:
                gate = self._gates.setdefault(namespace, Gate(namespace))
                gate.max_in_flight, gate.max_waiting = quota.max_in_flight, quota.max_waiting
        self._on_changed(namespace)

    def keep_only(self, namespaces: set[str]) -> None:
        """Drop the quotas of all namespaces except *namespaces*."""
        for namespace in self._quotas.keys() - namespaces:
            self.adopt(namespace, None)

    def claim(self, full_name: str, namespace: str, memory: Bytes, has: dict[str, Bytes]) -> None:
        """
        Claim a deployment's share of its namespace's quota until `release`.

        An update that needs no more memory than the function has is admitted, even if the quota is exceeded.

        :param has: the reservation of each function of the namespace
        :raises QuotaExceeded: the quota has too little left
        """
        before = has.pop(full_name, None)
        for other, (where, claimed) in self._claims.items():
            if where == namespace and other != full_name:
                has[other] = max(claimed, has.get(other, 0))
        quota, command = self.get(namespace), f"'gpufaas namespace quota {namespace}"
        if before is None and quota.max_functions is not None and len(has) >= quota.max_functions:
            raise QuotaExceeded(
                f"namespace {namespace} is at its quota of functions ({len(has)} of {quota.max_functions}), and "
                f"{full_name} would be one more: remove a function, or raise the quota with {command} --functions N'"
            )
        if quota.max_memory is not None and memory > (before or 0) and sum(has.values()) + memory > quota.max_memory:
            raise QuotaExceeded(
                f"{full_name} reserves {format_bytes(memory)}, and the other functions of namespace {namespace} have "
                f"{format_bytes(sum(has.values()))} of the {format_bytes(quota.max_memory)} that its quota allows: "
                "remove a function, declare less (annotation gpufaas.memory) or keep fewer copies, or raise the quota "
                f"with {command} --memory SIZE'"
            )
        self._claims[full_name] = namespace, memory

    def release(self, full_name: str) -> None:
        self._claims.pop(full_name, None)
