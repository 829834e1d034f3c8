"""Why: ``gpufaas explain`` says it of a call or a function, ``policies`` lists what can decide."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import click

from gpufaas import DEFAULT_NAMESPACE, Client, Function, GpufaasError, UnknownCall, UnknownFunction
from gpufaas_cli import declare, flags, output, plan_files
from gpufaas_cli.commands.list import rows_of
from gpufaas_scheduler.policies.registry import Described, described
from gpufaas_scheduler.policies.spec import EXAMPLE, FORM

_OF_COPIES: Final = (
    "Owner", "Resident on", "Loading on", "Parked on", "Failed", "Calls refused", "Copies", "May run on",
    "Last update", "Unavailable",
)  # fmt: skip
"""What ``describe`` says that is about where a function is."""


@declare.command("explain")
@click.argument("asked", metavar="CALL|FUNCTION")
@flags.namespace
@declare.as_json
@flags.client
def explain(asked: str, namespace: str | None, as_json: bool, client: Client) -> None:
    """
    Say why a call was started where and when it was, or why it waits; or who decides about a function, and why.

    CALL is X-Call-Id of the answer, or what was sent under that name. The last calls are remembered.

    Examples:
      gpufaas explain dcbf8adb-ea70-4fb0-8782-d5aacf82da9a
      gpufaas explain digits
      gpufaas explain digits.dev --json
    """
    try:
        call = client.explain(asked)
    except UnknownCall:
        try:
            _explain_function(client.function(asked, namespace, usage=False), as_json)
        except UnknownFunction:
            raise GpufaasError(
                f"{asked!r} is no function that is deployed ('gpufaas list' has them), and no call that is remembered: "
                "its id is X-Call-Id of the answer; the last 2,000 are kept, by the gateway that ran them"
            ) from None
    else:
        (output.show_json if as_json else partial(show, call=asked))(call)


def _explain_function(found: Function, as_json: bool) -> None:
    ours = found.get("gpufaas") or {}
    name = f"{found['name']}.{found.get('namespace') or DEFAULT_NAMESPACE}"
    if as_json:
        output.show_json({"function": name, **ours})
        return
    output.aligned([("Function", name), *(row for row in rows_of(ours) if row[0] in _OF_COPIES)])
    if ours.get("plan"):
        output.show()
        output.table(plan_files.COLUMNS, plan_files.rows(ours["plan"]))


def show(found: Mapping[str, Any] | None, call: str) -> None:
    """:param found: None: the call was never placed"""
    if found is None:
        output.note(f"call {call} was never placed: it was rejected")
        return
    others, service = found.get("batch"), found.get("service")
    rows = [
        ("Call", str(found["call"])),
        ("Function", str(found["function"])),
        ("Policy", str(found["policy"])),
        ("State", _state(found)),
        ("Waited", output.format_seconds(found["waited_s"])),
        ("Together with", _calls(others, len(others)) if others else ""),
        ("Evicted", ", ".join(found["victims"])),
        ("Parked", ", ".join(found.get("parked") or ())),
        ("Because", found["rule"] or "the policy does not say"),
    ]
    for number, each in enumerate(found["options"]):
        what = f"{each['option']} {each['where']}".ljust(32)
        rows.append(("Weighed" if number == 0 else "", f"{what} {each['estimate_s']:9.3f} s"))
    rows += [
        ("Service", _service(service) if service else ""),
        ("Passed over", _calls(found["passed_over"], found["passed_over_count"])),
        ("Overtaken by", _calls(found["overtaken_by"], found["overtaken_by_count"])),
    ]
    output.aligned([row for row in rows if row[1]])


def _service(known: Mapping[str, Any]) -> str:
    calls = f"{known['calls']} call{'' if known['calls'] == 1 else 's'}"
    size = f", for a size of {known['size']:g}" if known["size"] else ""
    mean, p50, p90 = (output.format_seconds(known[each]) for each in ("estimate_s", "p50_s", "p90_s"))
    return f"{mean} (p50 {p50}, p90 {p90}, {calls} on {known['kind']}{size})"


def _state(found: Mapping[str, Any]) -> str:
    if found["state"] == "waiting":
        return "waiting in the global queue"
    if found["state"] == "local":
        return f"waiting in the local queue of {found['device']}"
    how = "hit" if found["hit"] else "miss"
    if tier := found.get("tier"):
        how += f" (weights from {tier})"
    via = ", from its local queue" if found["via"] == "local" else ""
    return f"{found['state']}: a {how} on {found['device']} at {found['at']:.3f} s{via}"


def _calls(named: list[str], count: int) -> str:
    if not count:
        return "no call"
    more = f", and {count - len(named)} more" if count > len(named) else ""
    return f"{count}: {', '.join(named)}{more}"


def _show_policies(found: list[Described]) -> None:
    output.show(f"--policy {FORM}\nas in {EXAMPLE}\n")
    for each in found:
        output.show(f"{each.role + '=' if each.role else ''}{each.name}: {each.says}")
        for name, allowed, default, means in each.options:
            output.show(f"  {name}={default}  {means} ({allowed})")


@declare.command("policies")
@declare.shows(_show_policies)
def policies() -> list[Described]:
    """
    List the policies that --policy can name, what can fill a role beside them, and the options of each.

    Examples:
      gpufaas policies
      gpufaas policies --json
      gpufaas serve --policy lalb-o3:o3_limit=10+replacement=cost-aware
    """
    return described()
