"""``gpufaas top``: devices, the models that are resident on them, hits and misses."""

import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from gpufaas import DEFAULT_NAMESPACE, Client, GatewayUnreachable
from gpufaas_cli import declare, flags, output
from gpufaas_core.constraints import PLATFORM_LABELS
from gpufaas_core.model import ALL_COMPUTE
from gpufaas_core.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table

_BAR = 10  # so that all of it fits into 80 columns
_ENDLESS = 1000
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
    terminal = output.console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    shown = _render(client, terminal)
    if once or not terminal.is_terminal:
        terminal.print(shown)
        return
    _watch(client, terminal, interval, shown)


def _watch(client: Client, terminal: "Console", interval: float, shown: "RenderableType") -> None:
    from rich.live import Live

    try:
        with Live(shown, console=terminal, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                try:
                    shown = _render(client, terminal)
                except GatewayUnreachable as exc:
                    shown = f"{exc}\n\nStill trying; Ctrl-C ends."
                live.update(shown, refresh=True)
    except KeyboardInterrupt:
        pass


def _render(client: Client, terminal: "Console") -> "Group":
    status = client.status()
    try:
        return render_for(terminal, status, client.shown)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise GatewayUnreachable(f"{client.shown}/system/status is not what gpufaas sends: {exc!r}") from exc


def render_for(terminal: "Console", status: Mapping[str, Any], gateway: str) -> "Group":
    """Return what `render` does: the brief form where the tables do not fit into *terminal*."""
    from rich.text import Text

    whole = render(status, gateway)
    endless = terminal.options.update(max_width=_ENDLESS)
    tables = [each for each in whole.renderables if not isinstance(each, Text)]
    fits = all(terminal.measure(each, options=endless).maximum <= terminal.width for each in tables)
    return whole if fits else render(status, gateway, brief=True)


def render(status: Mapping[str, Any], gateway: str, *, brief: bool = False) -> "Group":
    """
    Return what people see of `EngineStatus` as JSON (core/gpufaas_core/model.py), with the gateway's names in it.

    :param brief: for a narrow terminal: without the default namespace, the name of the only node, bars and labels
    """
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
    head.append(output.format_age(status.get("age_s")), style="yellow")
    if (standbys := status.get("standbys")) and standbys["ready"]:
        head.append(f" · {standbys['ready']} standby, {format_bytes(standbys['memory'])}")
    if parked := sum(len(each.get("parked") or ()) for each in devices):
        head.append(f" · {parked} parked")
        if standbys:  # of this machine's own node
            head.append(f", {format_bytes(standbys.get('parkedMemory', 0))} beside weights")
    if standbys and (failed := standbys.get("wakesFailed")):
        head.append(f" · {failed} not woken", style="yellow")
    if standbys and standbys.get("layers"):
        head.append(f" · {standbys['layers']} preloaded, {format_bytes(standbys['layerMemory'])}")
    where = _Names(devices, brief)
    residents = _residents(devices, where, queued, running, status.get("functions") or {})
    parts: list[RenderableType] = [head, Text(), _devices(devices, where), Text(), residents]
    elsewhere = {name: count for name, count in queued.items() if name not in _resident_ids(devices)}
    if elsewhere:
        told = ", ".join(f"{where.name(function)} {count}" for function, count in sorted(elsewhere.items()))
        parts.append(Text(f"\nqueued, resident nowhere: {told}"))
    for name, counts in sorted((status.get("functions") or {}).items()):
        if counts.get("memory_advice"):
            parts.append(Text(f"\n{where.name(name)}: {counts['memory_advice']}", style="yellow"))
    return Group(*parts)


class _Names:
    """How devices and functions are called, in few columns if there are few."""

    def __init__(self, devices: list[dict[str, Any]], brief: bool) -> None:
        self.brief = brief
        self._node = len({each["device"]["id"].partition("/")[0] for each in devices}) > 1 or not brief

    def device(self, each: Mapping[str, Any]) -> str:
        name: str = each["device"]["id"]
        return name if self._node else name.partition("/")[2]

    def name(self, function: str) -> str:
        """``NAME.NAMESPACE`` of a revision."""
        name = _name(function)
        return name.removesuffix(f".{DEFAULT_NAMESPACE}") if self.brief else name


def _devices(devices: list[dict[str, Any]], where: _Names) -> "Table":
    kinds = any(each["device"]["kind"] != "cpu" for each in devices) and not where.brief
    labels = any(_own_labels(each) for each in devices) and not where.brief
    shares = _are_shared(devices)
    more = [*([">COMPUTE"] * shares), *(["KIND"] * kinds), *(["LABELS"] * labels)]
    bars = [] if where.brief else [""]
    table = _table("DEVICE", "MEMORY", *bars, "STATE", ">QUEUE", ">HITS", ">MISSES", ">EVICTED", *more)
    for each in devices:
        device, used = each["device"], each["used"]
        memory = f"{format_bytes(used)} / {format_bytes(device['memory'])}"
        state = f"busy {each['estimated_finish_s']:.1f} s" if each["busy"] else "idle"
        counts = (each["local_queue"], each["hits"], each["misses"], each["evictions"])
        of = "" if where.brief else f" / {device.get('compute', ALL_COMPUTE)}"
        compute = f"{each.get('reserved', 0)}{of} %"
        bars = [] if where.brief else [_bar(used, device["memory"])]
        more = [*([compute] * shares), *([device["kind"]] * kinds), *([_own_labels(each)] * labels)]
        table.add_row(where.device(each), memory, *bars, state, *map(str, counts), *more)
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
    """Return the labels that its operator gave it; --json has all."""
    labels = each["device"].get("labels") or {}
    return ", ".join(f"{key}={value}" for key, value in labels.items() if key not in PLATFORM_LABELS)


def _residents(
    devices: list[dict[str, Any]],
    where: _Names,
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
            states = ["loading"] * resident["loading"] or ["running"] * bool(resident["running"])
            states += ["draining"] * bool(resident.get("draining")) or ["pinned"] * resident["pinned"]
            shown[function] += 1
            number = f" {shown[function]}/{copies[function]}" if copies[function] > 1 else ""
            table.add_row(
                where.name(function) + number,
                where.device(each),
                format_bytes(resident["memory"]),
                *([f"{resident['share']} %" if resident.get("share") else "-"] * shares),
                ", ".join(states) or "resident",
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
