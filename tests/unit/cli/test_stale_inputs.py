"""A build is up to date only if its inputs are the same bytes: size and mtime are no proof of that."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.cli.conftest import Project, content_of, weights_of

from gpufaas_cli import bundles, watching
from gpufaas_cli.source_files import is_cache


def keep_times(path: Path, change: Callable[[], object]) -> None:
    """Do *change*, after which *path* has the size and mtime that it had before."""
    before = path.stat()
    change()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def write_in_place(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"new")


def put_another_there(path: Path) -> None:
    path.with_suffix(".new").write_bytes(b"new")
    os.replace(path.with_suffix(".new"), path)


def lead_elsewhere(path: Path) -> None:
    twin = path.parent.with_name("twin")
    twin.write_bytes(b"new")
    path.unlink()
    path.symlink_to(twin)


CHANGES = [write_in_place, put_another_there, lead_elsewhere]


@pytest.fixture
def project(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Its files are all large."""
    monkeypatch.setattr(bundles, "_STAT_FROM", 0)
    return project


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["weights.safetensors", "table.dat"])
def test_another_large_file_of_the_same_size_and_mtime_is_built(
    project: Project, name: str, change: Callable[[Path], None]
) -> None:
    file = project.write(f"fn/{name}", b"old")
    first = project.build()

    keep_times(file, lambda: change(file))
    again = project.build()

    assert not again.up_to_date
    if name == "table.dat":
        assert content_of(again)[f"function/{name}"] == b"new"
    else:
        assert weights_of(again)[0][0].sha256 != weights_of(first)[0][0].sha256
        assert weights_of(again)[0][1].read_bytes() == b"new"


@pytest.mark.parametrize("change", CHANGES)
def test_an_output_that_somebody_changed_is_built_again(project: Project, change: Callable[[Path], None]) -> None:
    project.write("fn/build.py", "open('weights.safetensors', 'wb').write(b'old')")
    ((_, output),) = weights_of(project.build())

    keep_times(output, lambda: change(output))
    again = project.build()

    assert not again.up_to_date
    assert output.read_bytes() == b"old"


def test_a_file_that_changes_while_it_is_built_is_built_once_more(project: Project) -> None:
    """Else it would be taken for what it was before, when it is that again."""
    file = project.write("fn/weights.safetensors", b"old")
    project.write("fn/build.py", f"import pathlib; pathlib.Path({str(file)!r}).write_bytes(b'new')")
    project.build()

    file.write_bytes(b"old")
    assert not project.build().up_to_date


def test_a_watch_sees_what_a_build_does(tmp_path: Path) -> None:
    """It did not look into linked folders and those named build, and did not see that what was wrong is removed."""
    function, lib = tmp_path / "fn", tmp_path / "lib"
    for folder in (function / "deep/build", lib):
        folder.mkdir(parents=True)
    (function / "lib").symlink_to(lib)
    wrong, lock = function / "wrong", function / ".#handler.py"
    files = {function / "lib/part.py", function / "deep/build/a.py"}
    steps: list[Callable[[], object]] = [
        lambda: [each.write_text("x = 1") for each in files],
        lambda: None,
        lambda: lock.symlink_to("me@here.1234:56"),
        lambda: wrong.symlink_to(tmp_path),
        lambda: None,
        lambda: wrong.unlink(),
        lambda: None,
    ]
    changes = watching.changes(lambda: [(function, is_cache)], sleep=lambda _: steps.pop(0)() and None)

    assert next(changes) == files
    assert function in next(changes)
    assert function in next(changes)
    assert not steps


def test_a_watch_sees_a_change_that_keeps_size_and_mtime(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"old")
    looks = iter([None] * 10)
    changes = watching.changes(lambda: [(tmp_path, is_cache)], sleep=lambda _: next(looks))

    keep_times(file, lambda: put_another_there(file))

    assert next(changes) == {file}
