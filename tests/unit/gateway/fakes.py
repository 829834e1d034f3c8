"""Fakes of the ports of the gateway, in memory and without processes; each passes the contract suite of its port."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from gpufaas_core.bundle import Kind, Manifest, WeightsFile, WorkerSpec
from gpufaas_core.constraints import Constraint, satisfied
from gpufaas_core.environment import Environment, grouped
from gpufaas_core.errors import (
    CorruptArtifact,
    GpufaasError,
    InvalidSpec,
    NameTaken,
    StorageFailed,
    UnknownArtifact,
    UnknownName,
)
from gpufaas_core.explanation import Explanation
from gpufaas_core.model import CallId, Device, DeviceId, DeviceStatus, EngineStatus, Function, FunctionId, Profile
from gpufaas_core.units import Bytes, GiB
from gpufaas_gateway.catalogue import ServedRevision
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.history import Revision, check_seen, noting
from gpufaas_gateway.placement import read_profiles
from gpufaas_gateway.ports import ArtifactWriter
from gpufaas_gateway.spec import Defaults, FunctionRecord, FunctionSpec, Namespace, Quota


class MemoryStore:
    """`FunctionStore`, `QuotaStore`. With `failure` set, writes raise it as `StorageFailed` and change nothing."""

    def __init__(self) -> None:
        self.records: dict[str, FunctionRecord] = {}
        self.histories: dict[str, list[Revision]] = {}
        self.known_profiles: dict[tuple[str, str], Profile] = {}
        self.known_namespaces: dict[str, Namespace] = {}
        self.known_quotas: dict[str, Quota] = {}
        self.failure: str | None = None

    def put(
        self, record: FunctionRecord, _: object = None, __: object = None, noted: Sequence[Revision] = (),
        seen: str | None = None,
    ) -> None:  # fmt: skip
        self._may_write()
        earlier = self.records.get(record.full_name)
        check_seen(record.full_name, earlier, seen)
        self.records[record.full_name] = replace(record, invocations=earlier.invocations) if earlier else record
        self.histories[record.full_name] = noting(self.history(record.full_name), record, noted)

    def history(self, name: str) -> list[Revision]:
        return self.histories.get(name, [])

    def remove(self, name: str) -> None:
        self._may_write()
        self.records.pop(name, None)
        self.histories.pop(name, None)

    def all(self) -> list[FunctionRecord]:
        return sorted(self.records.values(), key=lambda record: (record.namespace, record.name))

    def save_profile(self, digest: str, kind: str, profile: Profile) -> None:
        self._may_write()
        self.known_profiles[digest, kind] = profile

    def profiles(self, digest: str) -> dict[str, Profile]:
        return {kind: profile for (of, kind), profile in self.known_profiles.items() if of == digest}

    def add_invocations(self, counts: Mapping[str, int]) -> None:
        self._may_write()
        for name, count in counts.items():
            if record := self.records.get(name):
                self.records[name] = replace(record, invocations=record.invocations + count)

    def put_namespace(self, namespace: Namespace) -> None:
        self._may_write()
        self.known_namespaces[namespace.name] = namespace

    def remove_namespace(self, name: str) -> None:
        self._may_write()
        self.known_namespaces.pop(name, None)

    def namespaces(self) -> list[Namespace]:
        return sorted(self.known_namespaces.values(), key=lambda each: each.name)

    def put_quota(self, namespace: str, quota: Quota) -> None:
        self._may_write()
        self.known_quotas[namespace] = quota

    def remove_quota(self, namespace: str) -> None:
        self._may_write()
        self.known_quotas.pop(namespace, None)

    def quotas(self) -> dict[str, Quota]:
        return dict(sorted(self.known_quotas.items()))

    def _may_write(self) -> None:
        if self.failure is not None:
            raise StorageFailed(self.failure)


class MemorySecrets:
    """`SecretStore`."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], bytes] = {}

    def names(self, namespace: str) -> list[str]:
        return sorted(name for of, name in self.values if of == namespace)

    def create(self, namespace: str, name: str, value: bytes) -> None:
        if (namespace, name) in self.values:
            raise NameTaken(f"secret {name} in {namespace} exists")
        self.values[namespace, name] = value

    def update(self, namespace: str, name: str, value: bytes) -> None:
        self._find(namespace, name)
        self.values[namespace, name] = value

    def remove(self, namespace: str, name: str) -> None:
        self._find(namespace, name)
        del self.values[namespace, name]

    def drop(self, namespace: str) -> None:
        for name in self.names(namespace):
            del self.values[namespace, name]

    def _find(self, namespace: str, name: str) -> None:
        if (namespace, name) not in self.values:
            raise UnknownName(f"secret {name} in {namespace} does not exist")


class MemoryArtifacts:
    """`Artifacts`."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}

    def has(self, digest: str) -> bool:
        return digest in self.content

    @contextmanager
    def writer(self, digest: str) -> Iterator[ArtifactWriter]:
        written = _Written()
        yield written
        found = hashlib.sha256(written.data).hexdigest()
        if found != digest:
            raise CorruptArtifact(f"the bytes have sha256 {found}, not {digest}: send them again")
        self.content[digest] = bytes(written.data)

    def add(self, data: bytes) -> str:
        """Put *data* there; return its digest."""
        digest = hashlib.sha256(data).hexdigest()
        self.content[digest] = data
        return digest


class _Written:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes, /) -> int:
        self.data += data
        return len(data)


class FakeWorkers:
    """`Workers`: a node whose bundles are what the test says they are."""

    def __init__(self, *devices: Device) -> None:
        self.joined = list(devices) or [Device(DeviceId("n1/cpu:0"), "cpu", 2 * GiB)]
        self.manifests: dict[str, Manifest] = {}
        """By digest of the bundle."""
        self.defined: dict[FunctionId, WorkerSpec] = {}
        self.checked: list[FunctionId] = []
        self.forgotten: list[FunctionId] = []
        self.provided: dict[str, Environment] = {}
        """What nodes provide, by node."""
        self.containers = False
        """Whether functions that have only an image can run."""
        self.check_failure: GpufaasError | None = None
        self.define_failure: GpufaasError | None = None
        self.during_check: Callable[[], None] = lambda: None
        """Called while a handler is being imported."""

    def bundle(self, digest: str, *, kind: Kind = "model", weights: Bytes = 0) -> None:
        """Let the bundle *digest* hold a function of *kind* with so many bytes of weights."""
        files = (WeightsFile("function/weights.safetensors", "0" * 64, weights),) if weights else ()
        self.manifests[digest] = Manifest(kind=kind, template="python3-torch", weights=files)

    async def define(self, spec: WorkerSpec) -> Manifest:
        if self.define_failure is not None:
            raise self.define_failure
        if spec.image:
            if not self.containers:
                raise InvalidSpec(f"function {spec.name} has only an image ({spec.image}): there is no Docker engine")
            self.defined[spec.function] = spec
            return Manifest(kind="server", template="image")
        manifest = self.manifests.get(spec.digest)
        if manifest is None:
            raise UnknownArtifact(f"no bundle {spec.digest} here: upload it")
        self.defined[spec.function] = spec
        return manifest

    async def check(self, spec: WorkerSpec) -> None:
        self.checked.append(spec.function)
        self.during_check()
        if self.check_failure is not None:
            raise self.check_failure

    async def forget(self, function: FunctionId) -> None:
        self.forgotten.append(function)
        self.defined.pop(function, None)

    def devices(self) -> list[Device]:
        return list(self.joined)

    async def environments(self, constraints: Sequence[Constraint] = ()) -> list[Environment]:
        nodes = {each.node for each in self.joined if satisfied(constraints, each.labels)}
        return grouped({node: each for node, each in self.provided.items() if node in nodes})


class FakeScheduler:
    """`Scheduler`: remembers what it was told. `now` is what `status` answers."""

    def __init__(self, *devices: Device) -> None:
        self.functions: dict[FunctionId, Function] = {}
        self.removed: list[tuple[FunctionId, bool]] = []
        self.successors: dict[FunctionId, FunctionId] = {}
        self.scaled: list[tuple[FunctionId, int]] = []
        self.explanations: dict[CallId, Explanation] = {}
        self.failure: GpufaasError | None = None
        self.now = EngineStatus("lalb-o3", tuple(idle(device) for device in devices), {}, {})

    def deploy(
        self, function: Function, worker: WorkerSpec, succeeds: FunctionId | None = None  # noqa: ARG002 - the port's
    ) -> None:  # fmt: skip
        if succeeds is not None:
            self.successors[function.id] = succeeds
        if self.failure is not None:
            raise self.failure
        self.functions[function.id] = function

    def remove(self, function: FunctionId, drain: bool) -> None:
        del self.functions[function]
        self.removed.append((function, drain))

    def scale(self, function: FunctionId, copies: int) -> None:
        assert function in self.functions
        self.scaled.append((function, copies))
        self.now = replace(self.now, desired={**self.now.desired, function: copies})

    def status(self) -> EngineStatus:
        return self.now

    async def explain(self, call: CallId) -> Explanation | None:
        return self.explanations.get(call)


def idle(device: Device) -> DeviceStatus:
    """Return the status of a device on which nothing ever ran."""
    return DeviceStatus(
        device=device,
        used=0,
        busy=False,
        resident=(),
        local_queue=0,
        served=0,
        hits=0,
        misses=0,
        evictions=0,
        estimated_finish_s=0.0,
    )


class Platform:
    """Deploys a function on these devices, with a bundle or as an image; there is a profile gold: tier=gold."""

    def __init__(self, *devices: Device) -> None:
        self.store, self.artifacts = MemoryStore(), MemoryArtifacts()
        self.workers, self.scheduler = FakeWorkers(*devices), FakeScheduler(*devices)
        self.workers.containers = True
        self.deployer = Deployer(
            self.store, self.artifacts, self.workers, self.scheduler,
            Defaults(profiles=read_profiles(["gold=tier=gold"])), secrets=MemorySecrets(),
        )  # fmt: skip
        self.bundle = self.artifacts.add(b"bundle")
        self.workers.bundle(self.bundle)

    async def deploy(self, *, image: bool = False, **fields: Any) -> ServedRevision:
        annotations = {**fields.pop("annotations", {}), **({} if image else {"gpufaas.bundle": self.bundle})}
        spec = FunctionSpec(service="f", image="f:1", annotations=annotations, **fields)
        return await self.deployer.deploy(spec, update=False)
