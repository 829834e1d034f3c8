"""Removing folders that cannot be written, without harm to what links lead to."""

import subprocess
import sys
from pathlib import Path

from tests.files import MODES_HOLD

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
