"""Removing folders that cannot be written, without harm to what links lead to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.files import MODES_HOLD

from gpufaas_core.files import remove_tree

REMOVE = """
import pathlib, sys
from gpufaas_core.files import remove_tree
for each in sys.argv[1:]:
    remove_tree(pathlib.Path(each))
    remove_tree(pathlib.Path(each))
"""


def test_a_folder_is_removed_whatever_its_modes_and_nothing_beyond_its_links(tmp_path: Path) -> None:
    others = tmp_path / "others"
    (others / "folder").mkdir(parents=True)
    folder, link, file = tmp_path / "folder", tmp_path / "link", tmp_path / "file"
    (folder / "closed" / "deep").mkdir(parents=True)
    (folder / "closed" / "deep" / "file").touch()
    (folder / "link").symlink_to(others)
    link.symlink_to(others)
    file.touch()
    for each, mode in ((folder / "closed" / "deep", 0o555), (folder / "closed", 0), (folder, 0o555), (others, 0o755)):
        each.chmod(mode)

    subprocess.run([*MODES_HOLD, sys.executable, "-c", REMOVE, folder, link, file], check=True, timeout=60)

    assert [each.name for each in tmp_path.iterdir()] == ["others"]
    assert (others / "folder").is_dir()
    assert others.stat().st_mode & 0o777 == 0o755


def test_a_folder_is_removed_however_deep_it_is(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(1100):  # deeper than a path can say, and than functions can call themselves
        os.mkdir("deeper", dir_fd=here)
        deeper = os.open("deeper", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)

    remove_tree(top)

    assert not top.exists()


def test_a_folder_that_turns_into_a_link_meanwhile_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, top = tmp_path / "others", tmp_path / "top"
    others.mkdir()
    others.chmod(0o755)
    (others / "kept").touch()
    (top / "turns").mkdir(parents=True)
    unlink = os.unlink

    def turn(name: str, *, dir_fd: int | None = None) -> None:
        try:
            unlink(name, dir_fd=dir_fd)
        except IsADirectoryError:
            (top / "turns").rmdir()
            (top / "turns").symlink_to(others)
            raise

    monkeypatch.setattr(os, "unlink", turn)
    remove_tree(top)

    assert (others / "kept").exists()
    assert others.stat().st_mode & 0o777 == 0o755
