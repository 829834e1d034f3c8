"""``python -m tests.soak``: see `tests.soak.soak`. Exits 1 if anything was violated."""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tests.soak.functions import FUNCTIONS
from tests.soak.place import DEVICE_MIB, DEVICES
from tests.soak.soak import RATE, Report, Soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SOAK_SECONDS") or 1200))
    parser.add_argument("--rate", type=float, default=RATE, help="calls per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cluster", action="store_true", help="of a cluster, whose nodes park; needs etcd")
    parser.add_argument("--json", type=Path, help="write what was seen there")
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="gpufaas-soak-") as home:
        soak = Soak(Path(home), options.seconds, rate=options.rate, seed=options.seed, cluster=options.cluster)
        columns = (TextColumn("soak"), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("deploys", total=options.seconds)
            report = soak.run(lambda at_s, said: bar.update(task, completed=at_s, description=said))
            bar.update(task, completed=options.seconds)
    show(console, report)
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_json(), indent=1))
    return 1 if report.violations else 0


def show(console: Console, report: Report) -> None:
    console.print(f"{report.seconds:g} s, {report.calls} calls, {DEVICES} devices of {DEVICE_MIB} MiB")
    table = Table()
    table.add_column("function")
    table.add_column("answered", justify="right")
    table.add_column("failed", justify="right")
    for each in FUNCTIONS:
        verdict = report.verdict
        table.add_row(each.name, str(verdict.answered[each.name]), str(verdict.failed[each.name] or ""))
    console.print(table)
    faults = Counter(each.what for each in report.faults)
    said = [f"{count} x {what}" for what, count in faults.items()]
    console.print(", ".join([*said, f"{report.updates} updates"]))
    console.print(
        f"{report.verdict.excused} calls failed by faults, {report.verdict.given_up} given up by their callers, "
        f"{report.verdict.again} asynchronous ones executed again; idle {report.idle_s:.1f} s after the last answer"
    )
    samples = report.samples
    if samples:
        workers_mib = max(each.workers_mib for each in samples)
        console.print(
            f"platform {samples[0].platform_mib:.0f} MiB at first, {samples[-1].platform_mib:.0f} at the end, at most "
            f"{max(each.platform_mib for each in samples):.0f}; descriptors {samples[0].files}, {samples[-1].files}, "
            f"{max(each.files for each in samples)}; workers at most {workers_mib:.0f} MiB"
        )
    for when in dict.fromkeys(each.when for each in report.memory):
        seen = [each for each in report.memory if each.when == when]
        figures = ((sum(getattr(each, name) for each in seen), name) for name in ("rss", "pss", "private", "heap"))
        console.print(f"{when}: " + ", ".join(f"{name} {mib:.0f} MiB" for mib, name in figures))
    for each in report.violations[:40]:
        console.print(f"✗ {each}", style="red", markup=False, highlight=False)
    console.print(f"✗ {len(report.violations)} violations" if report.violations else "✓ nothing lost, nothing wrong")


if __name__ == "__main__":
    sys.exit(main())
