"""Commands that change one file at the same time: what each of them adds is in it."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpufaas_cli import config, files
from gpufaas_cli.commands import login as logins
from gpufaas_cli.commands import new
from gpufaas_cli.config import Login, find_login, remove_login, save_login
from gpufaas_cli.stack import read_stack

MANY = [f"f{number}" for number in range(4)]


@pytest.fixture(autouse=True)
def all_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no command write before all have read, for as long as they can do that; which is never."""
    monkeypatch.chdir(tmp_path)
    met = threading.Barrier(len(MANY))

    def replace_file(*args: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            met.wait(0.2)
        files.replace_file(*args)

    for module in (config, new, logins):
        monkeypatch.setattr(module, "replace_file", replace_file)


def all_at_once(does: Callable[[str], object], each: Iterable[str] = MANY) -> None:
    with ThreadPoolExecutor(len(MANY)) as pool:
        list(pool.map(does, each))


@pytest.mark.parametrize("stack", ["", "version: 1.0\nprovider:\n  name: openfaas\n"])
def test_functions_that_are_made_at_the_same_time_are_all_in_the_stack_file(tmp_path: Path, stack: str) -> None:
    """Of 8 that a script made in parallel, 2 were in the file, and all said that they were."""
    if stack:
        (tmp_path / "stack.yaml").write_text(stack)

    all_at_once(lambda name: new.new.main([name, "--lang", "dockerfile", "--quiet"], standalone_mode=False))

    assert sorted(read_stack().functions) == MANY
    assert (tmp_path / ".gitignore").read_text() == "/template/\n/build/\n/.secrets/\n"
    assert {each.name for each in tmp_path.iterdir()} == {"stack.yaml", ".gitignore", *MANY}, "nothing else is left"


def test_logins_at_the_same_time_are_all_kept_and_logouts_forget_only_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENFAAS_CONFIG", str(tmp_path / "home"))

    all_at_once(lambda name: save_login(Login(f"http://{name}", "basic", "x")))
    assert all(find_login(f"http://{name}") for name in MANY)

    all_at_once(lambda name: remove_login(f"http://{name}"), MANY[1:])
    assert [bool(find_login(f"http://{name}")) for name in MANY] == [True, False, False, False]


def test_logins_of_registries_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    login = ["-u", "me", "--password", "right", "--server"]

    all_at_once(lambda name: logins.registry_login.main([*login, name], standalone_mode=False))

    assert sorted(json.loads((tmp_path / "credentials/config.json").read_text())["auths"]) == MANY
