"""``gpufaas plan``: which copies of functions there should be, and on which devices."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, BinaryIO, Final

import click

from gpufaas import Client, Plan
from gpufaas_cli import declare, flags, output, plan_files

_HOW: Final = "'gpufaas plan apply FILE' puts one in force, and 'gpufaas plan pin F DEVICE' keeps F on a device"


@declare.group("plan", no_args_is_help=True)
def command() -> None:
    """
    Say which copies of functions there should be, and on which devices.

    The plan in force owns the functions that it names; calls place all others. docs/placing.md has it all.

    Examples:
      gpufaas plan show
      gpufaas plan pin digits local/cpu:0
      gpufaas plan apply plan.yaml --why "one device is enough at night"
    """


def _when(plan: Mapping[str, Any]) -> str:
    return f"{datetime.fromtimestamp(plan.get('at') or 0, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _show(found: Plan) -> None:
    if version := found["version"]:
        why = f": {' '.join(found['why'].split())}" if found.get("why") else ""
        output.show(f"Plan {version}, by {found.get('by') or 'nobody'}, {_when(found)}{why}")
    for title, said in (("Expected", found.get("expected")), ("Planner", found.get("planner"))):
        if said:
            output.show(f"{title}: {', '.join(f'{name} {output.text(value)}' for name, value in said.items())}")
    for each in found.get("notes") or ():
        output.show(f"Note: {each}")
    if replicas := found.get("replicas"):
        output.table(plan_files.COLUMNS, plan_files.rows(replicas))
    else:
        output.show(f"No copies are planned: calls place every function. {_HOW}.")


@command.command("show")
@click.option("--version", type=click.IntRange(1), metavar="N", help="One of gpufaas plan history.")
@declare.shows(_show)
@flags.client
def show(version: int | None, client: Client) -> Plan:
    """
    Show the plan in force, and of each copy whether it is resident, loading, absent, or away with its device.

    Examples:
      gpufaas plan show
      gpufaas plan show --version 3
      gpufaas plan show --json > plan.json     to edit it, and apply it again
    """
    return client.plan(version)


def _show_applied(found: Plan) -> None:
    count = len(found.get("replicas") or ())
    copies = f"{count} {'copy' if count == 1 else 'copies'}" if count else "no copies"
    output.show(f"Plan {found['version']} is in force, with {copies}: 'gpufaas plan show' says what became of it")


_applied: Final = declare.options(declare.shows(_show_applied), flags.client)
_base: Final = click.option("--base", type=click.IntRange(0), metavar="N", help="Only if plan N is in force; 0: none.")


@command.command("apply")
@click.argument("file", type=click.File("rb"))
@click.option("--why", metavar="TEXT", help="What it is for; else as in FILE.")
@_base
@_applied
def apply(file: BinaryIO, why: str | None, base: int | None, client: Client) -> Plan:
    """
    Put the plan in FILE, YAML or JSON, in force: it takes the place of the whole plan before. - is stdin.

    Where FILE has a version, that one must be in force: otherwise somebody has applied another in between.

    Examples:
      gpufaas plan apply plan.yaml --why "one device is enough at night"
      gpufaas plan show --json | sed s/cpu:0/cpu:1/ | gpufaas plan apply -
    """
    plan, replicas = plan_files.read(file)
    base = plan.version if base is None else base
    base = client.plan()["version"] if base < 0 else base
    return client.apply_plan(replicas, why=plan.why if why is None else why, expected=plan.expected, base=base)


def _show_differences(found: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for each in found:
        now = each["after"] or each["before"]
        pairs = zip(plan_files.cells(each["before"] or now), plan_files.cells(now), strict=True)
        settings = [old if old == new else f"{old} -> {new}" for old, new in pairs]
        rows.append((each["change"], now["device"], now["function"], *settings))
    if rows:
        output.table(("", "Device", "Function", *plan_files.HEADINGS), rows)
    else:
        output.show("No differences found")


@command.command("diff")
@click.argument("plan", metavar="FILE|N")
@click.argument("other", metavar="[FILE|M]", required=False)
@declare.shows(_show_differences, fails=bool)
@flags.client
def diff(plan: str, other: str | None, client: Client) -> list[dict[str, Any]]:
    """
    Compare the plan in force with a file or a version, or two of them. It ends with 1 when they differ.

    Examples:
      gpufaas plan diff plan.yaml     what 'plan apply plan.yaml' would change
      gpufaas plan diff 3             what 'plan rollback 3' would change
      gpufaas plan diff 3 4
    """
    before, after = (None, plan) if other is None else (plan, other)
    return plan_files.differences(_replicas(before, client), _replicas(after, client))


def _replicas(plan: str | None, client: Client) -> list[dict[str, Any]]:
    if plan is None or plan.isdecimal():
        return client.plan(int(plan) if plan else None).get("replicas") or []
    with click.File("rb").convert(plan, None, None) as file:
        return plan_files.read(file)[1]


def _show_history(found: Sequence[Plan]) -> None:
    rows = [(str(each["version"]), _when(each), each.get("by") or "", str(len(each.get("replicas") or ())),
             " ".join(each.get("why", "").split())) for each in found]  # fmt: skip
    output.table(("Version", "Applied", "By", "Copies", "Why"), rows)


@command.command("history")
@declare.shows(_show_history)
@flags.client
def history(client: Client) -> list[Plan]:
    """
    List the versions of the plan that are kept, newest first. The first one is in force.

    Examples:
      gpufaas plan history
    """
    return client.plan_history()


@command.command("rollback")
@click.argument("version", type=click.IntRange(1))
@_base
@_applied
def rollback(version: int, base: int | None, client: Client) -> Plan:
    """
    Put an earlier version of the plan in force again, as a new version.

    Examples:
      gpufaas plan rollback 3
    """
    return client.roll_back_plan(version, base=base)


@command.command("pin")
@click.argument("function")
@click.argument("device")
@declare.option(
    "--share", type=click.IntRange(0, 100), default=0, says="Compute that it holds, and is capped at, in per cent."
)
@declare.option(
    "--reserve", type=click.IntRange(0, 100), default=0, says="Compute that counts as taken while it runs, uncapped."
)
@declare.option("--slots", type=click.IntRange(0), default=0, says="The most calls, or batches, that it runs at once.")
@declare.option("--batch", type=click.IntRange(0), default=0, says="The most calls of a batch.")
@flags.namespace
@_applied
def pin(function: str, device: str, namespace: str | None, client: Client, **how: int) -> Plan:
    """
    Keep a copy of a function on a device. Its other copies go, except where they are pinned, too.

    Examples:
      gpufaas plan pin digits local/cpu:0
      gpufaas plan pin digits local/cpu:0 --share 40 --slots 2
    """
    return client.pin(function, device, namespace, **how)


@command.command("unpin")
@click.argument("function")
@click.argument("device", required=False)
@flags.namespace
@_applied
def unpin(function: str, device: str | None, namespace: str | None, client: Client) -> Plan:
    """
    Take the pins of a function, or the one on DEVICE, out of the plan.

    Examples:
      gpufaas plan unpin digits
      gpufaas plan unpin digits local/cpu:0
    """
    return client.unpin(function, device, namespace)


@command.command("make")
@_applied
def make(client: Client) -> Plan:
    """
    Have the planner's solver make a plan from what runs now, and put it in force.

    Examples:
      gpufaas plan make
    """
    return client.make_plan()
