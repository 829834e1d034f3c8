"""What of an author's folder is packed: ignore files as git reads them, and what never is."""

import json
import subprocess
from pathlib import Path

import pytest
from tests.unit.cli.conftest import Project, Run, content_of

from gpufaas_cli import source_files, watching
from gpufaas_cli.source_files import NOT_HANDLER, Ignored, walk


def packed(project: Project) -> set[str]:
    return {path.relative_to(project.root / "fn").as_posix() for path in walk(project.root / "fn", ignored(project))}


def ignored(project: Project) -> Ignored:
    return Ignored(project.root / "fn", NOT_HANDLER)


def left_out(project: Project) -> dict[str, str]:
    judge = ignored(project)
    list(walk(project.root / "fn", judge))
    return {path.relative_to(project.root / "fn").as_posix(): why for path, why in judge.left_out.items()}


def write(project: Project, *names: str) -> None:
    for name in names:
        project.write(f"fn/{name}", "x")


def test_secrets_environments_and_what_git_or_node_keep_are_never_packed(project: Project) -> None:
    write(project, ".env", ".env.local", "deep/key.pem", "id_rsa", "id_ed25519.pub", ".git/config", ".secrets/token")
    write(project, "venv/pyvenv.cfg", "venv/bin/python", "deep/node_modules/a/index.js", "__pycache__/handler.pyc")
    write(project, "id_map.json", "environment.txt", "identity.py", "deep/venv/notes.txt")

    kept = {"handler.py", "id_map.json", "environment.txt", "identity.py", "deep/venv/notes.txt"}
    assert packed(project) == kept
    built = {name.removeprefix("function/") for name in content_of(project.build())}
    assert kept < built
    assert not any(name.startswith(tuple(left_out(project))) for name in built)
    assert left_out(project) == {
        **dict.fromkeys((".env", ".env.local", "deep/key.pem", "id_rsa", "id_ed25519.pub", ".secrets"), "secrets"),
        ".git": "of git",
        "venv": "a virtual environment",
        "deep/node_modules": "packages of Node.js",
        "__pycache__": "caches",
    }


def test_a_gpufaasignore_goes_before_a_gitignore_and_can_bring_back_what_is_never_packed(project: Project) -> None:
    write(project, "ca.pem", "key.pem", "notes.md", "data.csv")
    project.write("fn/.gitignore", "data.csv")
    project.write("fn/.gpufaasignore", "# public\n!ca.pem\n\n*.md\n")

    assert packed(project) == {"handler.py", ".gitignore", ".gpufaasignore", "ca.pem", "data.csv"}
    assert left_out(project)["notes.md"].endswith("fn/.gpufaasignore:4")


def test_a_gitignore_cannot_bring_back_what_is_never_packed(project: Project) -> None:
    write(project, ".env")
    project.write("fn/.gitignore", "!.env")

    assert ".env" not in packed(project)


RULES = {
    ".gitignore": "*.log\n/only-here\ncache/\n!keep.log\nruns/*\n!runs/best.txt\n**/tmp/**\na[\n\\#odd\n trailing  \n",
    "fn/sub/.gitignore": "!loud.log\nlocal.txt\n",
    "fn/white/.gitignore": "*\n!*/\n!*.py\n!.gitignore\n",
}
FILES = (
    "a.log", "keep.log", "only-here", "sub/only-here", "cache/x", "sub/cache/x", "runs/1.txt", "runs/best.txt",
    "sub/loud.log", "sub/quiet.log", "local.txt", "sub/local.txt", "sub/deep/local.txt", "x/tmp/y/z", "#odd",
    " trailing", "white/a.py", "white/a.txt", "white/deep/b.py", "white/deep/b.txt", "flat/cache",
)  # fmt: skip


def test_a_gitignore_is_read_as_by_git_up_to_the_repository(project: Project) -> None:
    for name in FILES:
        write(project, name)
    for name, text in RULES.items():
        project.write(name, text)
    git = ["git", "-C", str(project.root)]
    subprocess.run([*git, "init", "-q"], check=True)
    listed = subprocess.run(
        [*git, "ls-files", "--others", "--exclude-standard", "-z", "fn"], check=True, capture_output=True, text=True
    ).stdout.split("\0")

    assert packed(project) == {name.removeprefix("fn/") for name in listed if name}


def test_without_a_repository_ignore_files_count_up_to_the_stack_file(project: Project) -> None:
    write(project, "a.log", "b.tmp")
    project.write("../.gitignore", "*.tmp")
    project.write(".gitignore", "*.log")
    assert packed(project) == {"handler.py", "a.log", "b.tmp"}, "nothing marks the folder above as the project's"

    project.write("stack.yaml", "")

    assert packed(project) == {"handler.py", "b.tmp"}


def test_weights_that_git_does_not_hold_are_packed_unless_a_gpufaasignore_names_them(project: Project) -> None:
    write(project, "model.safetensors", "data.bin")
    project.write("fn/.gitignore", "*.safetensors\n*.bin\n")
    assert "model.safetensors" in packed(project)
    assert "data.bin" not in packed(project)

    project.write("fn/.gpufaasignore", "*.safetensors\n")

    assert "model.safetensors" not in packed(project)


def test_extra_paths_are_packed_by_the_same_rules(project: Project) -> None:
    for name in ("lib/part.py", "lib/.env", "lib/a.log", "lib/build/x.py"):
        project.write(name, "x")
    project.write("lib/.gitignore", "*.log")

    names = content_of(project.build(copy=[Path("lib")])).keys()

    assert {name for name in names if "/lib/" in name} == {
        "function/lib/part.py", "function/lib/.gitignore", "function/lib/build/x.py",
    }  # fmt: skip


def test_what_build_py_makes_is_packed_whatever_git_ignores(project: Project) -> None:
    project.write("fn/.gitignore", "*.json")
    project.write("fn/build.py", "for name in ('labels.json', 'ca.pem'): open(name, 'w').write('x')")

    assert {"function/labels.json", "function/ca.pem"} <= content_of(project.build()).keys()


@pytest.mark.parametrize("file", [".gitignore", "fn/.gitignore", "fn/.gpufaasignore"])
def test_an_ignore_file_that_leaves_out_the_handler_is_refused_with_its_line(project: Project, file: str) -> None:
    project.write("stack.yaml", "")
    project.write(file, "# all\n\n*.py\n")

    project.refuse(rf"{file}:3 leaves out .*fn/handler.py, .* write `!handler.py` into .*fn/.gpufaasignore")


@pytest.mark.parametrize(("line", "why"), [("!", "Invalid git pattern: '!'"), ("[z-a]", "bad character range z-a .*")])
def test_a_line_that_is_no_pattern_is_refused_with_the_file(project: Project, line: str, why: str) -> None:
    project.write("fn/.gitignore", f"*.log\n{line}\n")

    project.refuse(rf"fn/.gitignore: {why}: correct or remove that line")


def test_files_that_are_not_packed_change_no_digest_and_wake_no_watch(project: Project) -> None:
    project.write("fn/.gitignore", "*.log\n")
    first = project.build()
    looks = iter([lambda: write(project, "a.log", ".env"), lambda: None, lambda: write(project, "b.txt"), lambda: None])
    changes = watching.changes(
        lambda: [(project.root / "fn", ignored(project))], sleep=lambda _: next(looks)() and None
    )

    assert next(changes) == {project.root / "fn/b.txt"}
    (project.root / "fn/b.txt").unlink()
    assert project.build().digest == first.digest


def test_saves_in_a_row_are_one_change_and_one_during_a_build_is_another(project: Project) -> None:
    looks = iter([lambda: write(project, "a"), lambda: write(project, "b"), lambda: None, lambda: None, lambda: None])
    changes = watching.changes(
        lambda: [(project.root / "fn", ignored(project))], sleep=lambda _: next(looks)() and None
    )

    assert next(changes) == {project.root / "fn/a", project.root / "fn/b"}
    write(project, "c")  # while what was built is not done
    assert next(changes) == {project.root / "fn/c"}


def test_a_change_is_told_although_a_program_goes_on_writing_there(project: Project) -> None:
    numbers = iter(range(100))
    changes = watching.changes(
        lambda: [(project.root / "fn", ignored(project))], sleep=lambda _: write(project, f"log{next(numbers)}")
    )

    write(project, "a")
    assert project.root / "fn/a" in next(changes)
    assert next(numbers) < 30


@pytest.mark.parametrize(
    ("content", "pickled"), [(b"import site\n./lib\n", False), (b"\x80\x02}q\x00.", True), (b"PK\x03\x04..", True),
                             (b"(lp0\n.", True)],
)  # fmt: skip
def test_a_pth_file_is_a_pickle_by_what_is_in_it(project: Project, content: bytes, pickled: bool) -> None:
    project.write("fn/extra.pth", content)

    if pickled:
        project.refuse("extra.pth of function fn is a pickle")
    else:
        assert content_of(project.build())["function/extra.pth"] == content


def test_a_build_says_what_is_left_out_and_list_what_is_packed_and_builds_nothing(here: Path, run: Run) -> None:
    run("new", "hello", "--lang", "python3-http", "-q")
    for name in (".env", "venv/pyvenv.cfg", "venv/bin/python"):
        (here / "hello" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "hello" / name).write_text("x")

    listed = run("build", "--list")
    (told,) = json.loads(run("build", "--list", "--json").stdout)

    assert "  handler.py\n" in listed.stdout
    assert "hello/.env (secrets)" in listed.stdout
    assert "hello/venv/ (a virtual environment, 2 files)" in listed.stdout
    assert told["left_out"] == {"hello/.env": "secrets", "hello/venv/": "a virtual environment"}
    assert told["bytes"] == sum((here / "hello" / name).stat().st_size for name in told["files"])
    assert not (here / "build").exists()
    assert "hello/.env (secrets)" in run("build", "--offline").stdout


def test_much_that_is_no_weights_is_warned_of(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "_LARGE", 2000)
    run("new", "hello", "--lang", "python3-http", "-q")
    (here / "hello/model.safetensors").write_bytes(b"x" * 4000)
    assert "no weights" not in run("build", "--list").stderr

    (here / "hello/data.csv").write_bytes(b"x" * 4000)

    assert "files that are no weights are packed: name in .gpufaasignore" in run("build", "--list").stderr
