"""
A deployment as the client sent it (`FunctionSpec`), as it is stored (`FunctionRecord`), and what it means (`Options`).

A spec keeps each field exactly as sent, because clients compare what they read with what they deployed (openfaas.md
§4.2): absent stays absent, ``"128Mi"`` stays ``"128Mi"``. Options are mostly annotations that begin with ``gpufaas.``,
because the stock CLI passes annotations on but drops unknown resources.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Final

from msgspec import Struct

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.capabilities import CAPABILITIES
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import ALL_COMPUTE, Asked, Function, FunctionId
from gpufaas_core.scaling import ScalingRule, read_scaling_rule
from gpufaas_core.units import Bytes, MiB, Seconds
from gpufaas_gateway.annotations import DEFAULT_QUEUE, READ, refuse_unknown
from gpufaas_gateway.cors import Cors, read_cors
from gpufaas_gateway.names import check_digest
from gpufaas_gateway.placement import NOTHING_ASKED, PROFILES, AskedDevices, Profiles, read_placement

DEFAULT_NAMESPACE: Final = "openfaas-fn"
"""Stock clients put it into the URL of each invocation."""

_ASKED: Final[Sequence[str]] = ("min_accuracy", "max_cost", "prefer")
_TRAITS: Final[Sequence[str]] = ("task", "model", "accuracy", "weight", "priority", "sheds")
_WHOLE_DEVICE: Final = ("exclusive", "time", "auto")
"""The sharings that have all compute of a device while a call runs."""


class FunctionSpec(Struct, frozen=True, omit_defaults=True):
    """A deployment as the client sent it. None: the field was not sent."""

    service: str
    image: str
    namespace: str | None = None
    env_process: str | None = None
    env_vars: dict[str, str] | None = None
    constraints: tuple[str, ...] | None = None
    secrets: tuple[str, ...] | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    limits: dict[str, str] | None = None
    requests: dict[str, str] | None = None
    read_only_root_filesystem: bool | None = None


class PendingRevision(Struct, frozen=True):
    """A revision that does not serve yet, with what nodes and the scheduler need of it."""

    record: "FunctionRecord"
    worker: WorkerSpec
    function: Function


class FailedRevision(Struct, frozen=True):
    revision: str
    reason: str


class Handover(Struct, frozen=True, omit_defaults=True):
    """How it stands with an update of a function."""

    pending: PendingRevision | None = None
    """The revision that loads now, and takes the calls when it is loaded."""
    before: "FunctionRecord | None" = None
    """The revision that takes the calls again if the one that serves does not load."""
    failed: FailedRevision | None = None
    """The last deployment, if that did not load."""


class FunctionRecord(Struct, frozen=True):
    """A function as it is stored."""

    name: str
    namespace: str
    spec: FunctionSpec
    revision: str
    """Unique among the revisions of a function: the old one may drain while the new one serves."""
    created_at: float
    """Time of the first deployment, in Unix seconds. Updates keep it."""
    invocations: int = 0
    """Calls that ended, of all revisions. Up to 5 s behind."""
    handover: Handover = Handover()

    @property
    def full_name(self) -> str:
        return f"{self.name}.{self.namespace}"

    @property
    def state(self) -> str:
        """Equal for two records of a function only if they say the same of its revisions."""
        pending, before, failed = self.handover.pending, self.handover.before, self.handover.failed
        revisions = (self, pending and pending.record, before, failed)
        return " ".join(each.revision if each else "-" for each in revisions)

    @property
    def function_id(self) -> FunctionId:
        return FunctionId(f"{self.full_name}@{self.revision}")


class Namespace(Struct, frozen=True, omit_defaults=True):
    """A namespace as the client sent it, and as it is shown. None: the field was not sent."""

    name: str
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Quota(Struct, frozen=True, omit_defaults=True):
    """Limits of a namespace. None: no limit."""

    max_functions: int | None = None
    max_waiting: int | None = None
    """Calls without a grant, at one gateway."""
    max_in_flight: int | None = None
    """Calls from their arrival to the end of their answer, at one gateway."""
    max_memory: Bytes | None = None
    """Sum over its functions: first reservation times the copies that are always kept."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What applies to a function that does not set it."""

    timeout_s: Seconds = 60.0
    """OpenFaaS's default; faas-cli waits as long for an answer."""
    slots: int = 32
    """How many calls one worker of a CPU function takes at once."""
    server_slots: int = 100
    """How many calls one program or container gets at once. It has its own queue."""
    stall_s: Seconds = 60.0
    """A load that makes no progress for this long is killed."""
    max_queue: int = 1000
    """How many calls of one function may wait."""
    max_body: Bytes = 100 * MiB
    """Largest request body: a node can hold one for each running call."""
    body_patience_s: Seconds = 20.0
    """How long the body of a streaming call may arrive at almost no speed while the call holds a slot."""
    profiles: Profiles = field(default_factory=lambda: PROFILES)
    """Profiles that the annotation ``com.openfaas.profile`` may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the annotations, labels, limits and environment of a spec mean."""

    bundle: str
    """sha256 of the bundle; empty for a function that runs in a container of its image."""
    slots: int | None = None
    """How many calls one worker of a CPU function takes at once; None: not given."""
    timeout_s: Seconds
    """The time from the request to the end of the answer; with `exec_s`, and no gpufaas.timeout, to the run's begin."""
    exec_s: Seconds = inf
    """How long a call may run, waiting and load not included."""
    whole_s: Seconds = inf
    """The time from the request to the end of the answer."""
    stall_s: Seconds
    max_queue: int
    max_body: Bytes
    body_patience_s: Seconds
    """For CPU functions."""
    async_queue: str = DEFAULT_QUEUE
    """The queue of its asynchronous calls."""
    scaling: ScalingRule | None = None
    """None: no label says anything of copies, which follow calls."""
    memory_limit: Bytes = 0
    """limits.memory, the memory limit of a container; 0: not given."""
    device_memory: Bytes = 0
    """gpufaas.memory; of the device, also for an image on a GPU. 0: not given."""
    cpus: float = 0.0
    """limits.cpu, in cores; 0: not given."""
    capabilities: tuple[str, ...] = CAPABILITIES
    """The capabilities that processes of its containers have."""
    probes: Mapping[str, Any] = field(default_factory=dict)
    """What is given of the fields ``ready_…`` and ``health_…`` of `WorkerSpec`."""
    placement: AskedDevices = NOTHING_ASKED
    idempotent: bool = False
    """A call may be run twice."""
    latency_goal_s: Seconds | None = None
    compute: int | None = None
    """In per cent of a device; None: not given."""
    sharing: str = ""
    """One of `SHARINGS`; empty: not given."""
    batch_max: int | None = None
    """Calls that may run together in one ``handle_batch``; None: not given."""
    batch_wait_s: Seconds | None = None
    """How long a call may wait for others beside an idle device; None: not given."""
    batch_adaptive: bool = False
    preload: tuple[str, ...] = ()
    """Modules that its workers find imported."""
    connect: str = ""
    """The TCP ports that it may connect to, as `read_ports` reads them; empty: as its node says."""
    cors: Cors | None = None
    traits: Mapping[str, Any] = field(default_factory=dict)
    """What else policies are told: fields of `Function`, as far as they are given."""
    asked: Asked | None = None
    """What its calls ask for that do not say it; None: nothing."""

    @property
    def memory(self) -> Bytes:
        """The declared reservation; 0: not declared, so that it is derived from the weights."""
        return self.device_memory or self.memory_limit


def read_options(spec: FunctionSpec, defaults: Defaults) -> Options:
    """
    Return the options of *spec*, and check all that can be checked without a node.

    :raises InvalidSpec: a value is malformed, or an annotation unknown; names it, and the nearest known one
    """
    annotations, env, limits = spec.annotations or {}, spec.env_vars or {}, spec.limits or {}
    _check_environment(env)
    refuse_unknown(annotations)
    bundle = annotations.get("gpufaas.bundle", "")
    if "gpufaas.bundle" in annotations:
        check_digest(bundle, "annotation gpufaas.bundle")
    elif not spec.image or any(each.isspace() for each in spec.image):
        raise InvalidSpec(f"image: {spec.image[:80]!r} is not the name of an image, and there is no gpufaas.bundle")
    given = {
        **{f"limits.{name}": text for name, text in limits.items() if text},
        **{f"envVars {name}": text for name, text in env.items() if text},
        **{f"annotation {name}": text for name, text in annotations.items()},
    }
    read: dict[str, Any] = {}
    for what, (name, parse) in READ.items():
        if what in given:
            try:
                read[name] = parse(given[what])
            except InvalidSpec as exc:
                raise InvalidSpec(f"{what}: {exc}") from exc
    _check_sharing(read)
    _check_batches(read)
    _check_asked(read)
    usual, traits = ({each: read.pop(each) for each in names if each in read} for names in (_ASKED, _TRAITS))
    if bundle and "capabilities" in read:
        raise InvalidSpec("annotation gpufaas.capabilities: is for images: processes have none: remove the annotation")
    if not bundle and "connect" in read:
        raise InvalidSpec("annotation gpufaas.connect: containers have networks of their own: remove the annotation")
    probes = {each: read.pop(each) for each in list(read) if each.startswith(("ready_", "health_"))}
    if "timeout_s" not in read and "exec_s" in read:
        read["timeout_s"] = max(defaults.timeout_s, read["exec_s"])  # it may wait behind calls that take as long
    else:
        read["whole_s"] = read.get("timeout_s", defaults.timeout_s)
    return replace(
        default_options(bundle, defaults),
        scaling=read_scaling_rule(spec.labels or {}, annotations),
        placement=placement_of(spec, defaults, image=not bundle),
        cors=read_cors(annotations),
        asked=Asked(**usual) if usual else None,
        traits=traits,
        # As in Kubernetes, 0 is the default. A server is asked until it is ready, however often it is not.
        probes={each: value for each, value in probes.items() if value and each in WorkerSpec.__struct_fields__},
        **read,
    )


def _check_sharing(read: Mapping[str, Any]) -> None:
    """:raises InvalidSpec: what was read of sharing, compute and slots cannot go together; says what to change"""
    sharing, compute, slots = read.get("sharing") or "exclusive", read.get("compute"), read.get("slots", 1)
    if sharing in _WHOLE_DEVICE and compute not in (None, ALL_COMPUTE):
        raise InvalidSpec(
            f"annotation gpufaas.compute: with gpufaas.sharing {sharing} a call has all of its device's compute, not "
            f"{compute} per cent: remove it, or set gpufaas.sharing to spatial or share"
        )
    if sharing not in _WHOLE_DEVICE and compute is None:
        raise InvalidSpec(
            f"annotation gpufaas.sharing: {sharing} needs gpufaas.compute, the per cent of a device's compute (1 to "
            f"{ALL_COMPUTE}): set it"
        )
    if sharing == "time" and slots > 1:
        raise InvalidSpec(
            f"annotation gpufaas.sharing: time runs one call at a time, and gpufaas.slots asks for {slots}: remove one "
            "of the two"
        )


def _check_batches(read: Mapping[str, Any]) -> None:
    """:raises InvalidSpec: what was read of batches cannot go together; says what to change"""
    wait_s, goal_s, most = read.get("batch_wait_s"), read.get("latency_goal_s"), read.get("batch_max", 1)
    for name, asked in (("wait", wait_s is not None), ("adaptive", read.get("batch_adaptive", False))):
        if asked and most < 2:
            raise InvalidSpec(
                f"annotation gpufaas.batch-{name}: is for calls that run together, and gpufaas.batch-max is {most}: "
                "remove it, or set gpufaas.batch-max to 2 or more"
            )
    if wait_s and goal_s and wait_s >= goal_s:
        raise InvalidSpec(
            f"annotation gpufaas.batch-wait: {wait_s:g} s leaves nothing of gpufaas.latency-goal, {goal_s:g} s: make "
            "it shorter"
        )
    if read.get("batch_adaptive") and goal_s is None:
        raise InvalidSpec(
            "annotation gpufaas.batch-adaptive: batches adapt to gpufaas.latency-goal, which is not set: set it"
        )


def _check_asked(read: Mapping[str, Any]) -> None:
    """:raises InvalidSpec: no call could be served so, or none would be refused; says what to change"""
    least, accuracy = read.get("min_accuracy", 0.0), read.get("accuracy", 0.0)
    if least > accuracy:
        raise InvalidSpec(
            f"annotation gpufaas.min-accuracy: {least:g} is above gpufaas.accuracy, "
            + (f"{accuracy:g}" if accuracy else "which is not set")
            + ", so that no call could be served: lower it, or correct that"
        )
    if read.get("sheds") and "latency_goal_s" not in read:
        raise InvalidSpec(
            "annotation gpufaas.overload: shed refuses calls that cannot be answered within gpufaas.latency-goal, "
            "which is not set: set it"
        )


def default_options(bundle: str, defaults: Defaults) -> Options:
    """Return the options of a function that sets none."""
    return Options(
        bundle=bundle, timeout_s=defaults.timeout_s, stall_s=defaults.stall_s, max_queue=defaults.max_queue,
        max_body=defaults.max_body, body_patience_s=defaults.body_patience_s,
    )  # fmt: skip


def placement_of(spec: FunctionSpec, defaults: Defaults, *, image: bool) -> AskedDevices:
    """Return on which devices *spec* may run; *image*: it has no bundle. Raises as `read_placement`."""
    return read_placement(
        spec.constraints or (), spec.limits or {}, spec.requests or {}, spec.annotations or {}, spec.labels or {},
        profiles=defaults.profiles, image=image,
    )  # fmt: skip


def _check_environment(env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            raise InvalidSpec(f"envVars: {name!r} is not a name of an environment variable")
        if "\0" in value:
            raise InvalidSpec(f"envVars {name}: the value contains a NUL byte, which no environment can hold")
