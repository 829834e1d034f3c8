"""What the fork server has imported, no function can replace: the list of that is short, and stays so."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpufaas_core.environment import FIXED
from gpufaas_gpu_manager.forked import forget_what_is_in

LOADED = """
import importlib.metadata, sys
from gpufaas_gpu_manager import forked, zygote
forked.preload()
of = importlib.metadata.packages_distributions()
print(*sorted({each.lower() for name in sys.modules for each in of.get(name.partition(".")[0], ())}))
"""
REPLACED = {"nvidia-ml-py", "setuptools"}
"""Loaded by torch and by a .pth file, and forgotten where a function brings its own."""


@pytest.mark.slow
def test_nothing_is_loaded_before_a_function_but_what_nodes_call_fixed() -> None:
    said = subprocess.run([sys.executable, "-P", "-c", LOADED], check=True, capture_output=True, text=True).stdout

    loaded = {name.replace("_", "-") for name in said.split()}
    assert loaded - REPLACED <= set(FIXED), "a function cannot bring these: import them later"
    assert set(FIXED) - loaded <= {"gpufaas"}, "these are not loaded: they need not be fixed"


def test_a_worker_forgets_what_its_function_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lone.py", "typing.py", "whole/__init__.py", "fast.cpython-311-x86_64-linux-gnu.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("lone", "whole", "whole.part", "fast", "wholesome"):
        monkeypatch.setitem(sys.modules, name, sys)

    forget_what_is_in(str(tmp_path))

    there = {name for name in ("lone", "whole", "whole.part", "fast", "wholesome", "typing") if name in sys.modules}
    assert there == {"wholesome", "typing"}


def test_a_function_without_packages_of_its_own_forgets_nothing(tmp_path: Path) -> None:
    before = dict(sys.modules)

    forget_what_is_in(str(tmp_path / "site"))

    assert sys.modules == before
