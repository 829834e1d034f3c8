"""
What a requirements.txt may say beside names: other files, constraints, digests, repositories. Wheels are made by hand,
and no index is asked.
"""

import hashlib
from pathlib import Path

import pytest
from tests.unit.cli.conftest import Project, Wheels, content_of

from gpufaas_cli.requirement_files import read_requirements
from gpufaas_core.environment import measure
from gpufaas_core.errors import InvalidSpec


@pytest.fixture
def shared(project: Project) -> Path:
    """Requirements beside the functions, which several of them include."""
    project.write("fn/requirements.txt", "-r ../shared.txt\n")
    return project.write("shared.txt", "numpy\n")


def test_what_an_included_file_asks_for_is_checked_with_its_own_line(project: Project, shared: Path) -> None:
    shared.write_text("# ours\nnumpy==1.0\n")

    project.refuse(r"fn/\.\./shared\.txt:2: numpy==1\.0 conflicts with numpy ")


def test_a_bundle_says_that_it_needs_what_an_included_file_asks_for(project: Project, shared: Path) -> None:
    del shared
    needs = project.build().manifest.needs

    assert needs is not None
    assert needs.packages == ("numpy",)


def test_a_bundle_is_built_again_when_an_included_file_has_changed(
    project: Project, wheels: Wheels, shared: Path
) -> None:
    wheels("gpufaas_test_a")
    first, again = project.build(), project.build()
    shared.write_text("numpy\ngpufaas-test-a\n")
    changed = project.build()

    assert (first.up_to_date, again.up_to_date, changed.up_to_date) == (False, True, False)
    assert changed.manifest.requirements == ("gpufaas-test-a==1.0",)


def test_a_folder_of_wheels_that_an_included_file_names_is_looked_in_when_they_are_installed(
    project: Project, wheels: Wheels, shared: Path, tmp_path: Path
) -> None:
    wheels("gpufaas_test_a")
    (tmp_path / "wheels").rename(tmp_path / "elsewhere")
    (tmp_path / "wheels").mkdir()
    shared.write_text("--find-links elsewhere\ngpufaas-test-a\n")

    assert project.build().manifest.requirements == ("gpufaas-test-a==1.0",)


@pytest.mark.parametrize("line", ["-r missing.txt", "--requirement=missing.txt", "-cmissing.txt"])
def test_a_file_that_is_not_there_is_named_with_the_line(project: Project, line: str) -> None:
    project.write("fn/requirements.txt", f"\n{line}\n")

    project.refuse(r"fn/requirements\.txt:2: there is no file .*fn/missing\.txt")


def test_a_file_that_includes_itself_is_named(project: Project) -> None:
    project.write("fn/requirements.txt", "-r more.txt\n")
    project.write("fn/more.txt", "numpy\n-r requirements.txt\n")

    project.refuse(r"fn/more\.txt:2: .*requirements\.txt includes itself")


def test_a_build_depends_on_what_is_named_outside_the_functions_folder(tmp_path: Path) -> None:
    for path in ("held.txt", "lib/pyproject.toml", "a.whl", "fn/more/in.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    file = tmp_path / "fn/requirements.txt"
    file.write_text(
        f"-c ../held.txt\n-e ../lib[all]\nb @ file://{tmp_path}/a.whl ; python_version > '3'\n-r more/in.txt\n"
        "git+https://example.org/x.git\n-r https://example.org/y.txt\nnumpy\n"
    )

    read = read_requirements(file)

    assert [path.resolve().relative_to(tmp_path).as_posix() for path in read.named] == [
        "held.txt", "lib", "a.whl", "fn/more/in.txt",
    ]  # fmt: skip
    assert read.needs_resolver
    assert [requirement.name for _, requirement in read.lines] == ["b", "numpy"]


def test_the_file_that_was_resolved_with_is_installed_and_no_other_of_that_version(
    project: Project, wheels: Wheels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without digests uv prefers the wheel for this platform."""
    name = "gpufaas_test_a"
    wheels(name, tag=f"py3-none-{measure().platforms[0]}")
    wheels(name, tag="py3-none-any")
    files = (tmp_path / "wheels").iterdir()
    links = [f"<a href='{each.as_uri()}#sha256={_sha256(each)}'>{each.name}</a>" for each in files]
    index = project.write("simple/gpufaas-test-a/index.html", "".join(links))
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.parent.parent.as_uri())
    monkeypatch.delenv("UV_CONFIG_FILE")
    digest = _sha256(tmp_path / f"wheels/{name}-1.0-py3-none-any.whl")
    project.write("fn/requirements.txt", f"{name}==1.0 \\\n  --hash=sha256:{digest}\n")

    built = project.build()

    assert b"Tag: py3-none-any" in content_of(built)[f"site/{name}-1.0.dist-info/WHEEL"]


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_repository_that_cannot_be_fetched_is_named_with_gits_words(project: Project) -> None:
    project.write("fn/requirements.txt", "a @ git+https://127.0.0.1:9/a.git\n")

    project.refuse(r"git\+https://127.0.0.1:9/a\.git`; Git operation failed; fatal: unable to access")


@pytest.mark.parametrize("option", ["--frobnicate", "--pre", "--trusted-host example.org"])
def test_an_option_that_uv_does_not_read_is_refused_with_its_line(project: Project, option: str) -> None:
    project.write("fn/requirements.txt", f"numpy\n{option}\n")

    project.refuse(rf"requirements\.txt:2: '{option}' is no option that uv reads in such a file: take it out")


def test_read_requirements_raises_what_a_build_refuses(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("numpy; python_versio < '3'")

    with pytest.raises(InvalidSpec, match=r"requirements\.txt:1: "):
        read_requirements(tmp_path / "requirements.txt")


def test_a_last_line_that_is_continued_is_read(project: Project) -> None:
    file = project.write("fn/requirements.txt", "numpy \\\n")

    assert [(where, requirement.name) for where, requirement in read_requirements(file).lines] == [
        (f"{file}:1", "numpy")
    ]
