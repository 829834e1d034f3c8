"""
``gpufaas``: the command line. A command is in the module of ``commands/`` that has its name, or in one of `_TOGETHER`.
A module is imported only when a command of it is called, so that ``--help`` is quick.

Exit codes: 0 done, 1 it failed, 2 wrong usage or bad input file, 3 gateway not reachable or not authorised. An error is
one line on stderr that says what to do; a traceback is a bug.
"""

import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import click

from gpufaas_cli import output, plugins, removed
from gpufaas_core.errors import GpufaasError

FAILED: Final = 1
WRONG_USAGE: Final = 2
NO_GATEWAY: Final = 3
_INTERRUPTED: Final = 130  # as shells have it: 128 + SIGINT
_CODES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("BadStack", "BadWorkload", "BadProblem"), WRONG_USAGE),
    **dict.fromkeys(("GatewayUnreachable", "NotAuthorised"), NO_GATEWAY),
}
"""By the names of errors, whose modules are imported only where they are raised."""

COMMANDS: Final[Mapping[str, str]] = {
    "serve": "Start the whole platform on this machine.",
    "gateway": "Start a gateway of a cluster.",
    "scheduler": "Start a scheduler of a cluster; of several one leads.",
    "node": "Start a node of a cluster; list, describe and drain nodes.",
    "cost": "Show what was paid for nodes that were ordered.",
    "doctor": "Check this machine, and say what mends it.",
    "isolation": "Show what keeps functions apart on this machine.",
    "new": "Write a function from a template, and add it to stack.yaml.",
    "build": "Build functions into bundles or images.",
    "push": "Upload what was built: bundles to the gateway, images to their registry.",
    "publish": "Build, and push at once; images for several platforms.",
    "deploy": "Upload and deploy what was built.",
    "up": "Build, upload and deploy in one go.",
    "run": "Deploy one file, call it once, and remove it.",
    "local-run": "Run one function on this machine, without deploying it.",
    "list": "List the functions that are deployed.",
    "describe": "Show all about one function.",
    "history": "Show the last deployments of a function.",
    "rollback": "Deploy an earlier revision of a function again.",
    "scale": "Set the number of copies of a function.",
    "invoke": "Call a function; its input comes from stdin.",
    "async": "Show, cancel and retry asynchronous calls.",
    "logs": "Show what a function printed.",
    "ready": "Wait until the gateway or a function is ready.",
    "diff": "Compare the stack file with what is deployed.",
    "remove": "Remove functions from the gateway.",
    "prune": "Remove what no function needs any more.",
    "login": "Log in to a gateway.",
    "logout": "Forget the login of a gateway.",
    "secret": "Create, update, list and remove secrets.",
    "registry-login": "Write a login for a registry of images.",
    "namespace": "Create, update, list and remove namespaces.",
    "template": "List and pull the templates that functions are made from.",
    "top": "Watch devices, and what is resident on them.",
    "explain": "Say why a call was started where it was, or who decides about a function.",
    "policies": "List the policies that decide, with their options.",
    "simulate": "Run a workload through the scheduler in simulated time.",
    "replay": "Send a workload to a running platform, and report what simulate reports.",
    "what-if": "Ask a recorded journal what other devices or policies would have made of it.",
    "plan": "Say which copies of functions there should be, and where; live.",
    "profile": "Measure what batches of a function take on a device.",
    "solve": "Solve a problem in a file: hardware, variants, partitions, placement.",
    "completion": "Write a completion script for your shell.",
    "version": "Show the version of this CLI and of the gateway.",
}
_TOGETHER: Final[Mapping[str, Sequence[str]]] = {
    "build": ("push", "publish"), "doctor": ("isolation",), "explain": ("policies",), "history": ("rollback",),
    "invoke": ("async",), "list": ("describe",), "login": ("logout", "registry-login"), "new": ("template",),
    "remove": ("prune",), "services": ("serve", "gateway", "scheduler"), "simulate": ("replay", "what-if"),
    "up": ("deploy", "run"), "version": ("completion",),
}  # fmt: skip
"""Commands that are in one module, by its name."""
_ALIASES: Final[Mapping[str, str]] = {
    "ls": "list", "rm": "remove", "delete": "remove", "secrets": "secret", "ns": "namespace", "namespaces": "namespace",
    "templates": "template",
}  # fmt: skip

_EXAMPLES: Final = """
\b
Examples:
  gpufaas serve                              start the platform on this machine
  gpufaas new hello --lang python3-torch     write a function, and add it to stack.yaml
  gpufaas up                                 build and deploy what stack.yaml names
  echo hi | gpufaas invoke hello --timing    call it, and see where the time went
  gpufaas top                                watch which models are on which device
  gpufaas list --json                        for machines

\b
The gateway is -g URL, else the stack file's, else OPENFAAS_URL, else http://127.0.0.1:8080.
Exit codes: 0 done, 1 it failed, 2 wrong usage or bad input file, 3 gateway not reachable or not authorised.
"""


class Commands(click.Group):
    """Imports a command when it is called, and turns every error into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        name = _ALIASES.get(cmd_name, cmd_name)
        if name not in COMMANDS:
            return None
        there = vars(importlib.import_module(module_of(name))).values()
        return next(each for each in there if isinstance(each, click.Command) and each.name == name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[:1] == ["namespaces"]:  # faas-cli's older command
            args = ["namespace", "list", *args[1:]]
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            near = difflib.get_close_matches(name, [*COMMANDS, *_ALIASES], n=1)
            raise click.UsageError(f"no such command {name!r}" + (f": did you mean {near[0]!r}?" if near else ""), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))
        if found := plugins.installed():
            with formatter.section("Plugins"):
                formatter.write_dl([(name, str(path)) for name, path in found.items()])

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **more: Any) -> NoReturn:
        more["standalone_mode"] = False  # else click prints errors, in several lines
        given = list(sys.argv[1:] if args is None else args)
        try:
            if given and given[0] not in COMMANDS and given[0] not in _ALIASES and given[0] in plugins.installed():
                plugins.run(plugins.installed()[given[0]], given[1:])
            if told := removed.command([*(_ALIASES.get(each, each) for each in given[:1]), *given[1:]]):
                _complain(told)
                sys.exit(WRONG_USAGE)
            code = super().main(given, prog_name or "gpufaas", **more)
        except click.exceptions.NoArgsIsHelpError as exc:
            click.echo(exc.ctx.get_help())  # as of faas-cli
            code = 0
        except click.UsageError as exc:
            where = exc.ctx.command_path if exc.ctx else "gpufaas"
            _complain(removed.flag(exc) or f"{_uncapitalised(exc.format_message())} (see '{where} --help')")
            code = WRONG_USAGE
        except click.ClickException as exc:
            _complain(exc.format_message())
            code = exc.exit_code
        except click.Abort:
            code = _INTERRUPTED
        except GpufaasError as exc:
            _complain(str(exc))
            code = exit_code(exc)
        except UnicodeEncodeError as exc:
            _complain(f"{exc.object[: exc.end][-40:]!r} is no text in {exc.encoding}")
            code = WRONG_USAGE
        except OSError as exc:
            _complain(f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc))
            code = FAILED
        sys.exit(code if isinstance(code, int) else 0)


def module_of(command: str) -> str:
    """Return the module of *command*: that of its name, as ``local_run`` of ``local-run``, or one of `_TOGETHER`."""
    module = next((module for module, commands in _TOGETHER.items() if command in commands), command)
    return f"gpufaas_cli.commands.{module.replace('-', '_')}"


def exit_code(error: GpufaasError) -> int:
    """Return what the process ends with when *error* ends it."""
    return _CODES.get(type(error).__name__, FAILED)


@click.command(
    "gpufaas",
    cls=Commands,
    help="Serverless functions that share GPUs.",
    epilog=_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(None, "-V", "--version", package_name="gpufaas", message="gpufaas %(version)s")
def cli() -> None:
    pass


def main() -> NoReturn:
    cli.main()


def _complain(message: str) -> None:
    output.note(f"gpufaas: {' '.join(message.split())}")


def _uncapitalised(message: str) -> str:
    message = message.rstrip(".")
    return message[:1].lower() + message[1:] if message[1:2].islower() else message
