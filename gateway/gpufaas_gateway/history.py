"""
The history of a function: its last revisions, and which of them a rollback means. Stores keep it, `deploy` rolls back.
"""

from collections.abc import Sequence
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from gpufaas_core.errors import UnknownName
from gpufaas_gateway.errors import CannotRollBack, Overtaken
from gpufaas_gateway.spec import FunctionRecord, FunctionSpec

KEPT: Final = 10
"""The most revisions in a history."""
RevisionStatus = Literal["serving", "superseded", "pending", "failed"]


class Revision(Struct, frozen=True, omit_defaults=True):
    """One deployment of a function."""

    revision: str
    spec: FunctionSpec
    at: float
    """When it was deployed, in Unix seconds."""
    by: str = ""
    """The user who deployed it; where nobody logs in, the name of the client. Empty: not known."""
    digest: str = ""
    """sha256 of its bundle; empty: it has only an image."""
    status: RevisionStatus = "serving"
    """``superseded``: it has served. ``pending``: it loads, and an earlier one serves."""
    reason: str = ""
    """Why it failed."""
    gone: bool = False
    """Its bundle was removed. Not kept: found out when it is asked for."""


class RolledBack(Struct, frozen=True):
    """What a rollback did."""

    revision: str
    """The revision that takes the calls now, or once it is loaded."""
    to: str
    """The earlier revision that it repeats."""


def noting(kept: Sequence[Revision], record: FunctionRecord, noted: Sequence[Revision]) -> list[Revision]:
    """
    Return the history *kept*, newest first, as it is with *record*, and with those of *noted* that it lacks as newest.

    Of more than `KEPT`, the oldest that has never served goes, else the oldest; never the one before one on trial.
    """
    pending, before, failed = record.handover.pending, record.handover.before, record.handover.failed
    there = {each.revision for each in kept}
    oldest_first = [*reversed(kept), *(each for each in noted if each.revision not in there)]
    while len(oldest_first) > KEPT:
        may_go = [each for each in oldest_first[:-1] if before is None or each.revision != before.revision]
        oldest_first.remove(next((each for each in may_go if each.status in ("pending", "failed")), may_go[0]))
    history = []
    for each in reversed(oldest_first):
        status, reason = each.status, each.reason
        if each.revision == record.revision:
            status, reason = "serving", ""
        elif pending is not None and each.revision == pending.record.revision:
            status = "pending"
        elif failed is not None and each.revision == failed.revision:
            status, reason = "failed", failed.reason
        elif status == "pending":
            status, reason = "failed", f"revision {oldest_first[-1].revision} came before it was loaded"
        elif status == "serving":
            status = "superseded"
        history.append(replace(each, status=status, reason=reason))
    return history


def check_seen(name: str, kept: FunctionRecord | None, seen: str | None) -> None:
    """:raises Overtaken: a store keeps *kept* of function *name*, and its writer has *seen* another state of it"""
    if seen not in (None, "" if kept is None else kept.state):
        raise Overtaken(f"function {name} was changed through another gateway at the same moment: try again")


def meant(name: str, history: Sequence[Revision], to: str | None) -> Revision:
    """
    Return the revision of function *name* that a rollback repeats: *to*, else the last that served before this one,
    which is the one that serves while another is pending.

    :raises UnknownName: *to* is not in the history
    :raises CannotRollBack: there is no earlier one, its bundle is gone, or the last one never served
    """
    there = ", ".join(each.revision for each in history if not each.gone) or "none"
    if to is None and history[0].status == "failed":
        raise CannotRollBack(
            f"revision {history[0].revision} of function {name} never served, so the one before it still does: to go "
            f"back from that one, name another with --to (there are {there})"
        )
    before = "serving" if history[0].status == "pending" else "superseded"
    found = next((each for each in history if (each.status == before if to is None else each.revision == to)), None)
    if found is None and to is not None:
        raise UnknownName(f"function {name} has no revision {to[:80]!r} among its last {KEPT}: there are {there}")
    if found is None:
        raise CannotRollBack(f"function {name} has no revision before the one that serves: deploy an earlier one")
    if found.gone:
        raise CannotRollBack(
            f"the files of revision {found.revision} of function {name} were removed, for want of room in "
            f"--history-size: name another one with --to (there are {there}), or deploy it from its source"
        )
    return found
