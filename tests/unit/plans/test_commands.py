"""``gpufaas solve`` as it is used: exit codes, output, the examples of the documentation; and in another process."""

import asyncio
import importlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpufaas_cli.commands import solve as solve_command
from gpufaas_cli.main import cli
from gpufaas_core.errors import DeadlineExceeded
from gpufaas_scheduler import solving
from gpufaas_scheduler.plans import PLANS, problem
from gpufaas_scheduler.plans.placement import compute
from gpufaas_scheduler.plans.problem import BadProblem

DOCS = Path(__file__).parents[3] / "docs" / "planning.md"


def examples() -> dict[str, str]:
    """Return the first problem of each section of the page."""
    found = re.findall(r"^## `solve (\w+)`.*?```json\n(.*?)```", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    return dict(found)


def run(*args: str, stdin: str = "") -> Result:
    return CliRunner().invoke(cli, ["solve", *args], input=stdin)


def test_the_command_names_every_policy() -> None:
    """It names them itself, so that help does not import the solvers."""
    assert tuple(compute.POLICIES) == solve_command._POLICIES


def test_every_plan_is_documented_with_a_problem() -> None:
    assert set(examples()) == set(PLANS)


@pytest.mark.parametrize("name", PLANS)
def test_the_documented_problems_are_answered(name: str) -> None:
    policy = ["--policy", "usher"] if name in ("compute", "size") else []
    plain, as_json = (run(name, "-", *policy, *more, stdin=examples()[name]) for more in ((), ("--json", "--explain")))

    assert (plain.exit_code, as_json.exit_code) == (0, 0), plain.output + as_json.output
    assert plain.output.strip()
    assert json.loads(as_json.output)["explanation"]


@pytest.mark.parametrize("name", PLANS)
def test_a_bad_problem_is_one_line_and_exit_code_2(name: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"what": 1}')

    for result in (run(name, "-", stdin="{"), run(name, str(tmp_path / "bad.json")), run(name, str(tmp_path / "none"))):
        assert result.exit_code == 2
        assert len(result.output.strip().splitlines()) == 1
    assert "bad.json:1: unknown key 'what': there are " in run(name, str(tmp_path / "bad.json")).output


def spoilt(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield *value* with one thing wrong in it, and where: a key that is not known, or missing, or something else."""
    yield where, [[]]
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
        yield where, {**value, "no such key": 1}
    elif isinstance(value, list):
        inner = enumerate(value)
    for step, below in inner:
        for at, changed in spoilt(below, str(step)):
            copy = value.copy()
            copy[step] = changed
            yield at, copy


@pytest.mark.parametrize("name", PLANS)
def test_whatever_is_wrong_is_said_in_our_words_with_its_line(name: str) -> None:
    kind = importlib.import_module(f"gpufaas_scheduler.plans.{PLANS[name]}").Problem
    said = set()
    for where, spoilt_problem in spoilt(json.loads(examples()[name])):
        try:
            problem.read(json.dumps(spoilt_problem, indent=1), kind, "p.json")
        except BadProblem as exc:
            message = str(exc)
            assert where in message
            assert re.match(r"p\.json:\d+: ", message) or re.search("`|profile", message)  # it is not one place
            assert not re.search(r"Expected `|Object |Invalid ", message), message
            said.add(message)

    assert len(said) > 10


HARDWARE = '{"n": 1, "slo_ms": 200, "types": [{"name": "a", "price": 1, "kind": "cpu", "solo_ms": 1, "batch": 1}]}'


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (b"", "stdin:1: this is not JSON: Expecting value"),
        ('{"n": 1, "é": 2}'.encode("latin-1"), "it is not UTF-8"),
        (HARDWARE.replace('"n": 1', '"n": 1, "n": 2').encode(), "two keys of one object are called 'n'"),
        (HARDWARE.replace('"n": 1', '"n": "1"').encode(), 'stdin:1: n is "1": write a whole number, 0 or more'),
        (HARDWARE.replace('"n": 1', '"n": true').encode(), "n is true: write a whole number, 0 or more"),
        (HARDWARE.replace("200", "NaN").encode(), "stdin:1: this is not JSON: a number or a character is none of JSON"),
        (HARDWARE.replace("200", "1e999").encode(), "slo_ms is Infinity: write a number, more than 0"),
        (HARDWARE.replace("200", "1e300").encode(), "1e300 is out of range"),
        (HARDWARE.replace('"n": 1', '"n": 1' + "0" * 30).encode(), "out of range"),
        (HARDWARE.replace('"n": 1', '"n": 1' + "0" * 9999).encode(), f"n is 1{'0' * 59}…: write a whole number"),
    ],
)
def test_bytes_and_numbers_that_no_problem_has_are_refused(problem: bytes, said: str) -> None:
    result = CliRunner().invoke(cli, ["solve", "hardware", "-"], input=problem)

    assert (result.exit_code, len(result.output.strip().splitlines())) == (2, 1)
    assert said in result.output


@pytest.mark.parametrize("later", ["NaN", '{"x": 1}', '"\\ud800"'])
def test_a_key_is_found_whatever_else_is_wrong_behind_it(later: str) -> None:
    asked = {"kinds": {"a": {"price": 1}, "b": 1, "c": 1}, "models": {"m": "here"}}
    kind = importlib.import_module("gpufaas_scheduler.plans.placement.size").Problem

    with pytest.raises(BadProblem, match=r"^p.json:1: kinds.b is 1: write an object$"):
        problem.read(json.dumps(asked).replace('"here"', later), kind, "p.json")


def test_an_infeasible_problem_ends_well() -> None:
    variants = {"load": 9, "slo_ms": 1, "variants": [{"name": "a", "cost": 1, "qps": 1, "latency_ms": 5}]}
    result = run("variants", "-", "--json", stdin=json.dumps(variants))

    assert result.exit_code == 0
    assert set(json.loads(result.output)) == {"infeasible"}


def test_the_same_problem_has_the_same_answer() -> None:
    first, second = (run("compute", "-", "--json", stdin=examples()["compute"]).output for _ in range(2))

    assert first == second


def test_another_process_gives_the_same_answer() -> None:
    problem = examples()["hardware"]

    answer = asyncio.run(solving.solve("hardware", problem.encode(), limit=60))

    assert json.loads(answer) == json.loads(run("hardware", "-", "--json", stdin=problem).output)


def test_another_process_says_what_is_wrong_with_a_problem() -> None:
    with pytest.raises(BadProblem, match="n is missing: write a whole number, 0 or more"):
        asyncio.run(solving.solve("hardware", b"{}", limit=60))


def test_another_process_is_killed_when_its_time_is_over() -> None:
    with pytest.raises(DeadlineExceeded, match="no answer after"):
        asyncio.run(solving.solve("hardware", examples()["hardware"].encode(), limit=0.01))
