"""
The history of a function: its last revisions, and which of them a rollback means.

Pure functions; stores keep the revisions, and `deploy` rolls back.
"""

from collections.abc import Sequence
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from gpufaas_gateway.errors import CannotRollBack, UnknownRevision
from gpufaas_gateway.spec import FunctionSpec

KEPT: Final = 10
"""Revisions of a function that a store keeps."""

RevisionStatus = Literal["serving", "pending", "failed", "superseded"]


class Revision(Struct, frozen=True, omit_defaults=True):
    """One deployment of a function."""

    revision: str
    spec: FunctionSpec
    at: float
    """When it was deployed, in Unix seconds."""
    by: str = ""
    """The user who deployed it; where nobody logs in, the name of the client. Empty: not known."""
    status: RevisionStatus = "superseded"
    """``pending``: it loads, and an earlier one serves. Stores tell which one serves by the record of the function."""
    reason: str = ""
    """Why it failed."""

    @property
    def digest(self) -> str:
        """sha256 of its bundle; empty: it has only an image."""
        return (self.spec.annotations or {}).get("gpufaas.bundle", "")


def shown(kept: Sequence[Revision], serving: str) -> list[Revision]:
    """Return the revisions *kept*, which come oldest first, newest first and with the status of *serving*."""
    return [replace(each, status="serving", reason="") if each.revision == serving else each for each in reversed(kept)]


def too_old(kept: Sequence[Revision], serving: str) -> list[str]:
    """
    Return which of *kept*, oldest first, a store keeps no longer: those that failed go before those that have served.
    The newest and *serving* stay.
    """
    first = sorted(kept[:-1], key=lambda each: each.status != "failed")
    return [each.revision for each in first if each.revision != serving][: max(0, len(kept) - KEPT)]


def meant(name: str, history: Sequence[Revision], gone: set[str], to: str | None) -> Revision:
    """
    Return the revision of function *name* that a rollback brings back: *to*; else the last one before that which
    serves, but for those that failed.

    :param history: newest first
    :param gone: the digests whose bundles were removed
    :raises UnknownRevision: *to* is not in the history
    :raises CannotRollBack: there is no earlier one, or its bundle is gone
    """
    there = ", ".join(each.revision for each in history if each.digest not in gone) or "none"
    if to is not None:
        found = next((each for each in history if each.revision == to), None)
        if found is None:
            raise UnknownRevision(
                f"function {name} has no revision {to[:80]!r} among its last {KEPT}: those that are there are {there}"
            )
    else:
        serving = next((at for at, each in enumerate(history) if each.status == "serving"), -1)
        found = next((each for each in history[serving + 1 :] if each.status == "superseded"), None)
        if found is None:
            raise CannotRollBack(f"function {name} has no revision before the one that serves: deploy an earlier one")
    if found.digest in gone:
        raise CannotRollBack(
            f"the files of revision {found.revision} of function {name} were removed, as the history had no room for "
            f"them (--history-size): name another one with --to, of {there}, or deploy it from its source"
        )
    return found
