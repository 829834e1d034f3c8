"""What is built seldom is a part of its own: an edit of the handler installs nothing and trains nothing."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.cli.conftest import HTTP, Project, Wheels, content_of, weights_of

from gpufaas_cli.bundles import drop_unused_parts
from gpufaas_core.bundle import Part

SCRIPT = """
import os
open("weights.safetensors", "wb").write(os.urandom(100))
open("words.txt", "w").write("made")
"""


def parts_of(project: Project, **changes: object) -> dict[str, Part]:
    return {each.name: each for each in project.build(**changes).manifest.parts}


def runs(project: Project) -> int:
    return project.said.count("running build.py")


@pytest.fixture
def scripted(project: Project) -> Project:
    project.write("fn/build.py", SCRIPT)
    return project


def test_an_edit_of_the_handler_runs_no_script_and_keeps_weights_and_parts(scripted: Project) -> None:
    first = scripted.build()
    scripted.write("fn/handler.py", HTTP + "# a comment\n")

    again = scripted.build()

    assert runs(scripted) == 1
    assert again.digest != first.digest
    assert again.files[1:] == first.files[1:]
    assert content_of(again)["function/words.txt"] == b"made"
    assert "function/weights.safetensors" not in content_of(again)


@pytest.mark.parametrize("name", ["handler.py", "handler_test.py", "test_more.py", "sample.json", "README.md"])
def test_what_a_script_does_not_name_does_not_count_for_it(scripted: Project, name: str) -> None:
    scripted.write(f"fn/{name}", HTTP)
    scripted.build()
    scripted.write(f"fn/{name}", HTTP + "# edited")

    assert not scripted.build().up_to_date
    assert runs(scripted) == 1


@pytest.mark.parametrize("name", ["data.csv", "model.py", "docs/README.md", "deep/handler.py"])
def test_every_other_file_counts(scripted: Project, name: str) -> None:
    scripted.write(f"fn/{name}", "1")
    scripted.build()
    scripted.write(f"fn/{name}", "2")
    scripted.build()

    assert runs(scripted) == 2


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("handler.py", "import handler"),
        ("handler.py", "from handler import SIZE"),
        ("handler.py", "from handler import *"),
        ("handler.py", "def main():\n    import handler as other"),
        ("handler.py", "import model"),
        ("handler.py", "from nets.deep import deeper"),
        ("handler.py", "import importlib; importlib.import_module('handler')"),
        ("handler.py", "open('./handler.py')"),
        ("sample.json", "open('sample.json')"),
        ("notes.md", "import pathlib; list(pathlib.Path().glob('*.md'))"),
    ],
)
def test_a_file_counts_for_a_script_that_imports_it_or_names_it(project: Project, name: str, how: str) -> None:
    project.write("fn/model.py", "from handler import SIZE\n")
    project.write("fn/nets/__init__.py", "")
    project.write("fn/nets/deep/__init__.py", "from .. import other")
    project.write("fn/nets/deep/deeper.py", "")
    project.write("fn/nets/other.py", "import handler")
    project.write("fn/build.py", f'"""Not handler.py."""\n{how}\n')
    text = project.write(f"fn/{name}", HTTP + "SIZE = 1\n" if name.endswith(".py") else "1").read_text()
    project.build()

    project.write(f"fn/{name}", text + "# edited\n")
    project.build()

    assert runs(project) == 2


def test_a_build_arg_counts_for_a_script(scripted: Project) -> None:
    scripted.build()
    scripted.build(build_args={"SIZE": "2"})

    assert runs(scripted) == 2


def test_a_file_that_a_script_overwrites_is_the_scripts_and_one_that_it_removes_is_gone(project: Project) -> None:
    project.write("fn/build.py", "import os; open('table', 'w').write('made'); os.remove('raw')")
    project.write("fn/table", "mine")
    project.write("fn/raw", "raw")

    content = content_of(project.build())

    assert content["function/table"] == b"made"
    assert "function/raw" not in content
    assert (project.root / "fn/table").read_text() == "mine"


def test_an_edit_of_a_handler_that_a_script_rewrites_runs_it_again(project: Project) -> None:
    """Nothing in the script says so: that is known from what it did."""
    project.write(
        "fn/build.py", "import glob; f = glob.glob('h*r.p*')[0]; t = open(f).read(); open(f, 'w').write(t * 2)"
    )
    for text in (HTTP, HTTP + "# b\n", HTTP, HTTP + "# b\n"):
        project.write("fn/handler.py", text)
        assert content_of(project.build())["function/handler.py"].decode() == text * 2

    assert runs(project) == 2


def test_links_that_a_script_makes_are_packed_as_what_they_lead_to(project: Project) -> None:
    project.write("fn/blob/data", "data")
    project.write("fn/build.py", "import os; os.symlink('blob', 'snapshot')")

    assert content_of(project.build())["function/snapshot/data"] == b"data"


def test_two_functions_of_one_folder_share_what_a_script_makes(scripted: Project) -> None:
    files = [scripted.build(name).files[1:] for name in ("one", "other")]

    assert files[0] == files[1]
    assert runs(scripted) == 1


def test_a_failed_script_leaves_nothing_that_is_taken_for_made(scripted: Project) -> None:
    scripted.write("fn/build.py", SCRIPT + "raise SystemExit(3)")
    scripted.refuse("status 3")
    scripted.refuse("status 3")

    assert runs(scripted) == 2
    assert list((scripted.root / "build/.parts").iterdir()) == []


def test_an_edit_asks_for_no_packages_and_two_functions_share_them(project: Project, wheels: Wheels) -> None:
    wheels("gpufaas_test_a")
    project.write("fn/requirements.txt", "gpufaas-test-a\n")
    project.write("fn/build.py", "import gpufaas_test_a")
    project.write("other/handler.py", HTTP)
    project.write("other/requirements.txt", "# the same\ngpufaas-test-a\n")
    first = parts_of(project)
    other = parts_of(project, name="other", handler=Path("other"))
    (project.root / "wheels/gpufaas_test_a-1.0-py3-none-any.whl").unlink()

    project.write("fn/handler.py", HTTP + "# a comment\n")

    assert parts_of(project) == first
    assert other["site"] == first["site"]
    assert [each for each in project.said if each.startswith("installing")] == ["installing gpufaas-test-a==1.0"]
    assert runs(project) == 1


def test_the_same_folder_has_one_digest_under_another_path_and_umask(tmp_path: Path) -> None:
    digests = set()
    for place, umask in (("here", 0o022), ("there/deeper", 0o077)):
        before = os.umask(umask)
        try:
            project = Project(tmp_path / place)
            project.write("fn/tool.sh", "#!/bin/sh").chmod(0o777 & ~umask)
            project.write("fn/build.py", "import os; open('made.txt', 'w'); open('run', 'w'); os.chmod('run', 0o700)")
            digests.add(project.build().digest)
        finally:
            os.umask(before)

    assert len(digests) == 1


def test_parts_of_no_function_are_dropped_but_for_the_last(scripted: Project) -> None:
    kept = scripted.root / "build/.parts"
    for number in range(8):
        scripted.build(build_args={"N": str(number)})
    scripted.build("other")
    (kept / "key.a1b2c3d4/tree").mkdir(parents=True)  # of a build that was killed
    drop_unused_parts(scripted.root / "build")

    assert len(list(kept.iterdir())) == 2 + 4
    assert not (kept / "key.a1b2c3d4").exists()
    assert scripted.build(build_args={"N": "7"}).up_to_date
    assert scripted.build("other").up_to_date


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors"])
def test_weights_of_the_author_are_sent_from_where_they_are_and_hashed_once(project: Project, name: str) -> None:
    file = project.write(f"fn/{name}", b"w" * 1000)
    project.build()
    project.write("fn/handler.py", HTTP + "# a comment\n")

    ((_, path),) = weights_of(project.build())

    assert path.samefile(file)
    assert project.said.count(f"hashing {name}") == 1


def test_a_large_file_is_never_in_memory_as_a_whole(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write("fn/data.raw", b"d" * 1000)
    monkeypatch.setattr(Path, "read_bytes", _unless_large(Path.read_bytes))

    assert content_of(project.build())["function/data.raw"] == b"d" * 1000


def _unless_large(read: Callable[[Path], bytes]) -> Callable[[Path], bytes]:
    def checked(path: Path) -> bytes:
        assert path.name != "data.raw", "it was read as a whole"
        return read(path)

    return checked
