"""
The devices on which a function may run: what its deployment asks for, in each of OpenFaaS's ways, as constraints.

A GPU is asked for by ``limits: {nvidia.com/gpu: 1}``, by our annotation ``gpufaas.device``, by the annotation
``com.openfaas.profile``, or by constraints such as ``gpu=true``. Each becomes a constraint on the labels of devices,
and all of them must hold.

If nothing asks for a device, a function made from a template runs on any device, and an image on CPU devices only:
whether an image would use a GPU cannot be seen from outside.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpufaas_core.bundle import Needs
from gpufaas_core.constraints import DEVICE, GPU, KIND, PLATFORM_LABELS, Constraint, parse_constraint, satisfied
from gpufaas_core.environment import Environment, misfits
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import Device

DEVICE_ANNOTATION: Final = "gpufaas.device"
PROFILE_ANNOTATION: Final = "com.openfaas.profile"
NVIDIA: Final = "nvidia.com/gpu"
_OTHER_GPUS: Final = ("amd.com/gpu", "intel.com/gpu")

ON_A_GPU: Final = Constraint(GPU, "true")
ON_A_CPU: Final = Constraint(GPU, "true", negated=True)
_ANNOTATED: Final[Mapping[str, tuple[Constraint, ...]]] = {"cuda": (ON_A_GPU,), "cpu": (ON_A_CPU,), "any": ()}

Profiles = Mapping[str, tuple[Constraint, ...]]

PROFILES: Final[Profiles] = {"gpu": (ON_A_GPU,), "nvidia-gpu": (ON_A_GPU,)}
"""The profiles of every platform. Its operator may add more."""

_PROFILE_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_VALUES_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class Asked:
    """One constraint, and the field of the deployment that asks for it."""

    constraint: Constraint
    source: str

    def __str__(self) -> str:
        return f"{self.constraint} ({self.source})"


@dataclass(frozen=True, slots=True)
class AskedDevices:
    """The devices that a deployment asks for."""

    asked: tuple[Asked, ...] = ()
    gpu: bool = False
    """The deployment asks for a GPU, or for any device. Without that, images run on CPU devices only."""

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return tuple(dict.fromkeys(each.constraint for each in self.asked))

    def among(self, devices: Sequence[Device]) -> list[Device]:
        """Return those on which the function may run."""
        return [each for each in devices if satisfied(self.constraints, each.labels)]

    def check(self, name: str, devices: Sequence[Device]) -> None:
        """:raises InvalidSpec: there are devices, and none of them will do; says what is asked and what there is"""
        if not self.asked or not devices or self.among(devices):
            return
        alone = [each for each in self.asked if not any(each.constraint.satisfied_by(dev.labels) for dev in devices)]
        if not alone:
            every = ", ".join(map(str, self.asked))
            hint = _IMAGE_HINT if any(each.source == _IMAGE for each in self.asked) else "remove or correct one of them"
            raise InvalidSpec(f"function {name} can run on no device: none satisfies all of {every}: {hint}")
        first = alone[0]
        raise InvalidSpec(f"function {name} can run on no device: {_why_none(first, devices)}")


NOTHING_ASKED: Final = AskedDevices()

_IMAGE: Final = "an image that asks for no GPU"
_IMAGE_HINT: Final = (
    "images run on CPU devices unless they ask for a GPU (limits nvidia.com/gpu: 1, or the annotation gpufaas.device: "
    "cuda); ask for it, or add a CPU device, as in 'gpufaas serve --device cpu:0=2GiB'"
)


def read_placement(
    constraints: Sequence[str],
    limits: Mapping[str, str],
    requests: Mapping[str, str],
    annotations: Mapping[str, str],
    labels: Mapping[str, str],
    *,
    profiles: Profiles = PROFILES,
    image: bool = False,
) -> AskedDevices:
    """
    Return what the fields of a deployment ask for. A label counts as an annotation: people mix them up.

    :param image: the deployment has no bundle
    :raises InvalidSpec: a field is malformed, unknown or cannot be satisfied; names it
    """
    annotations = {
        **{name: labels[name] for name in (DEVICE_ANNOTATION, PROFILE_ANNOTATION) if name in labels},
        **annotations,
    }
    asked = [
        *_by_resources(limits, requests),
        *_by_annotation(annotations),
        *_by_profiles(annotations, profiles),
        *_by_constraints(constraints),
    ]
    gpu = any(_wants_gpu(each.constraint) for each in asked) or annotations.get(DEVICE_ANNOTATION) == "any"
    if image and not gpu and not any(each.constraint == ON_A_CPU for each in asked):
        asked.append(Asked(ON_A_CPU, _IMAGE))
    return AskedDevices(tuple(asked), gpu)


def check_needs(name: str, needs: Needs, environments: Sequence[Environment]) -> None:
    """
    Check what the bundle of *name* needs against the nodes on which it may run and whose environment is known.

    :raises InvalidSpec: the bundle does not fit one of them; says which, and why
    """
    for each in environments:
        if reasons := misfits(needs, each):
            raise InvalidSpec(
                f"the bundle of {name} does not fit {each}: {'; '.join(reasons)}: build it for this platform "
                "('gpufaas up'), install there what is missing, or name nodes that have it (constraints)"
            )


def read_profiles(given: Sequence[str]) -> Profiles:
    """
    Return the profiles of a platform: `PROFILES`, and those in *given*, each ``NAME=CONSTRAINT[,CONSTRAINT]``.

    :raises InvalidSpec: one is malformed, or two have the same name
    """
    profiles = dict(PROFILES)
    for text in given:
        name, _, constraints = text.partition("=")
        if not _PROFILE_NAME.fullmatch(name) or not constraints:
            raise InvalidSpec(f"{text[:80]!r} is not a profile: write NAME=CONSTRAINT, as in gold=tier=gold,gpu=true")
        if name in profiles:
            raise InvalidSpec(f"profile {name} is there already: choose another name")
        profiles[name] = tuple(parse_constraint(each) for each in constraints.split(","))
    return profiles


def _by_resources(limits: Mapping[str, str], requests: Mapping[str, str]) -> Iterator[Asked]:
    for where, resources in (("limits", limits), ("requests", requests)):
        for name in (NVIDIA, *_OTHER_GPUS):
            text = resources.get(name, "").strip()
            if not text or text == "0":
                continue
            what = f"{where} {name}"
            if name != NVIDIA:
                raise InvalidSpec(f"{what}: there are NVIDIA GPUs and CPU devices here only: ask for {NVIDIA}")
            if text != "1":
                raise InvalidSpec(
                    f"{what}: {text[:80]!r}: a function runs on one GPU: ask for 1; how much of its memory is said by "
                    "the annotation gpufaas.memory"
                )
            yield Asked(ON_A_GPU, what)


def _by_annotation(annotations: Mapping[str, str]) -> Iterator[Asked]:
    if (value := annotations.get(DEVICE_ANNOTATION)) is None:
        return
    if value not in _ANNOTATED:
        raise InvalidSpec(f"annotation {DEVICE_ANNOTATION}: {value[:80]!r} is not one of {', '.join(_ANNOTATED)}")
    for each in _ANNOTATED[value]:
        yield Asked(each, f"annotation {DEVICE_ANNOTATION}")


def _by_profiles(annotations: Mapping[str, str], profiles: Profiles) -> Iterator[Asked]:
    for name in filter(None, map(str.strip, annotations.get(PROFILE_ANNOTATION, "").split(","))):
        if name not in profiles:
            near = difflib.get_close_matches(name, profiles, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InvalidSpec(
                f"annotation {PROFILE_ANNOTATION}: there is no profile {name[:80]!r}: {hint}(there are: "
                f"{', '.join(sorted(profiles))}; 'gpufaas serve --profile' adds more)"
            )
        for each in profiles[name]:
            yield Asked(each, f"profile {name}")


def _by_constraints(constraints: Sequence[str]) -> Iterator[Asked]:
    for text in constraints:
        try:
            yield Asked(parse_constraint(text), "constraints")
        except InvalidSpec as exc:
            raise InvalidSpec(f"constraints: {exc}") from exc


def _wants_gpu(constraint: Constraint) -> bool:
    """Whether only a CUDA device can satisfy it, on any platform."""
    key, value, negated = constraint.key, constraint.value.lower(), constraint.negated
    if key in (GPU, KIND):
        return value == (("false", "cpu") if negated else ("true", "cuda"))[key == KIND]
    return not negated and (key.startswith("nvidia.com/") or (key == DEVICE and "/cuda:" in value))


def _why_none(asked: Asked, devices: Sequence[Device]) -> str:
    key = asked.constraint.key
    if _wants_gpu(asked.constraint) and not any(each.labels.get(GPU) == "true" for each in devices):
        return (
            f"it asks for a GPU, {asked}, and this platform has no CUDA device: serve with --device cuda:0 on a "
            "machine with an NVIDIA GPU, or remove what asks for it"
        )
    if asked.source == _IMAGE:
        return f"all devices here are GPUs, and {_IMAGE_HINT}"
    values = sorted({each.labels[key] for each in devices if key in each.labels})
    if values:
        more = f" and {len(values) - _VALUES_SHOWN} more" if len(values) > _VALUES_SHOWN else ""
        found = f"{key} is {', '.join(values[:_VALUES_SHOWN])}{more} here"
    else:
        labels = sorted({label for each in devices for label in each.labels})
        near = difflib.get_close_matches(key, labels, n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        found = f"no device has the label {key}{hint} (there are: {', '.join(labels)})"
    remedy = "correct it"
    if key not in PLATFORM_LABELS and not asked.constraint.negated:
        remedy += f", or label a device, as in 'gpufaas serve --label {asked.constraint}'"
    return f"none satisfies {asked}: {found}: {remedy}"
