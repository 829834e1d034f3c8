"""``gpufaas list``, in faas-cli's layout, and ``describe``, with what only this platform knows beneath."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import click

from gpufaas import Client, Function, function_path
from gpufaas_cli import declare, flags, output
from gpufaas_core.constraints import CAPPED_BY, ENFORCED_BY
from gpufaas_core.units import format_bytes

_SORTS = {
    "name": lambda each: (each.get("name", ""),),
    "invocations": lambda each: (-int(each.get("invocationCount") or 0), each.get("name", "")),
    "creation": lambda each: (each.get("createdAt") or "", each.get("name", "")),
}
_REASON_CHARS: Final = 160
"""``gpufaas describe`` shows all of a reason."""


@declare.command("list")
@click.option("-v", "--verbose", is_flag=True, help="Image and time of creation as well.")
@click.option("-q", "--quiet", is_flag=True, help="Only names.")
@click.option("--sort", type=click.Choice(list(_SORTS)), default="name", show_default=True)
@flags.namespace
@declare.as_json
@flags.client
def list_functions(
    verbose: bool, quiet: bool, sort: str, namespace: str | None, as_json: bool, client: Client,
) -> None:  # fmt: skip
    """
    List the functions that are deployed.

    Examples:
      gpufaas list
      gpufaas list -v --sort invocations
      gpufaas ls -q | xargs -n1 gpufaas describe
      gpufaas list --json
    """
    functions = sorted(client.functions(namespace), key=_SORTS[sort])
    if as_json:
        output.show_json(functions)
        return
    if quiet:
        for each in functions:
            output.show(each["name"])
        return
    width = max([40, *(len(each.get("image", "")) for each in functions)])
    form = f"{{0:<30}}\t{{1:<{width}}}\t{{2:<15}}\t{{3:<5}}\t{{4}}" if verbose else "{0:<30}\t{2:<15}\t{3:<5}"
    states = [_state(each) for each in functions]
    head = form.format("Function", "Image", "Invocations", "Replicas", "CreatedAt")
    output.show(f"{head}\tState" if any(states) else head)
    for each, state in zip(functions, states, strict=True):
        counts = int(each.get("invocationCount") or 0), int(each.get("replicas") or 0)
        line = form.format(each["name"], each.get("image", ""), *counts, _time(each.get("createdAt")))
        output.show(f"{line}\t{state}" if state else line)


def _state(function: Function) -> str:
    """Return the state in one line; empty: the gateway does not say, as OpenFaaS's does not."""
    ours = function.get("gpufaas") or {}
    state, wanted = str(ours.get("state") or ""), int(function.get("replicas") or 0)
    if state in ("failed", "unavailable"):
        since = f" since {_time(ours['since'])}" if ours.get("since") else ""
        reason = " ".join(str(ours.get("reason") or "").split())
        return f"{state}{since}: {reason[:_REASON_CHARS]}{'…' if len(reason) > _REASON_CHARS else ''}"
    if state == "resident":
        state = f"resident on {', '.join(ours.get('devices') or [])}"
    state += output.format_age(ours.get("age"))
    if not state or wanted <= 1:
        return state
    lacks = f": {' '.join(str(ours['lacks']).split())[:_REASON_CHARS]}" if ours.get("lacks") else ""
    return f"{state} ({ours.get('ready') or 0} of {wanted} copies{lacks})"


def _time(text: object) -> str:
    """Return the time to the second, in UTC."""
    try:
        return f"{datetime.fromisoformat(str(text)).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if text else ""
    except ValueError:
        return str(text)


_SECTIONS = (
    ("Labels", "labels"), ("Annotations", "annotations"), ("Environment", "envVars"), ("Constraints", "constraints"),
    ("Secrets", "secrets"),
)  # fmt: skip


@declare.command("describe")
@click.argument("name")
@click.option("-v", "--verbose", is_flag=True, help="Show what is empty as well.")
@flags.namespace
@declare.as_json
@flags.client
def describe(name: str, verbose: bool, namespace: str | None, as_json: bool, client: Client) -> None:
    """
    Show all about one function: its state and settings, the devices where it is resident, its costs.

    Examples:
      gpufaas describe digits
      gpufaas describe digits -n dev -v
      gpufaas describe digits --json
    """
    found: Mapping[str, Any] = client.function(name, namespace)
    called = found.get("name", name)
    every = client.functions(found.get("namespace") or namespace)
    count = next((int(each.get("invocationCount") or 0) for each in every if each.get("name") == called), 0)
    path = function_path(called, namespace or (name.partition(".")[2] or None))
    url, async_url = client.shown + path, client.shown + path.replace("/function/", "/async-function/", 1)
    available, ours = int(found.get("availableReplicas") or 0), found.get("gpufaas") or {}
    status = "Ready" if available else "Not Ready"
    by_call = " (loaded by the next call)" if available > ours.get("ready", 1) else ""
    if as_json:
        output.show_json({**found, "Status": status, "InvocationCount": count, "URL": url, "AsyncURL": async_url})
        return
    output.aligned(
        [("Name", called), ("Status", status + _why_failed(ours)),
         ("Replicas", str(found.get("replicas") or 0)),
         ("Available Replicas", f"{available}{by_call}"), ("Invocations", str(count)),
         ("Image", found.get("image", "")), ("Function Process", found.get("envProcess") or "<default>"), ("URL", url),
         ("Async URL", async_url)]
    )  # fmt: skip
    for title, key in _SECTIONS:
        output.section(title, found.get(key) or (), verbose)
    for title, key in (("Requests", "requests"), ("Limits", "limits")):
        output.section(title, {what.capitalize(): value for what, value in (found.get(key) or {}).items()}, verbose)
    if usage := found.get("usage") or {}:
        cpu = {"CPU": f"{usage['cpu']:.0f} Mi"} if "cpu" in usage else {}
        output.section("Usage", {"RAM": f"{usage.get('totalMemoryBytes', 0) / 1e6:.2f} MB", **cpu})
    if ours:
        output.show("\nPlatform:")
        rows = rows_of(ours)
        platform: Mapping[str, Any] = client.status() if ours.get("kind") in ("model", "http") else {}
        if known := platform.get("standbys"):
            waiting = "process waits" if int(known["ready"]) == 1 else "processes wait"
            rows.append(("Standbys", f"{known['ready']} {waiting} for any function"))
        output.aligned(rows, indent=1)
        costs = {
            "any device" if kind == "*" else kind: _cost(each) for kind, each in (ours.get("profiles") or {}).items()
        }
        output.section("Profile", costs)


def _why_failed(ours: Mapping[str, Any]) -> str:
    if ours.get("state") != "failed":
        return ""
    left_s = float(ours.get("retryIn") or 0)
    loads = "1 load" if ours.get("failures") == 1 else f"{ours.get('failures')} loads"
    again = f"in {left_s:.0f} s" if left_s >= 1 else "by its next call"
    return (
        f": failed since {ours.get('since') or '?'}, after {loads}; it is tried again {again}, or "
        "at once when it is deployed again"
    )


def rows_of(ours: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return rows that say where it is resident and how it is run. What only a newer gateway tells is left out."""
    copies = ours.get("copies") or {}
    devices = ", ".join(
        f"{each} ({copies[each]} copies)" if copies.get(each, 1) > 1 else each for each in ours.get("devices") or []
    )
    parked = ", ".join(ours.get("parked") or [])
    match ours.get("state"):
        case "loading":
            pairs = [("Loading on", devices)]
        case "failed":
            pairs = [("Failed", " ".join(str(ours.get("reason")).split()))]
        case _:
            loads = f"the next call {'wakes or ' if parked else ''}loads it"
            nowhere = f"no device: {'its calls are refused' if ours.get('keptOut') else loads}"
            pairs = [("Resident on", (devices or nowhere) + output.format_age(ours.get("age")))]
    placement, capped_by = ours.get("placement") or {}, ours.get("computeEnforcement") or []
    allowed = ", ".join(placement.get("devices") or []) or "no device that is there now"
    failed = ours.get("failed") or {}
    slots, why = int(ours.get("slots") or 1), f" ({ours['memoryReason']})" if ours.get("memoryReason") else ""
    run = f"; of the run {float(ours['runTimeout']):g} s" if ours.get("runTimeout") else ""
    owner_why = f": {ours['ownerWhy']}" if ours.get("ownerWhy") else ""
    more: dict[str, Any] = {
        "Owner": ours.get("owner") and f"{ours['owner']}{owner_why}",
        "Parked on": parked,
        "Calls refused": ours.get("keptOut"),
        "Copies": ours.get("lacks") and f"fewer than it should have: {ours['lacks']}",
        "May run on": placement and f"{allowed}: {', '.join(placement.get('asked') or [])}",
        "Starts": "hits" in ours and f"hits {ours['hits']}, misses {ours.get('misses', 0)}",
        "Kind": ours.get("kind") and f"{ours['kind']}, {slots} {'call' if slots == 1 else 'calls'} at once",
        "Compute": ours.get("sharing") and f"{ours['compute']} per cent of a device, {ours['sharing']}",
        "Batches": ours.get("batchMax") and _batches(ours),
        "Latency goal": ours.get("latencyGoal") and output.format_seconds(float(ours["latencyGoal"])),
        "First reservation": ours.get("memory") and f"{format_bytes(int(ours['memory']))}{why}",
        "Right memory": ours.get("memoryAdvice"),
        "Memory enforced": "; ".join(ENFORCED_BY.get(each, each) for each in ours.get("memoryEnforcement") or []),
        "Isolation": "; ".join(ours.get("isolation") or []),
        "Share enforced": "as the device does: " * (len(capped_by) > 1)
        + "; ".join(CAPPED_BY.get(each, each) for each in capped_by),
        "Note": ours.get("notEnforced"),
        "Timeout": ours.get("timeout") and f"{float(ours['timeout']):g} s{run}",
        "Bundle": ours.get("bundle"),
        "Revision": ours.get("revision"),
        "On trial": ours.get("before") and f"if it does not load, revision {ours['before']} serves again",
        "Pending": ours.get("pending") and f"revision {ours['pending']}, which is loaded before it takes calls",
        "Last update": failed and f"revision {failed['revision']} has failed: {' '.join(failed['reason'].split())}",
        "Unavailable": ours.get("unavailable"),
    }
    return pairs + [(title, str(text)) for title, text in more.items() if text]


def _batches(ours: Mapping[str, Any]) -> str:
    text = f"up to {ours['batchMax']} calls together"
    if wait_s := float(ours.get("batchWait") or 0):
        text += f", which wait up to {output.format_seconds(wait_s)} for others"
    if ours.get("batchAdaptive"):
        text += ", fewer to keep the latency goal"
    mean = ours.get("batchMean")
    return text if mean is None else f"{text}; {mean:.1f} so far ({mean / ours['batchMax']:.0%} full)"


def _cost(profile: Mapping[str, Any]) -> str:
    estimated = profile.get("estimated") or []
    how = "measured" if profile.get("measured") else "estimated"
    if profile.get("measured") and estimated:
        how = f"measured; still estimated: {', '.join(estimated)}"
    return (
        f"load {output.format_seconds(profile['load_s'])}, call {output.format_seconds(profile['service_s'])}, "
        f"memory {format_bytes(int(profile['occupation']))} ({how})"
    )
