"""The packages of an environment, and whether they satisfy a bundle; independent of the Python that runs this."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from packaging import tags
from packaging.requirements import Requirement

from gpufaas_core.bundle import Needs
from gpufaas_core.environment import (
    Distribution,
    Environment,
    applies,
    grouped,
    installed,
    measure,
    misfits,
    required_by,
    supported_tags,
)


def environment(
    python: str = "3.11.7", platforms: tuple[str, ...] = ("linux_x86_64", "manylinux_2_31_x86_64"), **versions: str
) -> Environment:
    minor = python.rpartition(".")[0]
    return Environment(
        python=python,
        implementation="cp",
        abi=f"cp{minor.replace('.', '')}",
        platforms=platforms,
        markers={
            "python_version": minor, "python_full_version": python, "sys_platform": "linux", "os_name": "posix",
            "platform_machine": "x86_64", "platform_system": "Linux", "implementation_name": "cpython",
        },
        distributions={name.replace("_", "-"): Distribution(version) for name, version in versions.items()},
    )  # fmt: skip


MAC: Mapping[str, Any] = {"sys_platform": "darwin", "platform_machine": "arm64"}


@pytest.mark.parametrize(
    ("marker", "holds"),
    [
        ("python_version < '3.12'", True),
        ("python_version >= '3.12'", False),
        ("sys_platform == 'linux' and platform_machine == 'x86_64'", True),
        ("extra == 'gpu'", False),
        ("platform_release == 'x'", False),
    ],
)
def test_markers_are_evaluated_for_the_environment_that_is_described(marker: str, holds: bool) -> None:
    assert applies(Requirement(f"a; {marker}"), environment()) == holds
    assert applies(Requirement("a; sys_platform == 'darwin'"), replace(environment(), markers=dict(MAC)))
    assert not applies(Requirement(f"a; sys_platform == '{sys.platform}'"), replace(environment(), markers=dict(MAC)))


def test_what_a_package_requires_depends_on_the_extras_that_are_asked_for() -> None:
    requires = ("h11", "httptools; extra == 'standard'", "colorama; sys_platform == 'win32'", "not a requirement!")

    plain = list(required_by(Requirement("uvicorn"), environment(), requires))
    standard = list(required_by(Requirement("uvicorn[standard]"), environment(), requires))

    assert ([each.name for each in plain], [each.name for each in standard]) == (["h11"], ["h11", "httptools"])


@pytest.mark.parametrize(
    ("requirement", "met"),
    [
        ("torch", True),
        ("Torch>=2", True),
        ("torch==2.10.0", True),  # the local part of the installed version is not asked for
        ("torch==2.10.0+cu128", False),
        ("torch<2", False),
        ("scikit_learn>=1.7rc1", True),
        ("numpy", False),
        ("torch @ https://example.org/torch.whl", False),
    ],
)
def test_a_requirement_is_met_by_the_version_that_is_installed(requirement: str, met: bool) -> None:
    assert installed(Requirement(requirement), environment(torch="2.10.0+cpu", scikit_learn="1.7rc1")) == met


def test_the_tags_of_the_environment_here_are_those_of_this_python() -> None:
    assert supported_tags(measure()) == frozenset(map(str, tags.sys_tags()))


def test_a_bundle_fits_where_all_that_it_needs_is() -> None:
    needs = Needs(
        python="3.11",
        packages=("numpy>=2", "torch"),
        wheels={
            "a==1": ("cp311-cp311-manylinux_2_17_x86_64", "cp311-cp311-manylinux_2_31_x86_64"),
            "b==2": ("cp39-abi3-linux_x86_64",),
        },
    )

    assert misfits(needs, environment(numpy="2.1.0", torch="2.10.0")) == []


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (Needs(packages=("scikit-learn>=1.6",)), "it needs scikit-learn>=1.6, and there is none"),
        (Needs(packages=("numpy<2",)), "it needs numpy<2, and there is version 2.1.0"),
        (Needs(packages=("?!",)), "it needs '?!', which is no requirement"),
        (Needs(python="3.12"), "its packages were chosen for Python 3.12, and there is 3.11.7"),
        (
            Needs(python="3.11", wheels={"a==1": ("cp311-cp311-manylinux_2_39_x86_64",)}),
            "a==1 is a wheel for cp311-cp311-manylinux_2_39_x86_64, which cp311 on linux_x86_64 does not take",
        ),
        (
            Needs(python="3.11", wheels={"a==1": ("cp311-cp311-linux_aarch64",)}),
            "a==1 is a wheel for cp311-cp311-linux_aarch64, which cp311 on linux_x86_64 does not take",
        ),
        (Needs(wheels={"a==1": ()}), "a==1 is a wheel for nothing, which cp311 on linux_x86_64 does not take"),
    ],
)
def test_a_bundle_that_does_not_fit_says_what_is_missing(needs: Needs, reason: str) -> None:
    assert misfits(needs, environment(numpy="2.1.0")) == [reason]


@pytest.mark.parametrize("change", [{"platforms": []}, {"python": "three"}, {"python": "3"}])
def test_what_no_wheel_could_be_chosen_for_is_no_environment(change: dict[str, object]) -> None:
    said = {**msgspec.to_builtins(environment()), **change}

    with pytest.raises(msgspec.ValidationError, match="is no environment"):
        msgspec.convert(said, Environment)


def test_nodes_with_the_same_environment_are_one_group_and_the_largest_comes_first() -> None:
    old, new = environment(numpy="2.0.0"), environment(numpy="2.1.0")

    groups = grouped({"n3": new, "n1": old, "n2": new})

    assert [each.nodes for each in groups] == [("n2", "n3"), ("n1",)]
    assert groups[0].distributions["numpy"].version == "2.1.0"


def test_what_is_installed_while_a_node_runs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    before = measure()

    info = tmp_path / "late-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.5\nRequires-Dist: numpy>=1\n")

    assert "late" not in before.distributions
    assert measure().distributions["late"] == Distribution("1.5", ("numpy>=1",))
