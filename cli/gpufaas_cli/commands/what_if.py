"""``gpufaas what-if``: what other devices, another policy or more calls would have made of recorded ones."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from gpufaas_cli import declare, output, simulations
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import DeviceId
from gpufaas_core.units import parse_bytes
from gpufaas_scheduler.policies import PolicySpec, policy_spec

if TYPE_CHECKING:
    from gpufaas_simulator.workload import SimulatedDevice, Workload


@declare.command("what-if")
@declare.option("--journal", required=True, type=click.Path(path_type=Path), metavar="FILE",
                says="Journal that gpufaas serve --journal wrote.")  # fmt: skip
@declare.option("--add-device", "added", multiple=True, metavar="[KIND=]SIZE",
                says="One more device, as 24GiB; of the most frequent kind unless one is named. "
                "Repeatable.")  # fmt: skip
@declare.option("--remove-device", "removed", multiple=True, metavar="ID", says="Without this device. Repeatable.")
@declare.option("--policy", callback=declare.parsed(policy_spec), metavar="SPEC",
                says="Instead of the recorded one, as in lalb-o3:o3_limit=10; gpufaas policies lists them."
                )  # fmt: skip
@declare.option("--rate", type=click.FloatRange(0, min_open=True), default=1.0, metavar="FACTOR",
                says="The same calls, so many times as fast after each other.")  # fmt: skip
@declare.as_json
def command(
    journal: Path,
    added: tuple[str, ...],
    removed: tuple[str, ...],
    policy: PolicySpec | None,
    rate: float,
    as_json: bool,
) -> None:
    """
    Answer from a recorded journal what would have been otherwise.

    Shows the calls as they were recorded, the simulation of the same cluster beside it (how far it can be trusted), and
    the simulation with the changes. Each call takes what it took then, where all devices are of one kind; else, and for
    loads, it is the mean of what was measured.

    Examples:
      gpufaas serve --journal events.jsonl       record; each event of the scheduler is a line
      gpufaas what-if --journal events.jsonl --add-device 24GiB --add-device 24GiB
      gpufaas what-if --journal events.jsonl --remove-device local/cuda:1 --json
      gpufaas what-if --journal events.jsonl --policy lalb-o3:o3_limit=10 --rate 2
    """
    with simulations.installed("what-if"):
        from gpufaas_simulator.recorded import read_journal
        from gpufaas_simulator.report import report
        from gpufaas_simulator.run import simulate
        from gpufaas_simulator.workload import BadWorkload
    try:
        recorded = read_journal(journal)
    except BadWorkload:
        raise
    except InvalidSpec as exc:
        raise BadWorkload(str(exc)) from exc
    header = recorded.header if policy is None else msgspec.structs.replace(recorded.header, policy=policy)
    changed = _changed(recorded.workload, added, removed, rate)
    found = {"recorded": report(recorded.record, str(recorded.header.policy))}
    anything = changed is not recorded.workload or header != recorded.header
    calls = max(1, len(changed))
    with output.progress_bar("simulating", 2 * calls) as tell:
        found["simulated"] = simulate(
            recorded.workload, recorded.header, progress=lambda ended: tell(ended, "as recorded")
        )[1]
        if anything:
            found["what if"] = simulate(changed, header, progress=lambda ended: tell(calls + ended, "what if"))[1]
    if as_json:
        output.show_json({name.replace(" ", "_"): msgspec.to_builtins(each) for name, each in found.items()})
        return
    simulations.show_reports(found, f"{journal}: {len(recorded.workload)} calls")


def _changed(workload: "Workload", added: tuple[str, ...], removed: tuple[str, ...], rate: float) -> "Workload":
    from array import array

    from gpufaas_simulator.workload import DeviceJoins, DeviceLeaves, all_fit

    there = [each.id for each in workload.all_devices]
    for device in removed:
        if device not in there:
            raise click.UsageError(f"--remove-device: there is no device {device!r}: choose one of {', '.join(there)}")
    if not (added or removed or rate != 1.0):
        return workload
    new = [_device(text, number, workload) for number, text in enumerate(added)]
    one_kind = len({each.kind for each in (*workload.all_devices, *new)}) == 1
    changes = []
    for change in workload.changes:
        of = change.device.id if isinstance(change, DeviceJoins) else getattr(change, "device", None)
        if isinstance(change, DeviceJoins | DeviceLeaves) and of in removed:
            continue
        changes.append(msgspec.structs.replace(change, at_s=change.at_s / rate))
    return all_fit(
        replace(
            workload,
            devices=[*(each for each in workload.devices if each.id not in removed), *new],
            times=array("d", [time / rate for time in workload.times]),
            changes=changes,
            service_s=workload.service_s if one_kind else None,
        )
    )


def _device(text: str, number: int, workload: "Workload") -> "SimulatedDevice":
    from gpufaas_simulator.workload import SimulatedDevice

    kinds = Counter(each.kind for each in workload.all_devices)
    kind, _, size = text.rpartition("=")
    try:
        memory = parse_bytes(size)
    except InvalidSpec as exc:
        raise click.UsageError(f"--add-device {text}: {exc}") from exc
    kind = kind or kinds.most_common(1)[0][0]
    known = {name for function in workload.functions for name in function.costs}
    if kind not in known and "*" not in known:
        raise click.UsageError(
            f"--add-device {text}: nothing was measured on devices of kind {kind!r}: choose one of {', '.join(kinds)}"
        )
    return SimulatedDevice(DeviceId(f"added/{kind}:{number}"), memory, kind, f"added-{number}")
