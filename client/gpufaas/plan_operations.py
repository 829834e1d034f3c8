"""The operations on plans of copies; see `operations`."""

from collections.abc import Mapping, Sequence

from gpufaas.errors import Refused
from gpufaas.gateway import ApiRequest, Gateway, Steps, given
from gpufaas.resources import Plan


def plan(at: Gateway, version: int | None = None) -> Steps[Plan]:
    """
    Return the plan in force, with what became of each replica; or an earlier *version*. Version 0: there was none yet.

    :raises Refused: that version is not kept (404)
    """
    return at.object("/system/plan" if version is None else f"/system/plan/{version}", Refused)


def apply_plan(
    at: Gateway, replicas: Sequence[Mapping[str, object]], *, why: str = "",
    expected: Mapping[str, float] | None = None, base: int | None = None,
) -> Steps[Plan]:  # fmt: skip
    """
    Put *replicas*, as `Plan` has them, in force, and return the new version.

    :param base: the version that they were written against, 0: there was none; None: whatever is in force
    :raises Refused: the plan cannot be (400), or another one came in between (409)
    """
    body = {"replicas": replicas, "why": why, "expected": expected or {}, "base": base}
    return at.json(ApiRequest("PUT", "/system/plan", json=body), Refused)


def plan_history(at: Gateway) -> Steps[list[Plan]]:
    """Return the versions of the plan that are kept, newest first."""
    return at.objects("/system/plan/history")


def roll_back_plan(at: Gateway, version: int, *, base: int | None = None) -> Steps[Plan]:
    """Put what *version* had in force, as a new version. Parameters and errors are those of `apply_plan`."""
    return at.json(ApiRequest("POST", "/system/plan/rollback", json={"version": version, "base": base}), Refused)


def pin(
    at: Gateway, name: str, device: str, namespace: str | None = None,
    *, share: int = 0, reserve: int = 0, slots: int = 0, batch: int = 0,
) -> Steps[Plan]:  # fmt: skip
    """
    Keep a copy of a function on *device*, and others only where it is pinned, too; return the new version.

    The others are as in `Plan`; 0: as the function says.

    :raises Refused: the plan cannot be (400)
    """
    how = {"share": share, "reserve": reserve, "slots": slots, "batch": batch}
    body = {"function": name, "device": device, **how, **given(namespace=namespace)}
    return at.json(ApiRequest("POST", "/system/plan/pin", json=body), Refused)


def unpin(at: Gateway, name: str, device: str | None = None, namespace: str | None = None) -> Steps[Plan]:
    """Take the pins of a function, or the one on *device*, out of the plan; return the new version."""
    body = {"function": name, **given(device=device, namespace=namespace)}
    return at.json(ApiRequest("POST", "/system/plan/unpin", json=body), Refused)


def make_plan(at: Gateway) -> Steps[Plan]:
    """Have the planner make a plan; return its version. :raises Refused: there is no planner, or it made none"""
    return at.json(ApiRequest("POST", "/system/plan/make", timeout_s=at.deploy_s), Refused)
