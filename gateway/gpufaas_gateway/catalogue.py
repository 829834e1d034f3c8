"""
The functions that are deployed, by name: what a call, and whoever asks about functions, looks up. O(1) for calls.

`deploy` puts them here, in one step, after all that can fail has not.
"""

from dataclasses import dataclass, field

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.model import EngineStatus, Function, FunctionId, Profile
from gpufaas_core.units import Bytes, Seconds
from gpufaas_gateway.cors import Cors
from gpufaas_gateway.metrics import Metrics
from gpufaas_gateway.quotas import Gate
from gpufaas_gateway.spec import DEFAULT_NAMESPACE, FunctionRecord, Options
from gpufaas_gateway.usage import FunctionStats


@dataclass(slots=True, eq=False)
class Deployed:
    """One function as it is served now. A call reads it, and holds it until it ends."""

    record: FunctionRecord
    spec: WorkerSpec
    options: Options
    function: Function
    """As the scheduler knows it; its profiles are those of the moment of deployment."""
    stats: FunctionStats
    """Shared by the revisions of a function, so that an update loses no count."""
    profiles: dict[str, Profile]
    """What it costs by device kind, as learnt so far."""
    unavailable: str | None = None
    """Why it cannot be called; None: it can."""
    why_memory: str = ""
    """How its first reservation came about."""
    gate: Gate | None = None
    """What its calls have to pass; None: its namespace has no limit on calls."""

    # Copies of what is above, for calls.
    name: str = field(init=False)
    namespace: str = field(init=False)
    full_name: str = field(init=False)
    """``NAME.NAMESPACE``."""
    function_id: FunctionId = field(init=False)
    timeout_s: Seconds = field(init=False)
    max_body: Bytes = field(init=False)
    body_patience_s: Seconds = field(init=False)
    exclusive: bool = field(init=False)
    idempotent: bool = field(init=False)
    cors: Cors | None = field(init=False)

    def __post_init__(self) -> None:
        record, options = self.record, self.options
        self.name, self.namespace, self.full_name = record.name, record.namespace, record.full_name
        self.function_id, self.exclusive = record.function_id, self.function.exclusive
        self.timeout_s, self.body_patience_s = options.timeout_s, options.body_patience_s
        self.max_body, self.idempotent, self.cors = options.max_body, options.idempotent, options.cors

    @property
    def reserved(self) -> Bytes:
        """What it has of its namespace's quota: its first reservation, as often as copies of it are kept."""
        return self.spec.memory * max(1, self.function.min_copies)

    @property
    def replicas(self) -> int:
        """Copies that it should have while nobody scaled it, as OpenFaaS counts them: 1, or its minimum."""
        return max(1, self.function.min_copies)

    @property
    def invocations(self) -> int:
        return self.stats.invocations


class Catalogue:
    """All deployed functions. One event loop owns it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._functions: dict[str, Deployed] = {}
        """By ``NAME.NAMESPACE``."""
        self._called: dict[str, Deployed] = {}
        """By every form that a URL may use: those of the default namespace by ``NAME`` too."""
        self._by_id: dict[FunctionId, Deployed] = {}
        self.loaded = False
        """Whether all is there: before, a function that is not found may still come."""

    def complete(self) -> None:
        """All that was deployed when this gateway started is there."""
        self.loaded = True

    def find(self, name: str) -> Deployed | None:
        """Return the function that a URL means by ``NAME`` or ``NAME.NAMESPACE``. O(1)."""
        return self._called.get(name)

    def get(self, full_name: str) -> Deployed | None:
        """Return the function ``NAME.NAMESPACE``."""
        return self._functions.get(full_name)

    def by_id(self, function: FunctionId) -> Deployed | None:
        """Return the revision *function*, if it is the one that is found."""
        return self._by_id.get(function)

    def all(self, namespace: str) -> list[Deployed]:
        """Return the functions of *namespace* by name; none when there is no such namespace."""
        return sorted((each for each in self._functions.values() if each.namespace == namespace), key=lambda d: d.name)

    def everywhere(self) -> list[Deployed]:
        """Return the functions of all namespaces, ordered by namespace and name."""
        return sorted(self._functions.values(), key=lambda each: (each.namespace, each.name))

    def stats(self, record: FunctionRecord) -> FunctionStats:
        """Return what is counted of a function, over its revisions; shown once one of them is."""
        # A first deployment that fails must leave nothing in the metrics.
        known = self._metrics.functions.get(record.full_name)
        return known if known is not None else FunctionStats(record.full_name, record.invocations)

    def show(self, new: Deployed) -> None:
        """Make *new* the revision that is found, in place of any other."""
        old = self._functions.get(new.full_name)
        if old is not None:
            del self._by_id[old.function_id]
        new.stats = self._metrics.adopt(new.stats, new.replicas, new.options.scaling)
        self._functions[new.full_name] = new
        self._called[new.full_name] = new
        if new.namespace == DEFAULT_NAMESPACE:
            self._called[new.name] = new
        self._by_id[new.function_id] = new

    def drop(self, old: Deployed) -> None:
        """It is not found any more."""
        del self._functions[old.full_name], self._by_id[old.function_id]
        for key in [key for key in (old.name, old.full_name) if self._called.get(key) is old]:
            del self._called[key]
        self._metrics.forget(old.full_name)


def replicas_of(deployed: Deployed, status: EngineStatus) -> int:
    """Return how many copies *deployed* should have: as it was scaled, else 1 or its minimum."""
    return status.desired.get(deployed.function_id, deployed.replicas)
