"""``gpufaas describe``: as faas-cli, and what only this platform knows beneath."""

from collections.abc import Mapping
from typing import Any

import click

from gpufaas import Client, Function, function_path
from gpufaas_cli import declare, flags, output
from gpufaas_core.constraints import ENFORCED_BY
from gpufaas_core.units import format_bytes


@declare.command("describe")
@click.argument("name")
@click.option("-v", "--verbose", is_flag=True, help="Show what is empty as well.")
@flags.namespace
@flags.as_json
@flags.client
def command(name: str, verbose: bool, namespace: str | None, as_json: bool, client: Client) -> None:
    """
    Show all about one function: state, settings, where its model is resident, what it costs.

    Examples:
      gpufaas describe digits
      gpufaas describe digits -n dev -v
      gpufaas describe digits --json
    """
    found: Mapping[str, Any] = client.function(name, namespace)
    count = _invocations(client.functions(found.get("namespace") or namespace), found.get("name", name))
    where = namespace or (name.partition(".")[2] or None)
    path = function_path(found.get("name", name), where)
    url, async_url = client.shown + path, client.shown + path.replace("/function/", "/async-function/", 1)
    ready = int(found.get("availableReplicas") or 0) > 0
    if as_json:
        more = {
            "Status": "Ready" if ready else "Not Ready",
            "InvocationCount": count,
            "URL": url,
            "AsyncURL": async_url,
        }
        output.show_json({**found, **more})
        return
    output.aligned(
        [
            ("Name", found.get("name", name)),
            ("Status", _status(found, ready)),
            ("Replicas", str(found.get("replicas") or 0)),
            ("Available Replicas", str(found.get("availableReplicas") or 0)),
            ("Invocations", str(count)),
            ("Image", found.get("image", "")),
            ("Function Process", found.get("envProcess") or "<default>"),
            ("URL", url),
            ("Async URL", async_url),
        ]
    )
    for title, key in (("Labels", "labels"), ("Annotations", "annotations"), ("Environment", "envVars")):
        _block(title, sorted((found.get(key) or {}).items()), verbose)
    for title, key in (("Constraints", "constraints"), ("Secrets", "secrets")):
        _list(title, found.get(key) or [], verbose)
    for title, key in (("Requests", "requests"), ("Limits", "limits")):
        _block(title, [(name.capitalize(), value) for name, value in (found.get(key) or {}).items()], verbose)
    usage = found.get("usage") or {}
    if usage:
        lines = [("RAM", f"{usage.get('totalMemoryBytes', 0) / 1e6:.2f} MB")]
        if "cpu" in usage:
            lines.append(("CPU", f"{usage['cpu']:.0f} Mi"))
        _block("Usage", lines, verbose)
    if ours := found.get("gpufaas"):
        _ours(ours)


def _status(found: Mapping[str, Any], ready: bool) -> str:
    """As faas-cli says it, and why."""
    ours = found.get("gpufaas") or {}
    word = "Ready" if ready else "Not Ready"
    if ours.get("state") == "failed":
        since, left_s = ours.get("since") or "?", float(ours.get("retryIn") or 0)
        again = f"in {left_s:.0f} s" if left_s >= 1 else "by its next call"
        return (
            f"{word}: failed since {since}, after {ours.get('failures')} loads; it is tried again {again}, "
            "or at once when it is deployed again"
        )
    return word


def _invocations(functions: list[Function], name: str) -> int:
    return next((int(each.get("invocationCount") or 0) for each in functions if each.get("name") == name), 0)


def _block(title: str, pairs: list[tuple[str, str]], verbose: bool) -> None:
    if pairs:
        output.show(f"\n{title}:")
        output.aligned(pairs, indent=1)
    elif verbose:
        output.show(f"\n{title}: <none>")


def _list(title: str, entries: list[str], verbose: bool) -> None:
    if entries:
        output.show(f"\n{title}:")
        for each in entries:
            output.show(f" - {each}")
    elif verbose:
        output.show(f"\n{title}: <none>")


def _ours(ours: Mapping[str, Any]) -> None:
    """Where it is resident and what it costs; of a newer gateway, what this version does not know is left out."""
    copies = ours.get("copies") or {}
    devices = [
        f"{each} ({copies[each]} copies)" if copies.get(each, 1) > 1 else each for each in ours.get("devices") or []
    ]
    pairs = [("Resident on", ", ".join(devices) if devices else "no device: the next call loads it")]
    if ours.get("state") == "loading":
        pairs[0] = ("Loading on", ", ".join(devices))
    if ours.get("state") == "failed":
        pairs[0] = ("Failed", " ".join(str(ours.get("reason")).split()))
    if placement := ours.get("placement"):
        allowed = ", ".join(placement.get("devices") or []) or "no device that is there now"
        pairs.append(("May run on", f"{allowed}: {', '.join(placement.get('asked') or [])}"))
    if "hits" in ours:
        pairs.append(("Starts", f"hits {ours['hits']}, misses {ours.get('misses', 0)}"))
    if ours.get("kind"):
        slots = int(ours.get("slots") or 1)
        pairs.append(("Kind", f"{ours['kind']}, {slots} {'call' if slots == 1 else 'calls'} at once"))
    if ours.get("memory"):
        why = f" ({ours['memoryReason']})" if ours.get("memoryReason") else ""
        pairs.append(("First reservation", f"{format_bytes(int(ours['memory']))}{why}"))
    if enforcement := ours.get("memoryEnforcement"):
        pairs.append(("Memory enforced", "; ".join(ENFORCED_BY.get(each, each) for each in enforcement)))
    if ours.get("timeout"):
        pairs.append(("Timeout", f"{float(ours['timeout']):g} s"))
    pairs += [(key.capitalize(), str(ours[key])) for key in ("bundle", "revision", "unavailable") if ours.get(key)]
    _block("Platform", pairs, verbose=False)
    costs = []
    for kind, profile in (ours.get("profiles") or {}).items():
        how = _how(bool(profile.get("measured")), profile.get("estimated") or [])
        cost = (
            f"load {output.format_seconds(profile['load_s'])}, call {output.format_seconds(profile['service_s'])}, "
            f"memory {format_bytes(int(profile['occupation']))} ({how})"
        )
        costs.append(("any device" if kind == "*" else kind, cost))
    _block("Profile", costs, verbose=False)


def _how(measured: bool, estimated: list[str]) -> str:
    if measured and estimated:
        return f"measured; still estimated: {', '.join(estimated)}"
    return "measured" if measured else "estimated"
