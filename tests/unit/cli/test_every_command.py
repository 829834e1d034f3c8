"""Every command of the tree, found by walking it: what its help, its errors and its exit codes are."""

import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

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
    "build", "diff", "doctor", "local-run", "login", "logout", "new", "plan apply", "profile import", "publish", "push",
    "ready", "secret apply", "run", "up", "version",
}  # fmt: skip
"""They have ``--gateway``, and want something else first, or can do without."""
NAMES = ["profile"]
"""Groups that take names beside their commands: ``profile F`` is ``profile take F``."""
ARGUMENTS = {
    "deploy": ["--image", "a:latest", "--name", "a"], "namespace create": ["dev"], "plan rollback": ["1"],
    "remove": ["a"], "scale": ["a", "1"], "secret create": ["a"],
}  # fmt: skip


def _arguments(path: tuple[str, ...]) -> list[str]:
    required = [each for each in EVERY[path].params if isinstance(each, click.Argument) and each.required]
    return ARGUMENTS.get(words(path), ["a"] * len(required))


def _takes_so_many(path: tuple[str, ...]) -> bool:
    """And no more: no names of several functions, no subcommand."""
    return path not in GROUPS and all(
        each.nargs == 1 for each in EVERY[path].params if isinstance(each, click.Argument)
    )


def words(path: tuple[str, ...]) -> str:
    return " ".join(path) or "gpufaas"


@pytest.mark.parametrize("path", EVERY, ids=words)
def test_it_has_a_help_that_says_what_it_does(run: Run, path: tuple[str, ...]) -> None:
    for flag in ("--help", "-h"):
        shown = run(*path, flag)

        assert shown.stderr == ""
        assert shown.exit_code == 0
        assert shown.stdout.startswith(f"Usage: {' '.join(('gpufaas', *path))} ")
        said = shown.stdout.split("\n\n")[1].strip()
        assert said[0].isupper()
        assert said.rstrip().endswith(".")
        assert "--help" in shown.stdout


@pytest.mark.parametrize("path", EVERY, ids=words)
def test_its_help_ends_with_examples_of_it(run: Run, path: tuple[str, ...]) -> None:
    _, _, examples = run(*path, "--help").stdout.partition("Examples:\n")

    lines = [line.strip() for line in examples.splitlines()]
    assert any("gpufaas " + " ".join(path) in line for line in lines), lines


@pytest.mark.parametrize("path", EVERY, ids=words)
def test_every_option_says_what_it_is_for(path: tuple[str, ...]) -> None:
    for each in EVERY[path].params:
        if isinstance(each, click.Option) and not each.hidden:
            assert each.help or isinstance(each.type, click.Choice) or each.show_default, each.opts


@pytest.mark.parametrize("path", [path for path in EVERY if path], ids=words)
def test_every_switch_may_have_a_value_as_in_go(path: tuple[str, ...]) -> None:
    command = EVERY[path]
    for each in command.params:
        if isinstance(each, click.Option) and each.is_flag:
            for spelling, meant in (("true", True), ("1", True), ("False", False), ("0", False)):
                for name in each.opts:
                    given = [name, f"{name}={spelling}"]  # the last one wins
                    context = command.make_context(words(path), given, resilient_parsing=True)
                    assert context.params.get(each.name, meant) is meant, given  # type: ignore[arg-type]


def test_a_switch_that_is_neither_true_nor_false_says_so(run: Run) -> None:
    result = run("deploy", "--update=maybe")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("gpufaas: invalid value for '--update': 'maybe' is not a valid boolean")
    assert result.stderr.endswith("(see 'gpufaas deploy --help')\n")


@pytest.mark.parametrize("path", GROUPS, ids=words)
def test_a_group_alone_prints_its_help(run: Run, path: tuple[str, ...]) -> None:
    alone = run(*path)

    assert (alone.exit_code, alone.stderr) == (0, "")
    assert alone.stdout == run(*path, "--help").stdout
    assert "\nCommands:\n" in alone.stdout


@pytest.mark.parametrize("path", [each for each in EVERY if words(each) not in NAMES], ids=words)
def test_an_unknown_option_is_one_line_and_exit_code_2(run: Run, path: tuple[str, ...]) -> None:
    result = run(*path, "--qqq")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"gpufaas: no such option '--qqq' (see '{' '.join(('gpufaas', *path))} --help')\n"


@pytest.mark.parametrize("path", [each for each in GROUPS if words(each) not in NAMES], ids=words)
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


@pytest.mark.parametrize("path", EVERY, ids=words)
def test_a_value_that_an_option_cannot_have_is_one_line_and_exit_code_2(run: Run, path: tuple[str, ...]) -> None:
    for each in EVERY[path].params:
        if not isinstance(each, click.Option) or not isinstance(each.type, _WITH_FEW_VALUES) or each.is_flag:
            continue

        result = run(*path, *_arguments(path), each.opts[-1], "qqq")

        assert (result.exit_code, result.stdout) == (2, ""), each.opts
        assert result.stderr.startswith("gpufaas: invalid value for ")
        assert each.opts[-1] in result.stderr
        assert result.stderr.endswith(f" (see '{' '.join(('gpufaas', *path))} --help')\n")
        assert result.stderr.count("\n") == 1


_WITH_FEW_VALUES = (click.types.IntParamType, click.types.FloatParamType, click.Choice)


@pytest.mark.parametrize("path", [path for path in EVERY if _takes_so_many(path)], ids=words)
def test_one_argument_too_many_is_one_line_and_exit_code_2(run: Run, path: tuple[str, ...]) -> None:
    asked = [
        word
        for each in EVERY[path].params
        if isinstance(each, click.Option) and each.required
        for word in (each.opts[-1], next(iter(getattr(each.type, "choices", "a"))))
    ]

    reads = any(isinstance(each.type, click.File) for each in EVERY[path].params)  # it is opened first: stdin is there

    result = run(*path, *asked, *(["-" if reads else "1"] * len(EVERY[path].params)), "too-many")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "unexpected extra argument" in result.stderr
    assert result.stderr.count("\n") == 1


def _asks_a_gateway(path: tuple[str, ...]) -> bool:
    return any("--gateway" in each.opts for each in EVERY[path].params) and words(path) not in NO_GATEWAY_FIRST


@pytest.mark.parametrize("path", [path for path in EVERY if _asks_a_gateway(path)], ids=words)
def test_no_gateway_is_one_line_and_exit_code_3(run: Run, path: tuple[str, ...]) -> None:
    with socket.socket() as free:  # bound, without a listener
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

        result = run(*path, *_arguments(path), "-g", url, data="x")

    assert result.exit_code == 3
    assert result.stderr.startswith(f"gpufaas: no gateway answers at {url}: ")
    assert "gpufaas serve" in result.stderr
    assert result.stderr.count("\n") == 1


class _Refuses(BaseHTTPRequestHandler):
    """A gateway that answers all with the first part of the path that it is given as its address."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(int(self.path.split("/")[1]))
        self.send_header("Content-Length", "0" if self.command == "HEAD" else "10")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(b"I will not")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def refuses() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refuses) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("path", [path for path in EVERY if _asks_a_gateway(path)], ids=words)
def test_a_gateway_that_refuses_is_its_words_and_exit_code_1_or_how_to_log_in_and_3(
    run: Run, refuses: str, path: tuple[str, ...]
) -> None:
    failed = run(*path, *_arguments(path), "-g", f"{refuses}/500", data="x")
    stranger = run(*path, *_arguments(path), "-g", f"{refuses}/401", data="x")

    assert failed.exit_code == 1
    assert failed.stderr.startswith("gpufaas: ")
    if path == ("invoke",):  # 401 may be the function's own word, and is on stdout as any answer of it
        assert failed.stderr == "gpufaas: a answered 500 Internal Server Error\n"
        assert stranger.exit_code == 1
        return
    assert "I will not" in failed.stderr
    assert stranger.exit_code == 3
    assert stranger.stderr == (
        f"gpufaas: the gateway at {refuses}/401 does not let us in (401): log in with "
        f"'gpufaas login -g {refuses}/401 --password-stdin'\n"
    )


DOCUMENT = (Path(__file__).parents[3] / "docs/cli.md").read_text()
NOT_OURS = {"--ecr", "--help", "--no-deps"}
"""A flag of faas-cli that docs/cli.md names as missing, click's own, and pip's."""


def test_every_command_is_in_the_documentation() -> None:
    assert [path[0] for path in EVERY if len(path) == 1 and not re.search(rf"`[^`]*\b{path[0]}\b", DOCUMENT)] == []


def test_every_flag_in_the_documentation_is_one_of_a_command() -> None:
    known = {
        flag for command in EVERY.values() for each in command.params for flag in (*each.opts, *each.secondary_opts)
    }

    assert set(re.findall(r"(?<![-\w])--[a-z][-a-z]+", DOCUMENT)) - known - NOT_OURS == set()
