"""A module of the author exists once, whatever it is called, and `__main__` is the handler."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HELPER = """
    from .other import up
    print("runs:", __name__, __file__.rpartition("/")[2])
    state = []
    def shout(text):
        return up(text) + "!"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "function"
    write(folder, "handler.py", "")
    write(folder, "helper.py", HELPER)
    write(folder, "other.py", "def up(text): return text.upper()")
    return folder


def write(folder: Path, name: str, source: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(textwrap.dedent(source))


def run(folder: Path, then: str = "") -> list[str]:
    """Import the handler as a worker does, with all warnings as errors; return what it prints, and *then* prints."""
    program = f"""
import sys, os
from gpufaas_functions.author_modules import import_handler
sys.path.insert(0, {str(folder)!r})
os.chdir({str(folder)!r})
handler = import_handler()
{textwrap.dedent(then)}
"""
    done = subprocess.run([sys.executable, "-P", "-W", "error", "-c", program], capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


def test_a_module_beside_the_handler_is_the_same_by_each_way_to_import_it(folder: Path) -> None:
    write(
        folder, "handler.py",
        """
        from .helper import shout
        from function.helper import shout as second
        from . import helper as third
        import helper, importlib, handler, function.handler, sys
        from .pkg.deep import module
        import pkg.deep.module as again
        assert shout is second is helper.shout and third is helper is sys.modules["function.helper"]
        assert module is again and module.up is helper.up
        assert function.handler is handler is sys.modules[__name__]
        assert importlib.reload(helper) is helper is importlib.reload(third)
        assert __name__ == "handler" and helper.shout.__module__ == "helper" and shout("a") == "A!"
        """,
    )  # fmt: skip
    write(folder, "pkg/__init__.py", "from .. import helper")
    write(folder, "pkg/deep/module.py", "from ...other import up")

    assert run(folder) == ["runs: helper helper.py"] * 3, "once, and by two reloads"


def test_the_package_runs_before_the_handler_as_in_openfaas(folder: Path) -> None:
    write(folder, "__init__.py", "print(__name__)\nfrom .handler import found")
    write(folder, "handler.py", "print(__name__)\nfrom . import helper\nfound = helper.shout('a')")

    assert run(folder, "import function; print(function.found)") == [
        "function", "handler", "runs: helper helper.py", "A!",
    ]  # fmt: skip


def test_a_module_named_as_one_of_python_is_found_by_its_package_only_and_hides_nothing(folder: Path) -> None:
    write(folder, "types.py", "mine = True")
    write(folder, "queue.py", "mine = True")
    write(folder, "handler.py", "from .types import mine\nfrom .queue import mine\nimport types\ntypes.ModuleType")

    assert run(folder, "import sys; print('queue' in sys.modules)") == ["False"]


@pytest.mark.parametrize("name", ["helper", "function.helper"])
def test_a_module_that_is_missing_or_fails_says_so_by_either_name(folder: Path, name: str) -> None:
    write(folder, "helper.py", "raise ValueError('my fault')")
    then = f"""
        import importlib
        for each in ({name!r}, {name!r} + "less"):
            try:
                importlib.import_module(each)
            except (ValueError, ImportError) as exc:
                print(exc)
    """

    assert run(folder, then) == ["my fault", f"No module named '{name}less'"]


def test_a_pickle_of_a_training_script_finds_its_class_in_the_handler(folder: Path) -> None:
    write(folder, "handler.py", "from .nets import Net\nclass Own:\n  pass")
    write(folder, "nets.py", "class Net:\n  pass")
    then = """
        import pickle
        for each in (handler.Net, handler.Own):
            written = pickle.dumps(each, 2).replace(each.__module__.encode(), b"__main__")
            for load in (pickle.loads, pickle._loads):
                assert load(written) is each
                try:
                    load(written.replace(each.__name__.encode(), b"Lost"))
                except AttributeError as exc:
                    assert "'Lost'" in str(exc) and "define or import it" in str(exc) and "handler.py" in str(exc)
                    print("told")
    """

    assert run(folder, then) == ["told"] * 4


def test_processes_of_multiprocessing_run_the_handler_once_and_find_the_same_modules(folder: Path) -> None:
    write(
        folder, "handler.py",
        """
        import multiprocessing, sys
        from .helper import shout
        print("handler runs")
        class Net:
            pass
        def work(text):
            import __main__, helper
            return shout(text), __main__.Net is Net, helper.shout is shout, "gpufaas_gpu_manager" in sys.modules
        def use(method):
            with multiprocessing.get_context(method).Pool(1) as pool:
                print(*pool.apply(work, ("a",)))
        """,
    )  # fmt: skip

    said = run(
        folder, "sys.stdout.flush(); [(handler.use(each), sys.stdout.flush()) for each in ('spawn', 'forkserver')]"
    )

    assert sorted(said) == sorted([
        *["runs: helper helper.py", "handler runs"] * 3, *["A! True True False"] * 2,
    ])  # fmt: skip
