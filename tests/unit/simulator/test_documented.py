"""docs/simulator.md is true."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

from gpufaas_simulator import entries
from gpufaas_simulator.workload import TimedChange

Run = Callable[..., Result]

DOCUMENT = (Path(__file__).parents[3] / "docs" / "simulator.md").read_text()


def block(heading: str) -> str:
    found = re.search(rf"### {re.escape(heading)}\n.*?```json\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_decision_log_of_the_workload_in_the_document_is_the_one_beside_it(run: Run, tmp_path: Path) -> None:
    workload, decisions = tmp_path / "w.json", tmp_path / "d.jsonl"
    workload.write_text(block("W.json"))

    done = run("simulate", "--workload", workload, "--policy", "lalb-o3", "--decisions", decisions)

    assert done.exit_code == 0
    assert decisions.read_text() == block("D.jsonl")


def test_the_example_of_functions_beside_each_other_is_what_the_command_shows(run: Run, tmp_path: Path) -> None:
    workload, decisions = tmp_path / "beside.json", tmp_path / "d.jsonl"
    workload.write_text(block("beside.json"))

    done = run("simulate", "--workload", workload, "--policy", "lalb-o3", "--decisions", decisions)

    assert done.exit_code == 0
    found = re.search(r"```console\n\$ [^\n]*beside.json[^\n]*\n(.*?)\$ cat d.jsonl\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found is not None
    shown = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
    title = [line.strip() for line in shown].index("lalb-o3")  # the path of the file is above it
    assert shown[title:] == found[1].splitlines()
    assert decisions.read_text() == found[2]


def test_every_key_of_a_line_is_in_the_table() -> None:
    for line in block("D.jsonl").splitlines():
        for key in json.loads(line):
            assert f"| `{key}` |" in DOCUMENT


def test_every_key_and_event_of_a_workload_is_documented() -> None:
    for name in ("File", "Device", "Cost", "Planned", "Function", "Node", "Offer", "Update"):
        entry = getattr(entries, f"{name}Entry")
        for key in entry.__struct_encode_fields__:
            assert re.search(rf"`{key}`|\"{key}\"", DOCUMENT), key
    for change in TimedChange.__subclasses__():
        assert f"| `{change.__struct_config__.tag}` |" in DOCUMENT
