"""
What annotations, limits and variables of a deployment may say, by name: `READ`, which `spec.read_options` applies.

A reader raises `InvalidSpec`, which says what is allowed, and not where it is.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gpufaas_core.capabilities import read_capabilities
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import ALL_COMPUTE, SHARINGS
from gpufaas_core.ports import read_ports
from gpufaas_core.units import Bytes, Seconds, parse_bytes, parse_duration
from gpufaas_gateway.asked import LONGEST_S, read_accuracy, read_goal, read_name, read_positive, read_preference
from gpufaas_gateway.cors import HEADERS, METHODS, ORIGINS
from gpufaas_gateway.placement import DEVICE_ANNOTATION

DEFAULT_QUEUE: Final = "faas-request"
"""OpenFaaS's name for the queue of asynchronous calls to functions that name none."""
_QUEUE_NAME: Final = re.compile(r"[a-zA-Z0-9]([-._a-zA-Z0-9]{0,62})")
_MAX_SLOTS: Final = 1024  # threads of one worker; more run into limits of the kernel
_MAX_PRELOAD: Final = 32
_MAX_WEIGHT: Final = 1e6
_MOST_PRIORITY: Final = 100
MOST_BATCH_WAIT_S: Final = 10.0
_NO_LIMIT_S: Final = LONGEST_S  # "0" means no limit to OpenFaaS's watchdogs; here every wait has a deadline: a day


def _path(text: str) -> str:
    if text and not re.fullmatch(r"/[!-~]*", text):
        raise InvalidSpec(f"{text[:80]!r} is not a path: write for example /healthz")
    return text


def _cores(text: str) -> float:
    """``500m`` is half a core, as Kubernetes writes it."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)(m?)", text.strip())
    cores = float(found[1]) / (1000 if found[2] else 1) if found else 0.0
    if cores <= 0:
        raise InvalidSpec(f"{text!r} is not a number of cores: write for example 500m or 2")
    return cores


def refuse_unknown(annotations: Mapping[str, str]) -> None:
    for name in annotations:
        known = ANNOTATIONS if name.startswith("gpufaas.") else _PROBES if name.startswith(_ABOUT_PROBES) else [name]
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise InvalidSpec(f"annotation {name} is not known: did you mean {nearest}? (known: {', '.join(known)})")


def _size(text: str) -> Bytes:
    size = parse_bytes(text)
    if size <= 0:
        raise InvalidSpec(f"{text!r} must be more than 0: write for example 512Mi")
    return size


def _timeout(text: str) -> Seconds:
    return min(parse_duration(text) or _NO_LIMIT_S, _NO_LIMIT_S)


def _yes(text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise InvalidSpec(f"{text!r} is neither true nor false")
    return text.strip().lower() == "true"


def _batch_wait(text: str) -> Seconds:
    wait_s = parse_duration(text)
    if wait_s > MOST_BATCH_WAIT_S:
        raise InvalidSpec(f"{text[:80]!r} is more than {MOST_BATCH_WAIT_S:g} s: write for example 5ms")
    return wait_s


def _compute(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or not 1 <= int(text) <= ALL_COMPUTE:
        raise InvalidSpec(f"{text[:80]!r} is not a share of a device's compute: write a whole number from 1 to 100")
    return int(text)


def _sharing(text: str) -> str:
    if text.strip() not in SHARINGS:
        raise InvalidSpec(f"{text[:80]!r} is not one of {', '.join(SHARINGS)}")
    return text.strip()


def _whole(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise InvalidSpec(f"{text!r} is not a whole number")
    return int(text)


def _weight(text: str) -> float:
    weight = read_positive(text)
    if weight > _MAX_WEIGHT:
        raise InvalidSpec(f"{text[:80]!r} is over the limit of {_MAX_WEIGHT:g}")
    return weight


def _priority(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", text.strip()) or abs(int(text)) > _MOST_PRIORITY:
        raise InvalidSpec(f"{text[:80]!r} is not a whole number from -{_MOST_PRIORITY} to {_MOST_PRIORITY}")
    return int(text)


def _overload(text: str) -> bool:
    if text.strip() not in ("queue", "shed"):
        raise InvalidSpec(f"{text[:80]!r} is neither queue nor shed")
    return text.strip() == "shed"


def _not_yet(instead: str) -> Callable[[str], object]:
    def refuse(text: str) -> object:  # noqa: ARG001 - as the other readers
        raise InvalidSpec(f"is not supported yet: remove the annotation, {instead}")

    return refuse


def _queue(text: str) -> str:
    name = text.strip() or DEFAULT_QUEUE
    if not _QUEUE_NAME.fullmatch(name):
        raise InvalidSpec(
            f"{name[:80]!r} is not the name of a queue: use at most 63 of a-z, A-Z, 0-9, '-', '_' and '.', "
            "beginning with a letter or digit"
        )
    return name


def _modules(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(re.split(r"[\s,]+", text.strip().strip(","))))
    wrong = next((each for each in names if not all(part.isidentifier() for part in each.split("."))), None)
    if wrong is not None:
        raise InvalidSpec(f"{wrong[:80]!r} is not the name of a module: write for example transformers, PIL.Image")
    if len(names) > _MAX_PRELOAD:
        raise InvalidSpec(f"{len(names)} modules are over the limit of {_MAX_PRELOAD}")
    return names


def _ports(text: str) -> str:
    read_ports(text)
    return text.strip()


def _count(text: str) -> int:
    count = _whole(text)
    if count < 1:
        raise InvalidSpec(f"{text!r} must be at least 1")
    return count


def _slots(text: str) -> int:
    slots = _count(text)
    if slots > _MAX_SLOTS:
        raise InvalidSpec(f"{text!r} is over the limit of {_MAX_SLOTS} calls at once in one worker")
    return slots


_PROBE: Final[Sequence[tuple[str, str, Callable[[str], object]]]] = (
    ("path", "path", _path),
    ("initialDelay", "delay_s", lambda text: min(parse_duration(text), _NO_LIMIT_S)),
    ("initialDelaySeconds", "delay_s", _whole),
    ("periodSeconds", "period_s", _whole),
    ("timeoutSeconds", "timeout_s", _whole),
    ("successThreshold", "successes", _whole),
    ("failureThreshold", "failures", _whole),
)
"""Annotations of one of OpenFaaS's probes, without their prefix: as `READ`."""
READ: Final[Mapping[str, tuple[str, Callable[[str], object]]]] = {
    "limits.memory": ("memory_limit", _size),
    "limits.cpu": ("cpus", _cores),
    "envVars exec_timeout": ("exec_s", _timeout),
    "annotation gpufaas.timeout": ("timeout_s", _timeout),
    "annotation gpufaas.memory": ("device_memory", _size),
    "annotation gpufaas.slots": ("slots", _slots),
    "annotation gpufaas.load-stall": ("stall_s", _timeout),
    "annotation gpufaas.queue": ("max_queue", _count),
    "annotation gpufaas.max-body": ("max_body", _size),
    "annotation gpufaas.body-patience": ("body_patience_s", _timeout),
    "annotation gpufaas.idempotent": ("idempotent", _yes),
    "annotation gpufaas.latency-goal": ("latency_goal_s", read_goal),
    "annotation gpufaas.compute": ("compute", _compute),
    "annotation gpufaas.sharing": ("sharing", _sharing),
    "annotation gpufaas.batch-max": ("batch_max", _count),
    "annotation gpufaas.batch-wait": ("batch_wait_s", _batch_wait),
    "annotation gpufaas.batch-adaptive": ("batch_adaptive", _yes),
    "annotation gpufaas.preload": ("preload", _modules),
    "annotation gpufaas.capabilities": ("capabilities", read_capabilities),
    "annotation gpufaas.connect": ("connect", _ports),
    "annotation gpufaas.task": ("task", read_name),
    "annotation gpufaas.model": ("model", read_name),
    "annotation gpufaas.accuracy": ("accuracy", read_accuracy),
    "annotation gpufaas.weight": ("weight", _weight),
    "annotation gpufaas.priority": ("priority", _priority),
    "annotation gpufaas.overload": ("sheds", _overload),
    "annotation gpufaas.min-accuracy": ("min_accuracy", read_accuracy),
    "annotation gpufaas.max-cost": ("max_cost", read_positive),
    "annotation gpufaas.prefer": ("prefer", read_preference),
    "annotation gpufaas.application": ("application", _not_yet("and call the function by its name")),
    "annotation gpufaas.kinds": ("kinds", _not_yet("and name devices by constraints, or by a plan (gpufaas plan)")),
    "annotation gpufaas.scale-by": ("scale_by", _not_yet("and scale by labels com.openfaas.scale.…, or by a plan")),
    "annotation com.openfaas.queue": ("async_queue", _queue),
    **{
        f"annotation com.openfaas.{probe}.http.{name}": (f"{probe}_{field}", parse)
        for probe in ("ready", "health")
        for name, field, parse in _PROBE
    },
}
"""What a deployment may say, as errors name it: field of `Options`, and reader. Of two for a field the later counts."""
ANNOTATIONS: Final = sorted([
    "gpufaas.allow-pickle",  # read at build: the bundle's manifest has the answer
    "gpufaas.bundle",
    HEADERS,
    METHODS,
    ORIGINS,
    DEVICE_ANNOTATION,
    *(what.removeprefix("annotation ") for what in READ if what.startswith("annotation gpufaas.")),
])  # fmt: skip
"""All that there are of ours."""
_ABOUT_PROBES: Final = ("com.openfaas.ready.", "com.openfaas.health.")
_PROBES: Final = [each for what in READ if (each := what.removeprefix("annotation ")).startswith(_ABOUT_PROBES)]
