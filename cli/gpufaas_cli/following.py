"""What ``up``, ``deploy`` and ``rollback`` wait for: that a revision takes calls."""

import time
from typing import Any, Final

import click

from gpufaas import Client
from gpufaas_cli import output
from gpufaas_core.errors import GpufaasError
from gpufaas_core.units import Seconds

LONGEST_S: Final[Seconds] = 1200.0
"""Large weights from a slow disk take minutes."""
option = click.option("--wait/--no-wait", default=True, help="Wait until each function takes calls.", show_default=True)


def follow(client: Client, name: str, namespace: str | None, revision: str) -> str:
    """
    Wait until *revision* takes calls, for `LONGEST_S` at most. Return a line where that depends on a call; else empty.

    Each look may be answered by another process of the gateway, which may not have heard of *revision* yet: only one
    that serves it, or the history, which all of them read, ends the waiting.

    :param revision: as a deployment answered it; empty: of a gateway without revisions
    :raises GpufaasError: it has failed, or another one came first, or it has not loaded by then
    """
    pause_s, end = 0.05, time.monotonic() + LONGEST_S
    with output.waiting(f"Loading {name}; what was deployed before serves meanwhile"):
        while revision:
            try:
                ours: dict[str, Any] = client.function(name, namespace, usage=False).get("gpufaas") or {}
                if ours.get("revision") == revision:
                    if not (before := ours.get("before")):
                        return ""
                    if ours["state"] == "idle" and not ours.get("lacks"):
                        return f"Its first call loads it; if that fails, revision {before} serves again."
                    known = {}
                else:
                    there = {each["revision"]: each for each in client.history(name, namespace)}
                    known = there.get(revision, {"status": "superseded"})
            except GpufaasError:
                return ""  # it is deployed all the same
            if known.get("status") == "superseded":
                return f"A later deployment has taken its calls: {ours.get('revision')}."
            if known.get("status") == "failed":
                why = f"{known['reason']}; {ours.get('revision')} goes on serving"
                raise GpufaasError(f"revision {revision} does not take calls: {why}")
            if time.monotonic() > end:
                raise GpufaasError(
                    f"revision {revision} has not loaded after {LONGEST_S / 60:g} minutes: `gpufaas describe {name}` "
                    "says how it stands"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)
    return ""
