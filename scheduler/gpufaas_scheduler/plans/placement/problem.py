"""A placement as it is asked and answered. Percentages are of one device; their sums stay within 100."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec

from gpufaas_core._types import Seconds
from gpufaas_core.json_errors import wrong
from gpufaas_scheduler.plans import problem
from gpufaas_scheduler.plans.problem import AtLeastOne, BadProblem, Name, NotNegative, Positive

FULL: Final = 100.0 + 1e-6
_SIZE: Final = re.compile("[1-9][0-9]{0,8}")


class DeviceCoefficients(problem.Problem, frozen=True):
    """Of a kind of GPU, for iGniter: MHz, W, bytes/ms, ms."""

    F: Positive
    """Highest frequency."""
    P: Positive
    """Power limit."""
    p_idle: NotNegative
    B: Positive
    """PCIe rate."""
    alpha_f: float
    """MHz for each W beyond the limit; below 0."""
    alpha_sch: float
    beta_sch: float
    unit: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 2.5
    """Shares are multiples of it, in percent."""


class ModelCoefficients(problem.Problem, frozen=True):
    """Of a model on a kind of GPU, for iGniter: ms, bytes, W, percent."""

    n: NotNegative
    """Kernels of a query."""
    t_sch0: NotNegative
    k: tuple[float, float, float, float, float]
    p: tuple[float, float]
    c: tuple[float, float]
    alpha_cache: NotNegative
    d_in: NotNegative
    d_out: NotNegative


class Batch(problem.Problem, frozen=True):
    """What was measured of one batch size; a policy leaves out a batch that lacks what it needs."""

    latency_s: Positive | None = None
    goodput: Positive | None = None
    """Requests per second of one replica that runs alone."""
    memory_pct: NotNegative | None = None
    ao: NotNegative | None = None
    """Highest achieved occupancy."""
    wao: NotNegative | None = None
    """Mean achieved occupancy over time."""
    wsm: NotNegative | None = None
    """Mean share of the multiprocessors over time."""
    uses: NotNegative | None = None
    """It stands in for one of the three above that was not measured; see `model.TakenBatch.uses`."""


class Kind(problem.Problem, frozen=True):
    igniter: DeviceCoefficients | None = None
    price: NotNegative = 1.0
    """Of a device, for `solve size`."""


class Device(problem.Problem, frozen=True):
    id: Name
    kind: Name


class Model(problem.Problem, frozen=True):
    rps: Positive
    slo_ms: Positive
    max_replicas: AtLeastOne | None = None
    """None: as many as devices; a device has at most one."""
    profile: dict[str, Any] = msgspec.field(default_factory=dict)
    """Batches by their size; or these by kind of device, where kinds differ."""
    igniter: dict[str, ModelCoefficients] = msgspec.field(default_factory=dict)
    """By kind of device."""

    def measured(self, kind: str) -> dict[int, Batch]:
        """
        Return the batches measured on *kind*, by size, ascending.

        :raises BadProblem: a key or a value is none of a profile
        """
        profile = self.profile.get(kind, {}) if self.profiled_kinds() else self.profile
        found = {}
        try:
            for size in msgspec.convert(profile, dict[str, Any]):
                if not _SIZE.fullmatch(size):
                    raise BadProblem(f"in a `profile`: {size!r} is no batch size: a whole number from 1 on")
            found = {int(size): each for size, each in msgspec.convert(profile, dict[str, Batch]).items()}
        except msgspec.ValidationError as exc:
            within = ("profile", kind) if self.profiled_kinds() else ("profile",)
            raise BadProblem(wrong(profile, dict[str, Batch], exc, within)[1]) from exc
        return dict(sorted(found.items()))

    def profiled_kinds(self) -> list[str]:
        """Return the keys of the profile that are kinds of device, such as `v100`, or `4090` with batches below it."""
        return [
            key
            for key, value in self.profile.items()
            if not key.isdecimal()
            or (isinstance(value, dict) and any(isinstance(below, dict) for below in value.values()))
        ]


class Cluster(problem.Problem, frozen=True):
    """What is asked, but for the devices."""

    models: Annotated[dict[str, Model], msgspec.Meta(min_length=1)]
    kinds: dict[str, Kind] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, model in self.models.items():
            known = model.profiled_kinds()
            if known and len(known) != len(model.profile):
                raise BadProblem(f"the `profile` of {name!r} has batch sizes beside kinds: put them under a kind")
            for kind in known or [""]:
                try:
                    model.measured(kind)
                except BadProblem as exc:
                    raise BadProblem(f"model {name!r}: {exc}") from exc


class Problem(Cluster, frozen=True, kw_only=True):
    devices: tuple[Device, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        problem.distinct([each.id for each in self.devices], "devices")


class Replica(msgspec.Struct, frozen=True):
    model: str
    device: str
    batch: int
    share: float | None
    """Of the device's compute, in percent; `null` where the policy sets none."""


class Result(msgspec.Struct, frozen=True):
    replicas: tuple[Replica, ...]
    expected: dict[str, float]
    """Requests per second of each model: the goodput of its replicas, at most what is asked."""
    unserved: dict[str, str]
    """Of models that nothing serves: why."""
    gap: float | None = None
    """How much more might be served, as a fraction; `null` where that is not known."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """A batch size that a model may have on a kind of device."""

    batch: int
    latency: Seconds
    goodput: float
    compute: float
    """Percent."""
    memory: float
    """Percent."""
    warps: float
    """Mean occupancy over time, in percent; 0 where it was not measured."""


@dataclass(frozen=True, slots=True)
class Options:
    """The batches that meet the goals, by model and kind of device; and why a model has none."""

    of: Mapping[str, Mapping[str, Mapping[int, Option]]]
    why_none: Mapping[str, str]

    def on(self, model: str, kind: str) -> Mapping[int, Option]:
        return self.of[model].get(kind, {})

    def batches(self, model: str) -> list[int]:
        """Return the batches that some kind of device may have, ascending."""
        return sorted({batch for of in self.of[model].values() for batch in of})


def options(asked: Cluster, kinds: Iterable[str], metric: str) -> Options:
    """Return the batches that have *metric* and all else, and are done within their model's goal."""
    kinds = list(dict.fromkeys(kinds))
    found: dict[str, dict[str, dict[int, Option]]] = {}
    why: dict[str, str] = {}
    for name, model in asked.models.items():
        measured = {kind: _complete(model.measured(kind), metric) for kind in kinds}
        found[name] = {
            kind: {each.batch: each for each in of if each.latency * 1000 <= model.slo_ms}
            for kind, of in measured.items()
        }
        every = [each for of in measured.values() for each in of]
        if not every:
            why[name] = f"no batch has latency_s, goodput, memory_pct and {metric}"
        elif not any(found[name].values()):
            least = min(every, key=lambda each: each.latency)
            why[name] = f"its quickest batch, {least.batch}, takes {least.latency * 1000:g} ms of {model.slo_ms:g} ms"
    return Options(found, why)


def _complete(measured: Mapping[int, Batch], metric: str) -> list[Option]:
    """Return the batches of which all was measured that an option has."""
    found = []
    for size, batch in measured.items():
        compute = batch.uses if getattr(batch, metric) is None else getattr(batch, metric)
        if None not in (batch.latency_s, batch.goodput, batch.memory_pct, compute):
            found.append(Option(size, batch.latency_s, batch.goodput, compute, batch.memory_pct, batch.wao or 0.0))  # type: ignore[arg-type]
    return found


def answer(
    asked: Problem,
    goodput: Mapping[Replica, float],
    why: Mapping[str, str],
    gap: float | None = None,
    notes: Sequence[str] = (),
) -> Result:
    """
    Return the answer that the replicas of *goodput* make, each with its requests per second. A model without any is
    unserved, because of *why* or for want of room.
    """
    order = {device.id: index for index, device in enumerate(asked.devices)}
    ranked = sorted(goodput, key=lambda each: (order[each.device], list(asked.models).index(each.model)))
    expected = {
        name: min(model.rps, math.fsum(goodput[each] for each in ranked if each.model == name))
        for name, model in asked.models.items()
    }
    served = {each.model for each in ranked}
    if not asked.devices:
        why = dict.fromkeys(asked.models, "there are no devices")
    unserved = {name: why.get(name, "no device has room left for it") for name in asked.models if name not in served}
    estimated = [
        name
        for name, model in asked.models.items()
        for kind in model.profiled_kinds() or [""]
        for each in model.measured(kind).values()
        if each.uses is not None and None in (each.ao, each.wao, each.wsm)
    ]
    if estimated:
        said = ", ".join(dict.fromkeys(estimated))
        notes = (*notes, f"`uses` stands in for the measures of compute that the profiles of these lack: {said}")
    return Result(tuple(ranked), expected, unserved, gap, tuple(notes))
