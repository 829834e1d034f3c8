"""
Requirements are resolved against what the platform's nodes have, not against the Python that builds. Wheels are made
by hand, and what the other environment has is told: nothing is asked of an index, or installed here.
"""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.cli.conftest import Project, Run, Wheels, content_of
from tests.unit.cli.wire_log import Reply, WireLog
from tests.unit.core.test_environment import environment

from gpufaas_cli.build_target import BuildTarget
from gpufaas_core.bundle import Needs
from gpufaas_core.environment import Distribution, Environment, measure

OLD = ("linux_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
"""No machine that runs these tests with a CPU of x86 takes such wheels."""


def target(*environments: Environment) -> Callable[[], BuildTarget]:
    named = [replace(each, nodes=each.nodes or (f"n{number}",)) for number, each in enumerate(environments, 1)]
    return lambda: BuildTarget(tuple(named), "the platform at http://gateway")


def with_packages(packages: dict[str, str], **requires: tuple[str, ...]) -> Environment:
    """An environment with this Python and these *packages* only."""
    found = {name: Distribution(version, requires.get(name, ())) for name, version in packages.items()}
    return replace(measure(), distributions=found)


# --- what is provided ---


def test_a_client_without_torch_builds_for_a_platform_that_has_it(project: Project) -> None:
    """`no-torch` is not installed here, nor is it to be had; the nodes have it."""
    project.write("fn/requirements.txt", "no-torch>=2\nno-numpy\n")

    built = project.build(target=target(with_packages({"no-torch": "2.10.0+cpu", "no-numpy": "2.1"})))

    assert built.manifest.requirements == ()
    assert built.manifest.needs == Needs(packages=("no-numpy", "no-torch>=2"))


def test_what_only_the_client_has_goes_into_the_bundle(project: Project, wheels: Wheels) -> None:
    """pytest is installed here, for sure; the platform has none."""
    wheels("pytest", "99.0", requires=("pluggy>=1", "msgspec"))
    wheels("pluggy", "1.0")
    project.write("fn/requirements.txt", "pytest")

    built = project.build(target=target(with_packages({"msgspec": "0.22"})))

    assert built.manifest.requirements == ("pluggy==1.0", "pytest==99.0")
    assert {"site/pytest/__init__.py", "site/pluggy/__init__.py"} <= set(content_of(built))
    assert built.manifest.needs == Needs(python=measure().python_minor, packages=("msgspec",))


def test_extras_of_what_is_provided_are_looked_at(project: Project, wheels: Wheels) -> None:
    wheels("fast", "1.0")
    project.write("fn/requirements.txt", "web[standard]")
    has_web = with_packages({"web": "1.0"}, web=("fast>=1; extra == 'standard'", "never; extra == 'other'"))

    built = project.build(target=target(has_web))

    assert built.manifest.requirements == ("fast==1.0",)
    assert built.manifest.needs is not None
    assert built.manifest.needs.packages == ("web[standard]",)


def test_markers_are_those_of_the_nodes_also_where_packages_have_them(project: Project, wheels: Wheels) -> None:
    there = environment("3.12.1", OLD)
    there = replace(there, markers={**there.markers, "platform_machine": "aarch64"})
    wheels("a", requires=("b; platform_machine == 'aarch64'", "never; platform_machine == 'x86_64'"))
    wheels("b")
    project.write("fn/requirements.txt", "a; python_version == '3.12'\nnever; python_version != '3.12'\n")

    assert project.build(target=target(there)).manifest.requirements == ("a==1.0", "b==1.0")


# --- wheels for another machine ---


def test_wheels_are_chosen_for_the_nodes_python_and_platform(project: Project, wheels: Wheels) -> None:
    here = measure()
    wheels("a", "1.0", tag="cp312-cp312-manylinux_2_17_aarch64")
    wheels("a", "2.0", tag="cp312-cp312-manylinux_2_34_aarch64")  # of a newer C library than theirs
    wheels("a", "3.0", tag=f"{here.abi}-{here.abi}-linux_x86_64")
    wheels("a", "4.0", python=">=3.13")
    project.write("fn/requirements.txt", "a")

    built = project.build(target=target(environment("3.12.1", OLD)))

    assert built.manifest.requirements == ("a==1.0",)
    assert built.manifest.needs == Needs("3.12", wheels={"a==1.0": ("cp312-cp312-manylinux_2_17_aarch64",)})


def test_what_cannot_be_had_for_the_nodes_is_named_with_what_they_are(project: Project, wheels: Wheels) -> None:
    wheels("a", tag="cp312-cp312-manylinux_2_17_x86_64")
    project.write("fn/requirements.txt", "a")

    project.refuse(
        r"cannot be met with wheels beside .* \(node n1: Python 3\.12\.1 \(cp312, linux_aarch64\)\): .* a",
        target=target(environment("3.12.1", OLD)),
    )


# --- conflicts ---


def test_a_pin_against_the_nodes_version_names_both_and_the_nodes(project: Project) -> None:
    project.write("fn/requirements.txt", "torch==1.13\n")

    project.refuse(
        r"requirements\.txt:1: torch==1\.13 conflicts with torch 2\.10\.0, which the platform at http://gateway "
        r"provides \(node n1: Python .*\) and has loaded: ask for a range that has 2\.10\.0 in it",
        target=target(environment(torch="2.10.0")),
    )


def test_a_platform_without_torch_is_told_and_not_given_gigabytes(project: Project, wheels: Wheels) -> None:
    wheels("torch", "2.10.0")
    project.write("fn/requirements.txt", "torch")

    project.refuse(r"needs torch, .* not the platform at http://gateway \(node n1", target=target(with_packages({})))


# --- nodes that differ ---


def test_what_only_some_nodes_have_is_bundled_for_all(project: Project, wheels: Wheels) -> None:
    wheels("a", "1.5")
    project.write("fn/requirements.txt", "a\nb\n")

    built = project.build(target=target(with_packages({"a": "1.4", "b": "1"}), with_packages({"b": "2"})))

    assert built.manifest.requirements == ("a==1.5",)


def test_the_node_whose_version_does_not_fit_is_named(project: Project) -> None:
    project.write("fn/requirements.txt", "torch>=2")

    project.refuse(
        "torch>=2 conflicts with torch 1, .*node n2",
        target=target(with_packages({"torch": "2"}), with_packages({"torch": "1"})),
    )


def test_nodes_of_different_pythons_share_no_wheels(project: Project, wheels: Wheels) -> None:
    wheels("a")
    project.write("fn/requirements.txt", "a")

    message = project.refuse("no wheels fit all of them", target=target(environment("3.11.7"), environment("3.12.1")))

    assert "node n1: Python 3.11.7" in message
    assert "node n2: Python 3.12.1" in message


# --- built before ---


def test_a_bundle_is_built_again_when_the_platform_no_longer_fits(project: Project, wheels: Wheels) -> None:
    wheels("a", requires=("b",))
    wheels("b", "2.0")
    project.write("fn/requirements.txt", "a")
    has_b = target(with_packages({"b": "1.0"}))

    first = project.build(target=has_b)
    again = project.build(target=has_b)
    elsewhere = project.build(target=target(with_packages({})))

    assert (first.manifest.requirements, again.up_to_date) == (("a==1.0",), True)
    assert (elsewhere.manifest.requirements, elsewhere.up_to_date) == (("a==1.0", "b==2.0"), False)


def test_who_requires_nothing_asks_nobody(project: Project) -> None:
    def nobody() -> BuildTarget:
        raise AssertionError("asked")

    assert project.build(target=nobody).manifest.needs is None


# --- who is asked ---


@pytest.fixture
def stack(here: Path) -> Path:
    """One function that requires what is not installed here."""
    (here / "fn").mkdir()
    (here / "fn/handler.py").write_text("def handle(event, context):\n    return 'ok'\n")
    (here / "fn/requirements.txt").write_text("no-torch")
    (here / "stack.yaml").write_text(
        "version: 1.0\nprovider: {name: openfaas}\nfunctions:\n"
        "  fn: {lang: python3-http, handler: ./fn, image: fn, constraints: [zone=a], environment: {KEY: value}}\n"
    )
    return here


NO_PLATFORM = msgspec.json.encode([{**msgspec.to_builtins(measure()), "platforms": []}])


def answer_of(*environments: Environment) -> Reply:
    return Reply(body=msgspec.json.encode(environments), headers={"Content-Type": "application/json"})


def test_build_asks_the_gateway_for_the_nodes_of_the_function(stack: Path, wire: WireLog, run: Run) -> None:
    del stack
    wire.answer("POST", "/system/environments", answer_of(with_packages({"no-torch": "2"})))

    result = run("build", "--json")

    assert result.exit_code == 0, result.output
    [asked] = [each.json for each in wire.sent if each.path == "/system/environments"]
    assert (asked["service"], asked["constraints"]) == ("fn", ["zone=a"])
    assert "envVars" not in asked, "secrets may be among them"


def test_what_the_gateway_refuses_is_said_before_anything_is_built(stack: Path, wire: WireLog, run: Run) -> None:
    wire.answer("POST", "/system/environments", Reply(400, b"function fn can run on no device"))

    result = run("up")

    assert (result.exit_code, "fn can run on no device" in result.stderr) == (1, True)
    assert list((stack / "build").iterdir()) == []
    assert [each.method for each in wire.sent if "artifacts" in each.path or "functions" in each.path] == []


def test_a_conflict_with_the_nodes_is_named_before_anything_is_sent(stack: Path, wire: WireLog, run: Run) -> None:
    (stack / "fn/requirements.txt").write_text("numpy<2")
    wire.answer("POST", "/system/environments", answer_of(with_packages({"numpy": "2"})))

    result = run("up")

    assert (result.exit_code, "numpy<2 conflicts with numpy 2" in result.stderr) == (1, True)
    assert [each.method for each in wire.sent if "artifacts" in each.path] == []


@pytest.mark.usefixtures("wheels")
@pytest.mark.parametrize(
    ("arguments", "reply", "why"),
    [
        (("--offline",), None, "--offline"),
        (("-g", "http://127.0.0.1:9"), None, "no gateway answers at http://127.0.0.1:9"),
        ((), Reply(404, b"404 page not found"), "does not say what its nodes provide"),
        ((), Reply(401), "does not let us in (401)"),
        ((), Reply(200, b"[]"), "does not say what its nodes provide, no node answers"),
        ((), Reply(200, NO_PLATFORM, {"Content-Type": "application/json"}), "is no gpufaas gateway"),
    ],
)
def test_where_nobody_says_it_the_clients_packages_are_taken_and_that_is_said(
    stack: Path, wire: WireLog, run: Run, arguments: tuple[str, ...], reply: Reply | None, why: str
) -> None:
    (stack / "fn/requirements.txt").write_text("msgspec")
    if reply is not None:
        wire.answer("POST", "/system/environments", reply)

    result = run("build", *arguments)

    assert result.exit_code == 0, result.output
    assert why in result.stderr
    assert "the nodes are assumed to have the packages of this Python environment" in result.stderr
    assert "the deployment checks that" in result.stderr


def test_functions_that_are_built_at_once_ask_too(stack: Path, wire: WireLog, run: Run) -> None:
    text = (stack / "stack.yaml").read_text()
    (stack / "stack.yaml").write_text(text + text.splitlines()[-1].replace("fn:", "other:") + "\n")
    wire.answer("POST", "/system/environments", answer_of(with_packages({"no-torch": "2"})))

    result = run("build", "--parallel", "2", "--json")

    assert result.exit_code == 0, result.output
    assert sorted(each["name"] for each in json.loads(result.stdout)) == ["fn", "other"]


def test_a_node_is_described_with_what_it_provides(wire: WireLog, run: Run) -> None:
    about = {
        "name": "n1",
        "state": "ready",
        "address": "",
        "version": "",
        "joinedSeconds": 0,
        "note": "",
        "devices": [],
    }
    wire.answer("GET", "/system/nodes/n1", about)
    one = replace(environment(torch="2.10.0+cpu", rich="14.0"), nodes=("n1",))
    wire.answer("GET", "/system/environments", answer_of(one, replace(environment("3.12.1"), nodes=("n2",))))

    shown = run("node", "describe", "n1").stdout

    assert "Provides: Python 3.11.7 (cp311, linux_x86_64), torch 2.10.0+cpu, 2 packages" in shown
    assert "3.12.1" not in shown
