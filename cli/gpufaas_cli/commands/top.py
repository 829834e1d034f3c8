"""``gpufaas top``: devices, the models that are resident on them, hits and misses."""

import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from gpufaas import Client, GatewayUnreachable
from gpufaas_cli import declare, flags, output
from gpufaas_core.constraints import PLATFORM_LABELS
from gpufaas_core.model import ALL_COMPUTE
from gpufaas_core.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

_BAR = 10  # so that all of it fits into 80 columns
_PIPE_WIDTH = 200  # nothing is cut off for what reads a pipe
_FULL = 0.9  # of a device: from here on the bar is yellow, since the next model will push one out


@declare.command("top")
@click.option("--once", is_flag=True, help="Show it once, and end.")
@click.option("--interval", type=click.FloatRange(0.1), default=1.0, show_default=True, metavar="SECONDS",
              help="Between looks.")  # fmt: skip
@declare.as_json
@flags.client
def command(once: bool, interval: float, as_json: bool, client: Client) -> None:
    """
    Watch the devices: memory, what is resident, hits, misses, evictions and queues. Ctrl-C ends it.

    Examples:
      gpufaas top
      gpufaas top --once
      gpufaas top --json | jq '.devices[].resident[].name'
    """
    if as_json:
        output.show_json(client.status())
        return
    shown = _render(client)
    terminal = output.console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    if once or not terminal.is_terminal:
        terminal.print(shown)
        return
    _watch(client, interval, shown)


def _watch(client: Client, interval: float, shown: "RenderableType") -> None:
    from rich.live import Live

    try:
        with Live(shown, console=output.console(), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                try:
                    shown = _render(client)
                except GatewayUnreachable as exc:
                    shown = f"{exc}\n\nStill trying; Ctrl-C ends."
                live.update(shown, refresh=True)
    except KeyboardInterrupt:
        pass


def _render(client: Client) -> "Group":
    status = client.status()
    try:
        return render(status, client.shown)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise GatewayUnreachable(f"{client.shown}/system/status is not what gpufaas sends: {exc!r}") from exc


def render(status: Mapping[str, Any], gateway: str) -> "Group":
    """Return what people see of `EngineStatus` as JSON (core/gpufaas_core/model.py), with the gateway's names in it."""
    from rich.console import Group
    from rich.text import Text

    devices, queued, running = status["devices"], status.get("queued") or {}, status.get("running") or {}
    waiting, calls = sum(queued.values()), sum(running.values())
    served, hits = sum(each["served"] for each in devices), sum(each["hits"] for each in devices)
    share = f" · {hits / (hits + sum(each['misses'] for each in devices)):.0%} hits" if served else ""
    head = Text(
        f"{gateway} · policy {status['policy']} · {calls} running · {waiting} queued · {served} served{share}",
        style="bold",
    )
    residents = _residents(devices, queued, running, status.get("functions") or {})
    parts: list[RenderableType] = [head, Text(), _devices(devices), Text(), residents]
    elsewhere = {name: count for name, count in queued.items() if name not in _resident_ids(devices)}
    if elsewhere:
        told = ", ".join(f"{_name(function)} {count}" for function, count in sorted(elsewhere.items()))
        parts.append(Text(f"\nqueued, resident nowhere: {told}"))
    return Group(*parts)


def _devices(devices: list[dict[str, Any]]) -> "Table":
    kinds = any(each["device"]["kind"] != "cpu" for each in devices)
    labels = any(_own_labels(each) for each in devices)
    shares = _are_shared(devices)
    more = [*([">COMPUTE"] * shares), *(["KIND"] * kinds), *(["LABELS"] * labels)]
    table = _table("DEVICE", "MEMORY", "", "STATE", ">QUEUE", ">HITS", ">MISSES", ">EVICTED", *more)
    for each in devices:
        device, used = each["device"], each["used"]
        memory = f"{format_bytes(used)} / {format_bytes(device['memory'])}"
        state = f"busy {each['estimated_finish_s']:.1f} s" if each["busy"] else "idle"
        counts = (each["local_queue"], each["hits"], each["misses"], each["evictions"])
        compute = f"{each.get('reserved', 0)} / {device.get('compute', ALL_COMPUTE)} %"
        more = [*([compute] * shares), *([device["kind"]] * kinds), *([_own_labels(each)] * labels)]
        table.add_row(device["id"], memory, _bar(used, device["memory"]), state, *map(str, counts), *more)
    return table


def _are_shared(devices: list[dict[str, Any]]) -> bool:
    """Whether a copy holds a share of a device, or calls run that leave a part of one to others."""
    return any(
        0 < each.get("reserved", 0) < each["device"].get("compute", ALL_COMPUTE) or _has_shares(each)
        for each in devices
    )  # fmt: skip


def _has_shares(each: Mapping[str, Any]) -> bool:
    return any(resident.get("share") for resident in each["resident"])


def _own_labels(each: Mapping[str, Any]) -> str:
    """Those that its operator gave it; --json has all."""
    labels = each["device"].get("labels") or {}
    return ", ".join(f"{key}={value}" for key, value in labels.items() if key not in PLATFORM_LABELS)


def _residents(
    devices: list[dict[str, Any]],
    queued: Mapping[str, int],
    running: Mapping[str, int],
    functions: Mapping[str, Mapping[str, Any]],
) -> "Table":
    shares = any(map(_has_shares, devices))
    batched = {name: _batch(counts) for name, counts in functions.items() if counts.get("batch_max", 1) > 1}
    batches = any(_name(each) in batched for each in _resident_ids(devices))
    table = _table(
        "COPY", "DEVICE", ">MEMORY", *([">SHARE"] * shares), "STATE", ">RUNNING", *([">BATCH"] * batches), ">QUEUED"
    )
    copies = Counter(resident["function"] for each in devices for resident in each["resident"])
    shown: Counter[str] = Counter()
    for each in devices:
        # The most recently used first: the last of a device is the next to go.
        for resident in reversed(each["resident"]):
            function = resident["function"]
            state = "loading" if resident["loading"] else "running" if resident["running"] else "resident"
            shown[function] += 1
            number = f" {shown[function]}/{copies[function]}" if copies[function] > 1 else ""
            table.add_row(
                (resident.get("name") or _name(function)) + number,
                each["device"]["id"],
                format_bytes(resident["memory"]),
                *([f"{resident['share']} %" if resident.get("share") else "-"] * shares),
                state + (", draining" if resident.get("draining") else ", pinned" if resident["pinned"] else ""),
                str(resident["running"]),
                *([batched.get(_name(function), "-")] * batches),
                str(queued.get(function, 0)) if shown[function] == 1 else "-",  # they wait for any of its copies
            )
    if not table.row_count:
        table.add_row("nothing: the next call of any function loads it", "", "", "", str(sum(running.values())), "")
    return table


def _batch(counts: Mapping[str, Any]) -> str:
    """Return the mean size of a function's batches since the gateway started, the most calls, and how full that is."""
    most, grants = int(counts["batch_max"]), float(counts["grants"])
    if not grants:
        return f"up to {most}"
    mean = (counts["hits"] + counts["misses"]) / grants
    return f"{mean:.1f}/{most} {mean / most:.0%}"


def _table(*headings: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for each in headings:
        table.add_column(each.removeprefix(">"), justify="right" if each.startswith(">") else "left", no_wrap=True)
    return table


def _bar(used: int, total: int) -> str:
    share = min(1.0, used / total) if total else 0.0
    full = round(share * _BAR)
    return f"[{'yellow' if share >= _FULL else 'green'}]{'█' * full}[/][dim]{'░' * (_BAR - full)}[/]"


def _name(function: str) -> str:
    """``NAME.NAMESPACE`` of a revision."""
    return function.partition("@")[0]


def _resident_ids(devices: list[dict[str, Any]]) -> set[str]:
    return {resident["function"] for each in devices for resident in each["resident"]}
