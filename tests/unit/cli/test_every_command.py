"""Every command of the tree, found by walking it: what its help, its errors and its exit codes are."""

import socket
from collections.abc import Iterator

import click
import pytest
from tests.unit.cli.conftest import Run

from gpufaas_cli.main import cli


def _walk(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None, name
            yield from _walk(found, (*path, name))


EVERY = dict(_walk(cli))
GROUPS = [path for path, command in EVERY.items() if isinstance(command, click.Group)]
REQUIRED = [
    path
    for path, command in EVERY.items()
    if any(_ for _ in command.params if isinstance(_, click.Argument) and _.required)
]
NO_GATEWAY_FIRST = {
    "build", "deploy", "diff", "generate", "local-run", "login", "logout", "new", "publish", "push", "ready", "remove",
    "secret apply", "store deploy", "up", "version",
}  # fmt: skip
"""They have ``--gateway``, and want something else first, or can do without."""
ARGUMENTS = {"namespace create": ["dev"], "secret create": ["a"]}


def words(path: tuple[str, ...]) -> str:
    return " ".join(path) or "gpufaas"


@pytest.mark.parametrize("path", EVERY, ids=words)
def test_it_has_a_help_that_says_what_it_does(run: Run, path: tuple[str, ...]) -> None:
    for flag in ("--help", "-h"):
        shown = run(*path, flag)

        assert (shown.exit_code, shown.stderr) == (0, "")
        assert shown.stdout.startswith(f"Usage: {' '.join(('gpufaas', *path))} ")
        said = shown.stdout.split("\n\n")[1].strip()
        assert said[0].isupper()
        assert said.rstrip().endswith(".")
        assert "--help" in shown.stdout


@pytest.mark.parametrize("path", EVERY, ids=words)
def test_every_option_says_what_it_is_for(path: tuple[str, ...]) -> None:
    for each in EVERY[path].params:
        if isinstance(each, click.Option) and not each.hidden:
            assert each.help or isinstance(each.type, click.Choice) or each.show_default, each.opts


@pytest.mark.parametrize("path", GROUPS, ids=words)
def test_a_group_alone_prints_its_help(run: Run, path: tuple[str, ...]) -> None:
    alone = run(*path)

    assert (alone.exit_code, alone.stderr) == (0, "")
    assert alone.stdout == run(*path, "--help").stdout
    assert "\nCommands:\n" in alone.stdout


@pytest.mark.parametrize("path", EVERY, ids=words)
def test_an_unknown_option_is_one_line_and_exit_code_2(run: Run, path: tuple[str, ...]) -> None:
    result = run(*path, "--qqq")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"gpufaas: no such option '--qqq' (see '{' '.join(('gpufaas', *path))} --help')\n"


@pytest.mark.parametrize("path", GROUPS, ids=words)
def test_an_unknown_command_of_a_group_is_one_line_and_exit_code_2(run: Run, path: tuple[str, ...]) -> None:
    result = run(*path, "no-such-command")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "no such command 'no-such-command'" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("path", REQUIRED, ids=words)
def test_a_missing_argument_is_one_line_and_exit_code_2(run: Run, path: tuple[str, ...]) -> None:
    result = run(*path)

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("gpufaas: missing argument")
    assert result.stderr.count("\n") == 1


def _asks_a_gateway(path: tuple[str, ...]) -> bool:
    return any("--gateway" in each.opts for each in EVERY[path].params) and words(path) not in NO_GATEWAY_FIRST


@pytest.mark.parametrize("path", [path for path in EVERY if _asks_a_gateway(path)], ids=words)
def test_no_gateway_is_one_line_and_exit_code_3(run: Run, path: tuple[str, ...]) -> None:
    with socket.socket() as free:  # bound, and nobody listens
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        required = [each for each in EVERY[path].params if isinstance(each, click.Argument) and each.required]
        arguments = ARGUMENTS.get(words(path), ["a"] * len(required))

        result = run(*path, *arguments, "-g", url, data="x")

    assert result.exit_code == 3
    assert result.stderr.startswith(f"gpufaas: no gateway answers at {url}: ")
    assert result.stderr.count("\n") == 1
