"""Each part of a page that a program has measured says by which command it is measured again."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from ages import MEASURED, PAGES, parts  # noqa: E402


def test_each_measured_part_of_a_page_has_a_command_that_exists_and_folders() -> None:
    marked = {each for each in ("README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
              if "<!-- begin " in (ROOT / each).read_text()}  # fmt: skip
    found = {part for page in PAGES for part, _, _ in parts(page)}

    assert marked <= set(PAGES)
    assert found == MEASURED.keys()
    makefile = (ROOT / "Makefile").read_text()
    for command, folders in MEASURED.values():
        assert all((ROOT / each).is_dir() for each in folders)
        program, *words = command.split()
        assert f"\n{words[0]}: " in makefile if program == "make" else (ROOT / words[0]).exists()
        for option in re.findall(r"(--[a-z]+)", command):
            assert f'"{option}"' in (ROOT / words[0]).read_text()


def test_outside_a_clone_it_says_so_in_one_line(tmp_path: Path) -> None:
    for each in ("ages.py", "_document.py"):
        shutil.copy(ROOT / "benchmarks" / each, tmp_path / each)

    done = subprocess.run([sys.executable, tmp_path / "ages.py"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ages: only the history of a clone knows: ")
    assert len(done.stderr.splitlines()) == 1
