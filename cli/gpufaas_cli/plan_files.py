"""Plans of copies as people write them: read strictly, compared, and shown."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import yaml
from yaml.nodes import MappingNode

from gpufaas import DEFAULT_NAMESPACE
from gpufaas_cli import output
from gpufaas_cli.stack_text import BadStack, compose
from gpufaas_core import json_errors
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import Replica
from gpufaas_core.plans import PlanVersion
from gpufaas_core.units import parse_duration

_UNSET: Final = {"share": 0, "reserve": 0, "slots": 0, "batch": 0, "wait_s": None, "pinned": False}
"""What a replica may say, and what it is where it says nothing."""
HEADINGS: Final = ("Compute", "Slots", "Batch", "Wait", "Pinned")
COLUMNS: Final = ("Device", "Function", *HEADINGS, "State")


class _Replica(Replica, frozen=True, forbid_unknown_fields=True):
    wait: str = ""
    """`wait_s` as people write it."""
    state: str = ""
    """What ``plan show --json`` says of it, as `reason`, and `planner` of a plan; passed over."""
    reason: str = ""


class PlanFile(PlanVersion, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file for ``plan apply``. What ``plan show --json`` prints is one."""

    version: int = -1
    """The plan that was in force when it was written; below 0: it does not say."""
    replicas: tuple[_Replica, ...]
    planner: dict[str, Any] = msgspec.field(default_factory=dict)


class _Strict(yaml.BaseLoader):
    """Gives each value as its text, and refuses a key that comes twice."""

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key comes twice", node.start_mark)
        return found


def read(file: IO[bytes]) -> tuple[PlanFile, list[dict[str, Any]]]:
    """
    Return the plan in *file*, YAML or JSON, and its replicas as the gateway takes them.

    :raises BadStack: it cannot be read, or is none; says file and key, what is there and what is allowed
    """
    path, text = Path(getattr(file, "name", "stdin").strip("<>")), file.read().decode("utf-8-sig", errors="replace")
    text = text.replace("\t", " ") if text.lstrip()[:1] == "{" else text  # JSON may be indented with them
    found: Any = None
    try:
        found = _Strict("").construct_document(compose(path, text, "plan", "docs/placing.md has examples"))
        plan = msgspec.convert(found, PlanFile, strict=False)
        if not all(map(isfinite, (*plan.expected.values(), *(each.wait_s or 0 for each in plan.replicas)))):
            raise InvalidSpec("a number is nan or infinite: write what can be compared")
        return plan, [_replica(each) for each in plan.replicas]
    except yaml.MarkedYAMLError as exc:
        raise BadStack(f"{path}:{exc.problem_mark.line + 1 if exc.problem_mark else 1}: {exc.problem}") from exc
    except msgspec.ValidationError as exc:
        raise BadStack(f"{path}: {json_errors.wrong(found, PlanFile, exc, strict=False)[1]}") from exc
    except InvalidSpec as exc:
        raise BadStack(f"{path}: {exc}") from exc


def _replica(of: _Replica) -> dict[str, Any]:
    wait_s = parse_duration(of.wait) if of.wait else of.wait_s
    name = of.function if "." in of.function else f"{of.function}.{DEFAULT_NAMESPACE}"
    return {**{key: getattr(of, key) for key in _UNSET}, "function": name, "device": of.device, "wait_s": wait_s}


def cells(replica: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a plan says of *replica*, by `HEADINGS`; ``-``: as the function says."""
    compute = next((f"{kind} {replica[kind]} %" for kind in ("share", "reserve") if replica.get(kind)), "-")
    wait = "-" if replica.get("wait_s") is None else output.format_seconds(replica["wait_s"])
    slots, batch = (str(replica.get(key) or "-") for key in ("slots", "batch"))
    return compute, slots, batch, wait, "yes" if replica.get("pinned") else "-"


def rows(replicas: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return *replicas* by device, with `COLUMNS`; the state is empty where their plan is not in force."""
    found = []
    for each in replicas:
        state = (" ".join(each[key].split()) for key in ("state", "reason") if each.get(key))
        found.append((each["device"], each["function"], *cells(each), ": ".join(state)))
    return sorted(found)


def differences(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the replicas that differ: the ``change``, ``+``, ``-`` or ``~``, and each ``before`` and ``after`` it."""
    old, new = ({(each["device"], each["function"]): each for each in plan} for plan in (before, after))
    found = []
    for was, now in ((old.get(key), new.get(key)) for key in sorted(old | new)):
        said = [each and [each.get(key, unset) for key, unset in _UNSET.items()] for each in (was, now)]
        if said[0] != said[1]:
            change = "+" if was is None else "-" if now is None else "~"
            found.append({"change": change, "before": was, "after": now})
    return found
