"""Options that several commands share, and the gateway and the stack file that they name."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click
import httpx

from gpufaas import Client, GpufaasError, Hints, Refused, UnknownFunction
from gpufaas.client import LOOPBACK
from gpufaas_cli import declare, output
from gpufaas_cli.config import find_login
from gpufaas_cli.stack import Stack, StackFunction, choose_gateway, find_stack, gateway_in, read_stack
from gpufaas_core.units import parse_duration

_TOKEN: Final = "gpufaas_cli.token"
_NO_VERIFY: Final = "gpufaas_cli.tls_no_verify"
_DEPLOY_S: Final = "gpufaas_cli.deploy_s"
_HINTS: Final = Hints("name yours with -g URL", "log in with 'gpufaas login -g {gateway} --password-stdin'")


def _kept(key: str, read: Callable[..., Any] = lambda _, __, value: value) -> dict[str, Any]:
    """Have an option's value kept in the context, for `connect`, instead of given to the command."""

    def keep(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
        ctx.meta[key] = read(ctx, parameter, value)

    return {"expose_value": False, "callback": keep}


gateway_only = click.option(
    "-g", "--gateway", metavar="URL", help="Gateway; else the stack file's, else OPENFAAS_URL, else 127.0.0.1:8080."
)

gateway = declare.options(
    gateway_only,
    click.option("-k", "--token", metavar="TOKEN", **_kept(_TOKEN),
                 help="Bearer token for the gateway, instead of the login."),
    click.option("--tls-no-verify", is_flag=True, **_kept(_NO_VERIFY),
                 help="Accept any certificate of an https:// gateway."),
)  # fmt: skip
"""The gateway as ``gateway``; `connect` finds the other two."""

deploy_timeout = click.option(
    "--timeout", metavar="DURATION", help="How long a deployment may take. [default: 10m]",
    **_kept(_DEPLOY_S, declare.parsed(parse_duration)),
)  # fmt: skip

namespace = click.option("-n", "--namespace", metavar="NAME", help="Namespace of the function.")

yes = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
"""Of commands that ask: see `confirm`."""

yaml_file = click.option(
    "-f", "--yaml", "yaml_file", metavar="FILE|URL", type=click.Path(path_type=Path),
    help="Stack file; else stack.yaml or stack.yml in this folder.",
)  # fmt: skip

envsubst = click.option(
    "--envsubst/--no-envsubst", default=True, help="Replace ${NAME} in the stack file from the environment."
)

tag = click.option(
    "--tag", type=click.Choice(["latest", "sha", "branch", "describe", "digest"]), default="latest", show_default=True,
    help="What the image's tag says of this version: a git commit, branch or description, or a digest of the files.",
)  # fmt: skip


@dataclass(frozen=True)
class Selection:
    """A stack file, and which of its functions are meant."""

    names: tuple[str, ...] = ()
    yaml_file: Path | None = None
    glob: str | None = None
    regex: str | None = None
    envsubst: bool = True

    def read(self) -> tuple[Stack, list[StackFunction]]:
        """:raises BadStack: the file is wrong, or nothing is selected"""
        stack = read_stack(self.yaml_file, envsubst=self.envsubst)
        return stack, stack.select(self.names, self.glob, self.regex)

    @contextlib.contextmanager
    def opened(self, gateway: str | None) -> Iterator[tuple[Stack, list[StackFunction], Client]]:
        """Give what `read` returns, and a client of *gateway*, else of the one that the stack file names."""
        stack, functions = self.read()
        with connect(choose_gateway(gateway, stack.gateway)) as client:
            yield stack, functions, client


stack = declare.gathered(
    "selection", Selection,
    click.argument("names", nargs=-1, metavar="[NAME]..."),
    yaml_file,
    click.option("--filter", "glob", metavar="GLOB", help="Only functions whose name matches this glob."),
    click.option("--regex", metavar="PATTERN", help="Only functions whose name matches this regex."),
    envsubst,
)  # fmt: skip


def client(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give the command a client of the gateway that its flags or the stack file here name, as ``client``."""

    @functools.wraps(command)
    def connected(*args: Any, gateway: str | None, yaml_file: Path | None, **given: Any) -> Any:
        with connect(gateway_url(gateway, yaml_file)) as client:
            try:
                return command(*args, client=client, **given)
            except UnknownFunction as exc:
                if "gpufaas list" in str(exc):
                    raise
                raise GpufaasError(f"{str(exc).rstrip('.')}: 'gpufaas list' shows what is deployed") from exc

    return gateway(yaml_file(connected))


def confirm(question: str, yes: bool) -> None:
    """Ask *question* unless *yes*. Ends the command where the answer is no, or nobody is there to answer."""
    if not yes:
        click.confirm(f"{question} (--yes does not ask)", abort=True, err=True)


@contextlib.contextmanager
def refused_as(messages: Mapping[int, str]) -> Iterator[None]:
    """Raise one of *messages* where the gateway refuses with that status: its own words name routes, not commands."""
    try:
        yield
    except Refused as exc:
        if exc.status not in messages:
            raise
        raise GpufaasError(messages[exc.status]) from exc


def gateway_url(flag: str | None, yaml_file: Path | None = None) -> str:
    """
    Return the gateway of a command that needs no stack file, but may run beside one. Only the gateway is read from that
    file; other mistakes in it are ignored.
    """
    found = yaml_file or find_stack()
    return choose_gateway(flag, gateway_in(found) if found and not flag else None)


def connect(url: str) -> Client:
    """
    Return a client of the gateway at *url* that logs in with ``--token``, else with the login that is kept.

    A user and password in the URL go before both.
    """
    meta = click.get_current_context().meta
    token, in_url = meta.get(_TOKEN), "@" in urlsplit(url).netloc
    login = None if token or in_url else find_login(url)
    authorization = f"Bearer {token}" if token else login.header if login else None
    if authorization or in_url:
        warn_of_plain_http(url)
    more = {"deploy_s": meta[_DEPLOY_S]} if meta.get(_DEPLOY_S) else {}
    return client_of(url, authorization, verify=not meta.get(_NO_VERIFY), **more)


def client_of(url: str, authorization: str | None = None, **more: Any) -> Client:
    """Return a client whose errors name our options. It shows each request where FAAS_DEBUG asks for it."""
    shows = os.environ.get("FAAS_DEBUG") == "1" or os.environ.get("OPENFAAS_DUMP_HTTP") == "true"
    hooks: Any = {"request": [_show_request], "response": [_show_response]} if shows else None
    return Client(url, auth=authorization, user_agent="gpufaas-cli", hints=_HINTS, event_hooks=hooks, **more)


def _show_request(request: httpx.Request) -> None:
    """On stderr, without the login and without bodies, which may be secrets."""
    output.note(f"> {request.method} {request.url.copy_with(userinfo=b'')!s}")
    for name, value in request.headers.items():
        output.note(f"> {name}: {'<redacted>' if name == 'authorization' else value}")


def _show_response(answer: httpx.Response) -> None:
    output.note(f"< {answer.status_code} {answer.reason_phrase}")
    for name, value in answer.headers.items():
        output.note(f"< {name}: {value}")


def warn_of_plain_http(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme == "http" and parts.hostname not in LOOPBACK:
        output.note("WARNING! The connection to the gateway is not encrypted: anyone on the way can read the password")
