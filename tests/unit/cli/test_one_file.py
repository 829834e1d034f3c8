"""A function of one file: its name, its block, and what is wrong with one."""

import os
from pathlib import Path

import pytest
from tests.unit.cli.conftest import Run

from gpufaas_cli import one_file
from gpufaas_cli.stack_text import BadStack

BLOCK = """\
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "tiny-lib>=1",
#   "other",
# ]
# [tool.gpufaas]
# secrets = ["token"]
# memory = "1Gi"
# annotations = {"gpufaas.batch-max" = 4, "gpufaas.allow-pickle" = true}
# ///
"""


def test_a_block_gives_requirements_and_settings_and_load_makes_it_a_model(here: Path) -> None:
    file = here / "my_model.py"
    file.write_text(f"{BLOCK}def load(device): ...\ndef handle(model, event, context): ...\n")

    stack, (function,) = one_file.read(file, one_file.name_of(file))

    assert (function.name, function.lang, function.requires_python) == ("my-model", "python3-torch", ">=3.11")
    assert function.annotations == {"gpufaas.batch-max": "4", "gpufaas.allow-pickle": "true"}
    assert (function.secrets, function.limits) == (("token",), {"memory": "1Gi"})
    assert function.handler is not None
    requirements = function.handler / "requirements.txt"
    assert requirements.read_text().splitlines() == ["", "", "", "tiny-lib>=1", "other"], "on the lines of the file"
    assert stack.said(f"{requirements}:5: no") == f"{file}:5: no"
    assert (function.handler / "handler.py").read_text() == file.read_text()


def test_the_builds_of_the_files_that_were_used_last_are_kept_and_no_others(here: Path) -> None:
    roots = []
    for number in (*range(16), 0, 16):
        file = here / f"f{number}.py"
        file.write_text("def handle(event, context): ...\n")
        roots.append(one_file.read(file, "f")[0].folder)
        os.utime(roots[-1], (len(roots), len(roots)))

    assert [number for number, each in enumerate(roots) if not each.exists()] == [1]


def test_without_a_block_or_load_it_is_a_plain_function_named_after_its_file_or_folder(here: Path) -> None:
    (here / "hello").mkdir()
    file = here / "hello/handler.py"
    file.write_text("def handle(event, context): ...\n")

    _, (function,) = one_file.read(file, one_file.name_of(file))

    assert (function.name, function.lang, function.annotations) == ("hello", "python3-http", {})


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("# /// script\n# dependencies = [\n#   nothing\n# ]\n# ///\n", r"f.py:3: the block .* is not TOML: "),
        ("# /// script\n# dependencies = []\n", r"f.py:1: the block .* has no end"),
        ("# /// script\n# ///\n" * 2, r"f.py:3: a second block"),
        ("# /// script\n# [tool.gpufaas]\n# annotation = {}\n# ///\n", r"f.py:1: .* unknown field `annotation`"),
        ("# /// script\n# dependencies = 'numpy'\n# ///\n", r"f.py:1: .* Expected `array`, got `str`"),
        ("# /// script\n# requires-python = 'three'\n# ///\n", r"f.py:1: .* Invalid specifier"),
    ],
)
def test_a_wrong_block_is_refused_with_its_line(here: Path, block: str, said: str) -> None:
    (here / "f.py").write_text(f"{block}def handle(event, context): ...\n")

    with pytest.raises(BadStack, match=said):
        one_file.read(here / "f.py", "f")


def test_a_file_is_deployed_by_itself_and_one_that_is_not_there_is_named(run: Run) -> None:
    assert run("deploy", "a.py", "b").exit_code == 2
    missing = run("deploy", "missing.py")
    assert missing.exit_code == 2
    assert missing.stderr.startswith("gpufaas: missing.py cannot be read")


def test_a_file_keeps_its_lock_under_each_name_that_it_is_given(here: Path) -> None:
    file = here / "f.py"
    file.write_text("def handle(event, context): ...\n")
    handlers = []
    for name in ("f-1", "f-2"):
        _, (function,) = one_file.read(file, name)
        assert function.handler is not None
        handlers.append(function.handler)
        if name == "f-1":
            (function.handler / "requirements.lock").write_text("lib==1\n")

    assert (handlers[1] / "requirements.lock").read_text() == "lib==1\n"
