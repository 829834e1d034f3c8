"""
Works out a revision of a function, from its record and its bundle: what nodes, the scheduler and calls need to know.

Pure functions; `deploy` applies the results.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from gpufaas_core.bundle import Kind, Manifest, WorkerSpec
from gpufaas_core.constraints import GPU
from gpufaas_core.errors import InvalidSpec, NoDeviceFits
from gpufaas_core.model import ALL_COMPUTE, SHARINGS, Device, Function, Need, Profile
from gpufaas_core.owners import CALLS, LABELS
from gpufaas_core.units import Bytes, MiB, Seconds, format_bytes
from gpufaas_gateway.catalogue import ServedRevision
from gpufaas_gateway.spec import Defaults, FunctionRecord, Options, default_options
from gpufaas_gateway.usage import FunctionStats

# The first reservation of a model, before it is measured. Weights are mapped, so they count once; a quarter more is
# for activations and loaders that hold a layer twice. The examples need 17 to 93 MiB beyond their weights, whatever
# the size of the weights: 192 MiB is twice that. The first call corrects the reservation.
MODEL_HEADROOM: Final = 1.25
MODEL_BASE: Final[Bytes] = 192 * MiB
HTTP_BASE: Final[Bytes] = 96 * MiB
"""For a CPU function without a model: its imports and its requests."""
SERVER_BASE: Final[Bytes] = 192 * MiB
"""For a program with its own interpreter. It is not measured later: the reservation is its limit."""
OWN_PROCESS: Final[Bytes] = 192 * MiB
"""On top, for workers that are processes of their own (`WorkerSpec.own_process`), but on a GPU: each imports torch."""

_FIRST: Final[Mapping[Kind, tuple[Bytes, float]]] = {
    "http": (HTTP_BASE, 1.0),
    "server": (SERVER_BASE, 1.0),
    "model": (MODEL_BASE, MODEL_HEADROOM),
}
"""The first reservation: a base, plus a factor times the files that are not code, which a handler may read."""

MOST_FORKED: Final = 240
"""Calls at once in one forked process: each has a socket, and the kernel passes 253 files in one message."""
# Estimates for kinds of device on which the function never ran; the first call there corrects them.
_LOAD_BASE_S: Final[Seconds] = 0.5
_LOAD_BYTES_PER_S: Final = 1e9
_SERVICE_S: Final[Seconds] = 0.1


def deployed(
    record: FunctionRecord,
    spec: WorkerSpec,
    options: Options,
    manifest: Manifest,
    learnt: dict[str, Profile],
    sizes: dict[str, Bytes],
    stats: FunctionStats,
) -> ServedRevision:
    """
    Return a revision of the function that *manifest* describes.

    :param learnt: measured profiles by kind of device
    :param sizes: for an image, its reservation by kind of device
    """
    guess = Profile(
        load_s=_LOAD_BASE_S + manifest.weight_bytes / _LOAD_BYTES_PER_S,
        service_s=_SERVICE_S,
        occupation=spec.memory,
    )
    function = Function(
        id=record.function_id,
        digest=spec.digest,
        need=spec.need,
        idempotent=options.idempotent,
        tenant=record.namespace,
        profiles={"*": guess, **{kind: replace(guess, occupation=size) for kind, size in sizes.items()}, **learnt},
        min_copies=0 if options.scaling is None else options.scaling.pinned,
        max_copies=0 if options.scaling is None else options.scaling.max,
        max_queue=options.max_queue,
        constraints=options.placement.constraints,
        # A server is not measured: its reservation is its limit.
        floor=spec.memory if options.memory or manifest.kind == "server" else 0,
        elastic=spec.elastic,
        owner=LABELS if options.scaling is not None and options.scaling.acts else CALLS,
        **options.traits,
    )
    why_memory = _why_memory(manifest, options, function, spec.own_process)
    return ServedRevision(record, spec, options, function, stats, dict(learnt), why_memory=why_memory)


def unavailable(record: FunctionRecord, reason: str, defaults: Defaults, stats: FunctionStats) -> ServedRevision:
    """Return a revision that is listed but cannot be called."""
    digest = (record.spec.annotations or {}).get("gpufaas.bundle", "")
    spec = WorkerSpec(record.function_id, record.name, record.namespace, digest, "http")
    function = Function(record.function_id, digest, spec.need)
    return ServedRevision(record, spec, default_options(digest, defaults), function, stats, {}, unavailable=reason)


def check_fits(new: ServedRevision, devices: Sequence[Device]) -> None:
    """:raises NoDeviceFits: none of *devices* has the compute, or the memory, that it needs"""
    devices = new.options.placement.among(devices) or devices
    _check_compute(new, devices)
    devices = [each for each in devices if new.function.need.compute <= each.compute]
    floor = new.function.floor
    if any(max(floor, new.function.profile(each.kind).occupation) <= each.memory for each in devices):
        return
    if not devices:
        raise NoDeviceFits(f"function {new.name} needs {format_bytes(new.spec.memory)}, and no device has joined yet")
    largest = max(devices, key=lambda device: device.memory)
    need = new.function.profile(largest.kind)
    allowed = "that it may run on " if new.options.placement.asked else ""
    size = max(floor, need.occupation)
    how = (
        "measured"
        if need.measured and "memory" not in need.estimated and size > floor
        else ("declared" if new.options.memory else "estimated")
    )
    raise NoDeviceFits(
        f"function {new.name} needs {format_bytes(size)} ({how}) but the largest device "
        f"{allowed}({largest.id}) has {format_bytes(largest.memory)}: deploy a smaller or quantised model, add a "
        "larger device" + ("" if need.measured else ", or set the annotation gpufaas.memory if it needs less")
    )


def _check_compute(new: ServedRevision, devices: Sequence[Device]) -> None:
    compute, most = new.function.need.compute, max(devices, key=lambda each: each.compute, default=None)
    if most is not None and compute > most.compute:
        allowed = "that it may run on " if new.options.placement.asked else ""
        raise NoDeviceFits(
            f"function {new.name} needs {compute} per cent of a device's compute (gpufaas.sharing "
            f"{new.function.need.sharing}), but no device {allowed}has more than {most.compute} ({most.id}): set "
            f"gpufaas.sharing to spatial or share and gpufaas.compute to {most.compute} or less"
        )


def first_reservation(manifest: Manifest) -> Bytes:
    """Return the memory, in bytes, to reserve for a worker that declares none and was never measured."""
    base, factor = _FIRST[manifest.kind]
    return base + int((manifest.weight_bytes + manifest.data_bytes) * factor)


def _why_memory(manifest: Manifest, options: Options, function: Function, own_process: str) -> str:
    """Return how the first reservation was computed, and how to change it."""
    own = f"{own_process} needs a new process, which imports torch" if own_process else ""
    own = own and (f"; {own}" if options.placement.gpu else f" + {format_bytes(OWN_PROCESS)}: {own}")
    if options.memory:
        return f"declared{own}"
    files, (base, factor) = manifest.weight_bytes + manifest.data_bytes, _FIRST[manifest.kind]
    why = f"{format_bytes(files)} of files x {factor:g} + {format_bytes(base)}{own}"
    measured = [
        each.occupation for each in function.profiles.values() if each.measured and "memory" not in each.estimated
    ]
    if measured:
        why += f"; {format_bytes(max(measured))} since it was measured"
    return f"{why}; {'more while there is room; ' if function.elastic else ''}set gpufaas.memory to change it"


def worker_spec(record: FunctionRecord, options: Options, kind: Kind, need: Need, memory: Bytes) -> WorkerSpec:
    env = dict(record.spec.env_vars or {})
    if record.spec.env_process:
        env["fprocess"] = record.spec.env_process
    probes = options.probes
    env["OPENFAAS_NAME"] = record.name
    env["OPENFAAS_NAMESPACE"] = record.namespace
    if options.cors is not None and options.cors.own:
        env["GPUFAAS_PREFLIGHTS"] = "1"
    spec = WorkerSpec(
        function=record.function_id,
        name=record.name,
        namespace=record.namespace,
        # Profiles of an image are stored under its name: its digest is not known before it is pulled.
        digest=options.bundle or f"image:{record.spec.image}",
        kind=kind,
        need=need,
        memory=memory,
        env=env,
        secrets=record.spec.secrets or (),
        # A server that is not asked yet, or not again, makes no progress.
        stall_s=options.stall_s
        + probes.get("ready_delay_s", 0.0)
        + probes.get("ready_period_s", 0.0) * probes.get("ready_successes", 1),
        image="" if options.bundle else record.spec.image,
        read_only=bool(record.spec.read_only_root_filesystem),
        preload=options.preload,
        connect=options.connect,
        cpus=options.cpus,
        capabilities=options.capabilities,
        memory_limit=0 if options.bundle else options.memory_limit,
        constraints=options.placement.constraints,
        elastic=not options.memory and kind != "server",
        labels={**(record.spec.labels or {}), "faas_function": record.name},
        **probes,
    )
    return replace(spec, memory=memory + OWN_PROCESS) if spec.own_process and not options.placement.gpu else spec


def image_sizes(options: Options, memory: Bytes, devices: Sequence[Device]) -> dict[str, Bytes]:
    """
    Return the reservation of an image by kind of *devices*.

    On a CPU device it is the limit that the kernel enforces. A GPU enforces no limit, so the image gets the whole GPU
    (of several of a kind, the size of the largest) unless gpufaas.memory says what it needs.
    """
    sizes: dict[str, Bytes] = {}
    for each in devices:
        if each.labels.get(GPU) == "true":
            sizes[each.kind] = options.device_memory or max(each.memory, sizes.get(each.kind, 0))
        else:
            sizes[each.kind] = options.memory_limit or memory
    return sizes


def need_of(kind: Kind, options: Options, defaults: Defaults) -> Need:
    """
    Return what a function asks of its device, and how its calls run.

    :raises InvalidSpec: what the deployment says of that is not for a function of this kind
    """
    if options.preload and (kind == "server" or not options.bundle):
        raise InvalidSpec(
            "annotation gpufaas.preload: is for functions of a template such as python3-torch or python3-http, whose "
            "workers are forked from a process that has imported modules: remove the annotation"
        )
    asked = "sharing" if options.sharing else "compute" if options.compute is not None else ""
    if kind != "model" and (options.batch_max or 1) > 1:
        raise InvalidSpec(
            "annotation gpufaas.batch-max: calls run together in handle_batch(model, events, contexts) of a model made "
            "from a template such as python3-torch: an image, a program or a function without a model gets each call "
            "by itself: remove the annotation"
        )
    if kind != "server" and (options.slots or 0) > MOST_FORKED:
        raise InvalidSpec(
            f"annotation gpufaas.slots: {options.slots} calls at once in one process with a handle() are over its "
            f"limit of {MOST_FORKED}: ask for more copies (com.openfaas.scale.min), or serve a port yourself"
        )
    on_gpu = kind == "server" and options.placement.gpu
    if kind == "model" or (on_gpu and (asked or (not options.bundle and options.slots in (None, 1)))):
        return _need_of_model(options)
    if asked:
        raise InvalidSpec(
            f"annotation gpufaas.{asked}: is for models, and for programs and images on a GPU: this function needs no "
            "compute of a device: remove the annotation" + (", or ask for a GPU" if kind == "server" else "")
        )
    slots = options.slots or (defaults.slots if kind == "http" else defaults.server_slots)
    return Need(0, slots=slots, latency_goal_s=options.latency_goal_s)


def _need_of_model(options: Options) -> Need:
    """Return the need of a model, or of a program or image that uses a GPU as a model does."""
    sharing, slots = options.sharing or SHARINGS[0], options.slots or 1
    need = Need(
        options.compute or ALL_COMPUTE, sharing, slots, options.batch_max or 1, options.batch_wait_s or 0.0,
        options.latency_goal_s, options.batch_adaptive,
    )  # fmt: skip
    if need.batch_max > 1 and not need.reserved:
        raise InvalidSpec(
            f"annotation gpufaas.batch-max: with gpufaas.sharing {sharing} a call starts at once, and waits for no "
            "others: remove one of the two, or set gpufaas.sharing to spatial"
        )
    if need.batch_max > 1 and (most := need.slots * need.batch_max) > MOST_FORKED:
        raise InvalidSpec(
            f"annotation gpufaas.batch-max: {most} calls in one process are over its limit of {MOST_FORKED}"
        )
    return need
