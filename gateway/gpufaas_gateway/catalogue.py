"""
The deployed functions by name. Calls look them up here in O(1).

`deploy` adds a function in one step, after everything that can fail has succeeded.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import GpufaasError, UnknownFunction
from gpufaas_core.model import Asked, EngineStatus, Function, FunctionId, Profile
from gpufaas_core.units import Bytes, Seconds
from gpufaas_gateway.cors import Cors
from gpufaas_gateway.errors import Unavailable
from gpufaas_gateway.quotas import Gate
from gpufaas_gateway.spec import DEFAULT_NAMESPACE, FunctionRecord, Options
from gpufaas_gateway.usage import FunctionStats

REPLACED_WITHIN_S: Final[Seconds] = 2.0
"""When the scheduler has removed a revision, every gateway has heard of it after so long."""


@dataclass(slots=True, eq=False)
class ServedRevision:
    """One revision of a function as it is served. A call keeps the one that it started with."""

    record: FunctionRecord
    spec: WorkerSpec
    options: Options
    function: Function
    """What the scheduler was told; its profiles are those at deployment."""
    stats: FunctionStats
    """Shared by all revisions of a function: an update loses no count."""
    profiles: dict[str, Profile]
    """What a call costs, by kind of device, as learnt so far."""
    unavailable: str | None = None
    """Why it cannot be called; None if it can."""
    why_memory: str = ""
    """How its first reservation was computed."""
    trial: Callable[[str], Awaitable[None]] | None = None
    """Until it is known to load, where another revision takes its calls otherwise: told why it did not load, or nothing
    when it has answered. Done when the right one serves."""
    gate: Gate | None = None
    """Counts its calls against the quota; None if its namespace has no limit on calls."""

    # Copied from the fields above, because each call reads them.
    name: str = field(init=False)
    namespace: str = field(init=False)
    full_name: str = field(init=False)
    """``NAME.NAMESPACE``."""
    function_id: FunctionId = field(init=False)
    timeout_s: Seconds = field(init=False)
    exec_s: Seconds = field(init=False)
    whole_s: Seconds = field(init=False)
    max_body: Bytes = field(init=False)
    compute: int = field(init=False)
    cors: Cors | None = field(init=False)
    asked: Asked | None = field(init=False)
    """What a call asks for that does not say it."""

    def __post_init__(self) -> None:
        record, options = self.record, self.options
        self.name, self.namespace, self.full_name = record.name, record.namespace, record.full_name
        self.function_id, self.compute = record.function_id, self.function.need.compute
        self.timeout_s, self.exec_s, self.whole_s = options.timeout_s, options.exec_s, options.whole_s
        self.max_body, self.cors, self.asked = options.max_body, options.cors, options.asked

    @property
    def reserved(self) -> Bytes:
        """Memory that counts for its namespace's quota: its first reservation times the copies that are always kept."""
        return self.spec.memory * max(1, self.function.min_copies)

    @property
    def replicas(self) -> int:
        """Desired copies until it is scaled, as OpenFaaS counts: its minimum, at least 1."""
        return max(1, self.function.min_copies)


class Catalogue:
    """All deployed functions. One event loop owns it."""

    def __init__(self) -> None:
        self._called: dict[str, ServedRevision] = {}
        """By every name that a URL may use: ``NAME.NAMESPACE``, and in the default namespace also ``NAME`` alone."""
        self._by_id: dict[FunctionId, ServedRevision] = {}
        """All that are deployed."""
        self._awaited: dict[str, list[asyncio.Future[None]]] = {}
        """Who waits for another revision of a function, or its removal."""
        self.loaded = False
        """False while functions are read from the store: one that is not found may still appear."""

    def find(self, name: str) -> ServedRevision | None:
        """Return the function ``NAME`` or ``NAME.NAMESPACE``. O(1)."""
        return self._called.get(name)

    def why_not(self, name: str) -> GpufaasError:
        """Return why ``NAME`` or ``NAME.NAMESPACE`` cannot be called."""
        if (found := self._called.get(name)) is not None:
            return Unavailable(f"{found.name} cannot be called: {found.unavailable}")
        if not self.loaded:
            return Unavailable("the platform is starting: its functions are not all loaded; try again in a second")
        return UnknownFunction(f"there is no function {name[:200]!r}: deploy it (gpufaas up), or see gpufaas list")

    def by_id(self, function: FunctionId) -> ServedRevision | None:
        """Return the function whose current revision is *function*."""
        return self._by_id.get(function)

    def all(self, namespace: str) -> list[ServedRevision]:
        """Return the functions of *namespace*, sorted by name; none if there is no such namespace."""
        return [each for each in self.everywhere() if each.namespace == namespace]

    def everywhere(self) -> list[ServedRevision]:
        """Return all functions, sorted by namespace and name."""
        return sorted(self._by_id.values(), key=lambda each: (each.namespace, each.name))

    def _tell(self, full_name: str) -> None:
        for each in self._awaited.pop(full_name, ()):
            if not each.done():
                each.set_result(None)

    def stats(self, record: FunctionRecord) -> FunctionStats:
        """Return the counts of a function: those of the revision that is shown, if one is."""
        known = self.find(record.full_name)
        return FunctionStats(record.full_name, record.invocations) if known is None else known.stats

    def show(self, new: ServedRevision) -> None:
        """Make *new* the current revision of its function."""
        self._tell(new.full_name)
        if (old := self.find(new.full_name)) is not None:
            del self._by_id[old.function_id]
            new.stats = old.stats
        self._called[new.full_name] = new
        if new.namespace == DEFAULT_NAMESPACE:
            self._called[new.name] = new
        self._by_id[new.function_id] = new

    def replaced(self, deployed: ServedRevision) -> asyncio.Future[None]:
        """Return what is done when *deployed* is not shown any more; after `REPLACED_WITHIN_S` at the latest."""
        loop, name = asyncio.get_running_loop(), deployed.full_name
        future: asyncio.Future[None] = loop.create_future()
        self._awaited.setdefault(name, []).append(future)
        if self.find(name) is deployed:
            loop.call_later(REPLACED_WITHIN_S, self._tell, name)
        else:
            self._tell(name)
        return future

    def drop(self, old: ServedRevision) -> None:
        """Remove the function of *old*. Its running calls go on counting, which no metric shows."""
        self._tell(old.full_name)
        del self._by_id[old.function_id]
        for key in [key for key in (old.name, old.full_name) if self._called.get(key) is old]:
            del self._called[key]


def replicas_of(deployed: ServedRevision, status: EngineStatus) -> int:
    """Return the desired copies of *deployed*: what it was scaled to, else its minimum, at least 1."""
    return status.desired.get(deployed.function_id, deployed.replicas)
