"""Which form of the engine runs: compiled modules are taken only if they are of the sources that are there."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.compiled import IS_COMPILED, needs_compiled

from gpufaas_core import compiled

PACKAGE = "decides"
POLICIES = ("lb", "lalb", "lalb-o3", "least-wait")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of a package that can be compiled."""
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__init__.py").touch()
    (tmp_path / PACKAGE / "calls.py").write_text("FORM = 'Python'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compiled, "PACKAGES", (PACKAGE,))
    monkeypatch.setattr(compiled, "_WITHIN", (f"{PACKAGE}.",))
    monkeypatch.setattr(compiled, "folder", lambda: tmp_path / "compiled")
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "meta_path", [compiled._Finder(), *sys.meta_path])
    compiled._look.cache_clear()
    yield tmp_path / PACKAGE / "calls.py"
    sys.modules.pop(PACKAGE, None)
    compiled._look.cache_clear()


def compile_it(source: Path) -> Path:
    where = source.parent.parent / "compiled"
    where.mkdir()
    (where / "calls.py").write_text("FORM = 'machine code'\n")
    listed = {"digest": compiled.digest(), "modules": {f"{PACKAGE}.calls": "calls.py"}}
    (where / compiled.LIST).write_text(json.dumps(listed))
    return where / "calls.py"


def found() -> Path:
    spec = importlib.util.find_spec(f"{PACKAGE}.calls")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def test_without_a_compiled_form_python_runs(source: Path) -> None:
    assert found() == source
    assert compiled.said() == "Python"


def test_a_compiled_form_is_taken_while_the_sources_are_as_they_were(source: Path) -> None:
    module = compile_it(source)

    assert found() == module
    assert compiled.said() == "compiled"


@pytest.mark.parametrize("changed", ["calls.py", "other.py", "more/deep.py"])
def test_it_is_not_taken_once_a_source_has_changed_or_is_new(source: Path, changed: str) -> None:
    compile_it(source)
    path = source.parent / changed
    path.parent.mkdir(exist_ok=True)
    path.write_text("FORM = 'another'\n")

    assert found() == source
    assert compiled.said() == "Python (its compiled form is of other sources: make compiled)"


def test_the_environment_can_choose_python(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_it(source)
    monkeypatch.setenv(compiled.VARIABLE, "0")

    assert found() == source
    assert compiled.said() == "Python (GPUFAAS_COMPILED=0)"


@needs_compiled
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_both_forms_make_the_same_decisions(policy: str, tmp_path: Path) -> None:
    assert IS_COMPILED, compiled.said()
    logs = []
    for form in ("1", "0"):
        log = tmp_path / f"{form}.jsonl"
        subprocess.run(
            [
                sys.executable, "-c", "from gpufaas_cli.main import main; main()", "simulate", "--policy", policy,
                "--working-set", "35", "--rpm", "325", "--minutes", "6", "--noise", "0.5", "--decisions", str(log),
            ],
            env={**os.environ, compiled.VARIABLE: form}, check=True, capture_output=True, timeout=50,
        )  # fmt: skip
        logs.append(log.read_bytes())

    assert len(logs[0].splitlines()) > 1_000
    assert logs[0] == logs[1]
