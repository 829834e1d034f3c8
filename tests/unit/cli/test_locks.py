"""Own versions of what the platform has, and the lock that keeps them. Wheels are made by hand."""

import hashlib
import re
import shutil
from dataclasses import replace as changed
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from msgspec.structs import replace
from tests.unit.cli.conftest import Project, Wheels, content_of
from tests.unit.cli.test_target import target, with_packages

from gpufaas_cli import requirements
from gpufaas_cli.build_target import BuildTarget
from gpufaas_cli.locks import read_lock
from gpufaas_core.bundle import Needs
from gpufaas_core.environment import Distribution, measure

PLATFORM = {"pyd": "2.14", "torch": "2.13.0+cpu", "core": "1"}
BUILDS_ITSELF = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """
import zipfile

def build_wheel(folder, *_):
    with zipfile.ZipFile(f"{folder}/lib-1-py3-none-any.whl", "w") as wheel:
        wheel.write("lib.py")
        wheel.writestr("lib-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: lib\\nVersion: 1\\n")
        wheel.writestr("lib-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("lib-1.dist-info/RECORD", "")
    return "lib-1-py3-none-any.whl"

build_editable = build_wheel
"""


def lock_of(project: Project) -> Path:
    return project.root / "fn/requirements.lock"


@pytest.fixture
def pyd(wheels: Wheels) -> None:
    wheels("pyd", "1.10")
    wheels("pyd", "2.14", requires=("core",))
    wheels("core", "1")
    wheels("old", "1.0", requires=("pyd<2", "torch"))


@pytest.mark.usefixtures("pyd")
@pytest.mark.parametrize("asked", ["pyd<2", "old"])
def test_a_function_brings_its_own_version_of_what_is_not_fixed_and_the_build_says_so(
    project: Project, asked: str
) -> None:
    project.write("fn/requirements.txt", f"{asked}\n")

    built = project.build(target=target(with_packages(PLATFORM)))

    assert "pyd==1.10" in built.manifest.requirements
    assert content_of(built)["site/pyd/__init__.py"] == b"VERSION = '1.10'\n"
    assert "brings its own pyd 1.10 (the platform has 2.14)" in project.said
    assert built.manifest.needs is not None
    assert built.manifest.needs.packages == (() if asked == "pyd<2" else ("torch",)), (
        "its own are not left to the nodes"
    )


def test_what_the_platform_has_stays_where_a_version_fits_it(project: Project, wheels: Wheels) -> None:
    wheels("wants", "1.0", requires=("pyd",))
    wheels("wants", "2.0", requires=("pyd<2",))
    wheels("pyd", "1.10")
    project.write("fn/requirements.txt", "wants\n")

    built = project.build(target=target(with_packages(PLATFORM)))

    assert built.manifest.requirements == ("wants==1.0",)


def test_what_fights_a_fixed_package_further_down_is_refused_and_told_the_way_out(
    project: Project, wheels: Wheels
) -> None:
    wheels("a", requires=("torch<2",))
    project.write("fn/requirements.txt", "a\n")

    message = project.refuse("torch<2.*python3-torch-image", target=target(with_packages(PLATFORM)))

    assert "\n" not in message


@pytest.mark.usefixtures("wheels")
@pytest.mark.parametrize("name", ["nowhere", "torch-nowhere"])
def test_a_requirement_that_is_nowhere_is_told_in_one_line_without_talk_of_images(project: Project, name: str) -> None:
    project.write("fn/requirements.txt", f"{name}==1\n")

    message = project.refuse(f"{name}==1.*package index", target=target(with_packages(PLATFORM)))

    assert "\n" not in message
    assert "image" not in message


def test_an_index_that_does_not_answer_is_asked_once(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, stand_in = tmp_path / "asked", tmp_path / "uv"
    stand_in.write_text(f"#!/bin/sh\necho asked >> {asked}\necho 'error: Failed to fetch: http://index'\nexit 2\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr("gpufaas_cli.resolvers.find_uv_bin", lambda: str(stand_in))
    project.write("fn/requirements.txt", "lib\n")

    project.refuse("Failed to fetch: http://index: check names", target=target(with_packages(PLATFORM)))

    assert asked.read_text() == "asked\n"


def test_wheels_are_taken_that_fit_the_nodes_older_c_library(project: Project, wheels: Wheels) -> None:
    here = measure()
    older = tuple(f"manylinux_2_{minor}_{here.markers['platform_machine']}" for minor in (17, 16, 5))
    wheels("a", "1.0", tag=f"{here.abi}-{here.abi}-{older[0]}")
    wheels("a", "2.0", tag=f"{here.abi}-{here.abi}-manylinux_2_28_{here.markers['platform_machine']}")
    project.write("fn/requirements.txt", "a\n")

    built = project.build(target=target(replace(with_packages({}), platforms=older)))

    assert built.manifest.requirements == ("a==1.0",)


# --- the lock ---


def test_a_lock_is_written_beside_the_requirements_and_keeps_versions_when_newer_ones_appear(
    project: Project, wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels("a", requires=("pyd<2", "torch"))
    wheels("pyd", "1.10")
    project.write("fn/requirements.txt", "a\n")
    platform = target(with_packages(PLATFORM))
    first = project.build(target=platform)
    wheels("a", "2.0")
    project.write("fn/handler.py", "def handle(event, context):\n    return 'edited'\n")
    monkeypatch.setattr(requirements, "resolve", None)

    again = project.build(target=platform)

    assert not again.up_to_date
    assert again.manifest.requirements == first.manifest.requirements == ("a==1.0", "pyd==1.10")
    assert again.manifest.needs == first.manifest.needs
    wheel = next((project.root / "wheels").glob("a-1.0-*"))
    assert (
        f"a==1.0 \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}" in lock_of(project).read_text()
    )
    assert not [name for name in content_of(again) if name.endswith("requirements.lock")]


def test_an_edit_of_the_requirements_keeps_the_other_versions_and_says_why_it_resolves(
    project: Project, wheels: Wheels
) -> None:
    for name in ("a", "b"):
        wheels(name)
    project.write("fn/requirements.txt", "a\n")
    project.build(target=target(with_packages({})))
    wheels("a", "2.0")
    project.write("fn/requirements.txt", "# both\na\nb\n")

    built = project.build(target=target(with_packages({})))

    assert built.manifest.requirements == ("a==1.0", "b==1.0")
    assert any("requirements.lock:2: requirements.txt has changed: resolving anew" in said for said in project.said)


def test_a_version_that_an_edit_rules_out_is_not_kept(project: Project, wheels: Wheels) -> None:
    wheels("a")
    wheels("b")
    project.write("fn/requirements.txt", "a\nb\n")
    project.build(target=target(with_packages({})))
    wheels("a", "2.0")
    project.write("fn/requirements.txt", "a>=2\nb\n")

    assert project.build(target=target(with_packages({}))).manifest.requirements == ("a==2.0", "b==1.0")


def test_a_lock_that_no_longer_fits_the_nodes_is_resolved_anew_and_the_reason_is_said(
    project: Project, wheels: Wheels
) -> None:
    wheels("a", requires=("b>=1",))
    wheels("b", "2.0")
    project.write("fn/requirements.txt", "a\n")
    project.build(target=target(with_packages({"b": "1.0"})))

    built = project.build(target=target(with_packages({})))

    assert built.manifest.requirements == ("a==1.0", "b==2.0")
    assert any("requirements.lock:2: it needs b>=1, and there is none: resolving anew" in each for each in project.said)


def test_a_comment_changes_no_lock(project: Project, wheels: Wheels) -> None:
    wheels("a")
    project.write("fn/requirements.txt", "a\n")
    project.build(target=target(with_packages({})))
    before = lock_of(project).stat().st_mtime_ns
    project.write("fn/requirements.txt", "# only this\na\n")
    project.build(target=target(with_packages({})))

    assert lock_of(project).stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (("a==1.0", "a==3.0"), r"lock:3: .*no version of a==3\.0"),
        (("a==1.0", "torch==1.0"), r"lock:3: .*torch was not found"),
        (("a==1.0", "a>=1.0"), r"lock:3: a>=1\.0 is not NAME==VERSION"),
        (("a==1.0", "two words"), r"lock:3: two words is not NAME==VERSION"),
        ((r"sha256:.{8}", "sha256:00000000"), r"lock:3: .*a==1\.0 cannot be installed"),
        ((r'\{"requirements', "{requirements"), r"lock:2: JSON is malformed"),
    ],
)
def test_a_lock_that_was_edited_wrongly_is_refused_with_the_line_and_the_command(
    project: Project, wheels: Wheels, edit: tuple[str, str], match: str
) -> None:
    wheels("a")
    project.write("fn/requirements.txt", "a<3\n")
    project.build(target=target(with_packages(PLATFORM)))
    lock_of(project).write_text(re.sub(*edit, lock_of(project).read_text(), count=1))

    message = project.refuse(match, target=target(with_packages(PLATFORM)))

    assert f"`rm {lock_of(project)}`" in message


def test_what_comes_from_a_folder_has_no_lock_and_is_part_of_the_key(project: Project, wheels: Wheels) -> None:
    wheels("a")
    shutil.copytree(project.root / "wheels", project.root / "fn/local")
    project.write("fn/requirements.txt", "./local/a-1.0-py3-none-any.whl\n")

    built = project.build(target=target(with_packages({})))

    assert content_of(built)["site/a/__init__.py"] == b"VERSION = '1.0'\n"
    assert not lock_of(project).exists()


@pytest.mark.usefixtures("wheels")
@pytest.mark.parametrize("line", ["./lib", "-e ./lib", "lib @ file://{root}/fn/lib"])
def test_a_folder_that_is_required_is_copied_as_it_is_now(project: Project, line: str) -> None:
    project.write("fn/lib/pyproject.toml", BUILDS_ITSELF)
    project.write("fn/lib/backend.py", BACKEND)
    project.write("fn/requirements.txt", line.format(root=project.root))
    for text in (b"1", b"2"):
        project.write("fn/lib/lib.py", text)

        assert content_of(project.build(target=target(with_packages({}))))["site/lib.py"] == text


def test_what_comes_from_a_url_is_locked_with_its_digest(
    project: Project, wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels("a")
    folder = partial(SimpleHTTPRequestHandler, directory=str(project.root / "wheels"))
    with ThreadingHTTPServer(("127.0.0.1", 0), folder) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a-1.0-py3-none-any.whl"
        project.write("fn/requirements.txt", f"a @ {url}\n")
        built = project.build(target=target(with_packages({})))
        project.write("fn/handler.py", "def handle(event, context):\n    return 'edited'\n")
        monkeypatch.setattr(requirements, "resolve", None)
        again = project.build(target=target(with_packages({})))
        server.shutdown()

    digest = hashlib.sha256((project.root / "wheels/a-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    assert f"a @ {url} \\\n    --hash=sha256:{digest}\n" in lock_of(project).read_text()
    assert content_of(built)["site/a/__init__.py"] == b"VERSION = '1.0'\n"
    assert (again.manifest.requirements, again.up_to_date) == (("a",), False)


def test_what_is_no_longer_asked_for_leaves_no_lock(project: Project, wheels: Wheels) -> None:
    wheels("a")
    project.write("fn/requirements.txt", "a\n")
    project.build(target=target(with_packages(PLATFORM)))
    project.write("fn/requirements.txt", "torch\n")
    project.build(target=target(with_packages(PLATFORM)))

    assert not lock_of(project).exists()


def test_the_key_is_of_what_is_installed(project: Project, wheels: Wheels) -> None:
    wheels("a")
    project.write("fn/requirements.txt", "a\n")
    project.build(target=target(with_packages({})))
    lock = read_lock(lock_of(project))

    assert lock is not None
    assert lock.needs == Needs(measure().python_minor)
    assert lock.key == changed(lock, is_read=False).key
    assert lock.key != changed(lock, inputs="manylinux_2_17_x86_64").key
    assert lock.key != changed(lock, pins=(lock.pins[0].replace("sha256:", "sha256:0"),)).key


def test_nothing_is_installed_that_differs_by_machine(project: Project, wheels: Wheels) -> None:
    wheels("a")
    project.write("fn/requirements.txt", "a\n")

    content = content_of(project.build(target=target(with_packages({}))))

    assert sorted(name for name in content if name.startswith("site/")) == [
        "site/a-1.0.dist-info/METADATA",
        "site/a-1.0.dist-info/RECORD",
        "site/a-1.0.dist-info/WHEEL",
        "site/a-1.0.dist-info/entry_points.txt",
        "site/a/__init__.py",
    ]
    assert b"bin/" not in content["site/a-1.0.dist-info/RECORD"]


def test_nodes_that_differ_get_the_functions_own_version(project: Project, wheels: Wheels) -> None:
    wheels("b", "2.0")
    project.write("fn/requirements.txt", "b>=2\n")

    built = project.build(target=target(with_packages({"b": "2.0"}), with_packages({"b": "1.0"})))

    assert built.manifest.requirements == ("b==2.0",)


def test_a_target_names_the_packages_that_it_has_fixed() -> None:
    own = replace(with_packages({"b": "1"}), fixed=("b",), distributions={"b": Distribution("1")})

    assert BuildTarget((own,), "here").shared.fixed == ("b",)
