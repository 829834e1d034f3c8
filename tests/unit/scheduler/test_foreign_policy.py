"""A policy from outside the package: the guide's example, in a distribution of its own, found by its entry point."""

import re
import sys
from pathlib import Path

import pytest

from gpufaas_core.errors import InvalidSpec
from gpufaas_scheduler.policies import make_policy
from gpufaas_scheduler.policies.registry import described
from gpufaas_simulator.run import engine_header, simulate
from gpufaas_simulator.synthetic import make_workload

GUIDE = Path(__file__).parents[3] / "docs" / "writing-a-policy.md"


def install(
    folder: Path, name: str, entry: str, source: str, monkeypatch: pytest.MonkeyPatch, group: str = "gpufaas.policies"
) -> None:
    """What `pip install` leaves behind: the module, and metadata that names the entry point."""
    module = entry.partition(":")[0]
    (folder / f"{module}.py").write_text(source)
    metadata = folder / f"{module}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {entry}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)


def test_the_guide_s_example_runs_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(example.splitlines()) <= 30
    install(tmp_path, "longest-queue", "longest_queue:LongestQueue", example, monkeypatch)
    workload = make_workload(working_set=8, rpm=120, minutes=1)

    record, report = simulate(workload, engine_header("longest-queue"), explain=20)

    assert report.policy == "longest-queue"
    assert report.completed == 120
    assert record.explanation is not None
    assert "waited, the most of all" in record.explanation.rule


def test_serve_takes_a_policy_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from gpufaas_apps.options import ServeOptions
    from gpufaas_cli.main import cli

    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    install(tmp_path, "longest-queue", "longest_queue:LongestQueue", example, monkeypatch)
    served: list[ServeOptions] = []
    monkeypatch.setattr("gpufaas_apps.serve.run", served.append)

    done = CliRunner().invoke(
        cli, ["serve", "--policy", "longest-queue+replacement=cost-aware", "--data", str(tmp_path)]
    )

    assert done.exit_code == 0, done.output
    assert str(served[0].policy) == "longest-queue+replacement=cost-aware"
    with pytest.raises(
        InvalidSpec, match="longest-queue is order and placement in one, so placement cannot be combined"
    ):
        make_policy("longest-queue+placement=locality")


PLACEMENT = """
from typing import Annotated
from msgspec import Meta, Struct
from gpufaas_scheduler.policies import start_on

class Spread:
    '''The least used device that has room for it.'''

    class Options(Struct):
        devices: Annotated[int, Meta(ge=1, description="how many are compared")] = 16

    def __init__(self, options):
        self.devices = options.devices

    def place(self, view, call, device):
        with_room = (each for each in view.least_used(call.owner, self.devices) if view.fits(each, call))
        return next((start_on(each, call) for each in with_room), None)
"""


def test_a_role_from_outside_is_combined_with_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "spread", "spread:Spread", PLACEMENT, monkeypatch, "gpufaas.policies.placement")
    workload = make_workload(working_set=8, rpm=120, minutes=1)

    _, report = simulate(workload, engine_header("lalb-o3:o3_limit=5+placement=spread:devices=4"))

    assert (report.policy, report.completed) == ("lalb-o3:o3_limit=5+placement=spread:devices=4", 120)
    assert any(each.name == "spread" and each.options[0][2] == "16" for each in described())
    with pytest.raises(InvalidSpec, match="spread: devices is a whole number, 1 or more, not '0'"):
        make_policy("lb+placement=spread:devices=0")
    with pytest.raises(
        InvalidSpec, match=r"no placement is called 'nowhere': choose one of anywhere, locality.*spread"
    ):
        make_policy("lb+placement=nowhere")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ImportError('no such thing')", "cannot be made: ImportError: no such thing"),
        ("class Broken:\n    name = 'broken'\n", "has no plan"),
    ],
)
def test_a_broken_policy_is_named_in_one_line(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "broken", "broken_policy:Broken", source, monkeypatch)

    with pytest.raises(InvalidSpec, match=message):
        make_policy("broken")
