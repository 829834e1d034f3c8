"""Options that several commands share, and the stack and gateway that they mean."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import click
import httpx

from gpufaas import Client, GpufaasError, Hints, UnknownFunction
from gpufaas.client import LOOPBACK
from gpufaas_cli import output
from gpufaas_cli.config import find_login
from gpufaas_cli.stack import Stack, StackFunction, choose_gateway, find_stack, gateway_in, read_stack
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import parse_duration

if TYPE_CHECKING:
    from gpufaas_cli.publish import Extra
    from gpufaas_cli.remote_builder import RemoteBuilder

_F = TypeVar("_F", bound=Callable[..., Any])


_TOKEN: Final = "gpufaas_cli.token"
_NO_VERIFY: Final = "gpufaas_cli.tls_no_verify"
_DEPLOY_S: Final = "gpufaas_cli.deploy_s"
_HINTS: Final = Hints("name yours with -g URL", "log in with 'gpufaas login -g {gateway} --password-stdin'")


def gateway(command: _F) -> _F:
    """The gateway as ``gateway``, and what `connect` needs to know besides."""
    command = click.option(
        "--tls-no-verify", is_flag=True, expose_value=False, callback=_keep(_NO_VERIFY),
        help="Take any certificate of an https:// gateway.",
    )(command)  # fmt: skip
    command = click.option(
        "-k", "--token", metavar="TOKEN", expose_value=False, callback=_keep(_TOKEN),
        help="Bearer token for the gateway, instead of the login.",
    )(command)  # fmt: skip
    return click.option(
        "-g", "--gateway", metavar="URL", help="Gateway; else the stack file's, else OPENFAAS_URL, else 127.0.0.1:8080."
    )(command)


def client(command: Callable[..., None]) -> Callable[..., None]:
    """The gateway that the flags or the stack file here name, connected, as ``client``."""

    @functools.wraps(command)
    def connected(*args: Any, gateway: str | None, yaml_file: Path | None, **given: Any) -> None:
        with connect(gateway_url(gateway, yaml_file)) as client:
            try:
                command(*args, client=client, **given)
            except UnknownFunction as exc:
                if "gpufaas list" in str(exc):
                    raise
                raise GpufaasError(f"{str(exc).rstrip('.')}: 'gpufaas list' shows what is deployed") from exc

    return gateway(yaml_file(connected))


def _keep(key: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def keep(ctx: click.Context, _: click.Parameter, value: Any) -> None:
        ctx.meta[key] = value

    return keep


def _keep_seconds(key: str) -> Callable[[click.Context, click.Parameter, str | None], None]:
    def keep(ctx: click.Context, _: click.Parameter, text: str | None) -> None:
        try:
            ctx.meta[key] = parse_duration(text) if text is not None else None
        except InvalidSpec as exc:
            raise click.BadParameter(str(exc)) from exc

    return keep


def connect(url: str) -> Client:
    """
    Return a client of the gateway at *url* that says who we are: by ``--token``, else by the login that is kept.

    A URL with a user and password in it says that itself.
    """
    meta = click.get_current_context().meta
    parts = urlsplit(url)
    token = meta.get(_TOKEN)
    login = None if token or "@" in parts.netloc else find_login(url)
    authorization = f"Bearer {token}" if token else login.header if login else None
    if authorization or "@" in parts.netloc:
        warn_of_plain_http(url)
    more = {"deploy_s": meta[_DEPLOY_S]} if meta.get(_DEPLOY_S) else {}
    return client_of(url, authorization, verify=not meta.get(_NO_VERIFY), **more)


def client_of(url: str, authorization: str | None = None, **more: Any) -> Client:
    """Return a client whose errors name our options, and that shows what is sent where FAAS_DEBUG asks for it."""
    shows = os.environ.get("FAAS_DEBUG") == "1" or os.environ.get("OPENFAAS_DUMP_HTTP") == "true"
    hooks: dict[str, list[Callable[..., Any]]] | None = (
        {"request": [_show_request], "response": [_show_response]} if shows else None
    )
    return Client(url, auth=authorization, user_agent="gpufaas-cli", hints=_HINTS, event_hooks=hooks, **more)


def _show_request(request: httpx.Request) -> None:
    """On stderr, without who we are, and without bodies: they may be secrets."""
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
        output.note("WARNING! The connection to the gateway is not encrypted: who listens learns the password")


def namespace(command: _F) -> _F:
    return click.option("-n", "--namespace", metavar="NAME", help="Namespace of the function.")(command)


def as_json(command: _F) -> _F:
    return click.option("-j", "--json", "as_json", is_flag=True, help="Print JSON, for machines.")(command)


def yaml_file(command: _F) -> _F:
    return click.option(
        "-f", "--yaml", "yaml_file", metavar="FILE|URL", type=click.Path(path_type=Path),
        help="Stack file; else stack.yaml or stack.yml in this folder.",
    )(command)  # fmt: skip


def stack(command: _F) -> _F:
    """The stack file and which of its functions: ``names``, ``yaml_file``, ``glob``, ``regex``, ``envsubst``."""
    command = click.option(
        "--envsubst/--no-envsubst", default=True, help="Replace ${NAME} in the stack file from the environment."
    )(command)
    command = click.option("--regex", metavar="PATTERN", help="Only functions whose name matches this regex.")(command)
    command = click.option("--filter", "glob", metavar="GLOB", help="Only functions whose name matches this glob.")(
        command
    )
    return click.argument("names", nargs=-1, metavar="[NAME]...")(yaml_file(command))


def building(command: _F) -> _F:
    """How to build: the fields of `publish.Building`."""
    from gpufaas_cli.publish import pairs

    def add(*names: str, **more: Any) -> None:
        nonlocal command
        command = click.option(*names, **more)(command)

    paths = click.Path(path_type=Path)
    add("-q", "--quiet", is_flag=True, help="Do not show what docker prints.")
    add(
        "--offline", is_flag=True,
        help="Bundles: do not ask the gateway what its nodes provide, take this Python's packages for theirs.",
    )  # fmt: skip
    add("--disable-stack-pull", is_flag=True, help="Do not pull templates that are missing.")
    add("--pull", is_flag=True, help="Images: look for newer base images.")
    add("--squash", is_flag=True, help="Images: squash the layers, where the engine can.")
    add("--no-cache", is_flag=True, help="Images: build every layer again.")
    add("--parallel", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Build N at once.")
    add(
        "--tag", type=click.Choice(["latest", "sha", "branch", "describe", "digest"]), default="latest",
        show_default=True, help="What the image's tag says of this version.",
    )  # fmt: skip
    add("--copy-extra", multiple=True, type=paths, metavar="PATH", help="Put it beside the handler; repeatable.")
    add(
        "--build-label",
        "build_labels",
        multiple=True,
        callback=pairs,
        metavar="K=V",
        help="Label of images; repeatable.",
    )
    add(
        "-o",
        "--build-option",
        "build_options",
        multiple=True,
        metavar="NAME",
        help="Packages of the template; repeatable.",
    )
    add(
        "-b", "--build-arg", "build_args", multiple=True, callback=pairs, metavar="K=V",
        help="For build.py or the Dockerfile; repeatable.",
    )  # fmt: skip
    return command


def deploying(command: _F) -> _F:
    """What to deploy beside what the stack file says: the fields of `publish.Extra`."""
    from gpufaas_cli.publish import pairs

    def add(*names: str, **more: Any) -> None:
        nonlocal command
        command = click.option(*names, **more)(command)

    def many(*names: str, help_: str, callback: Any = pairs, metavar: str = "K=V") -> None:
        add(*names, multiple=True, callback=callback, metavar=metavar, help=f"{help_}; repeatable.")

    for kind in ("request", "limit"):
        add(f"--memory-{kind}", metavar="SIZE", help=f"Memory {kind}, as in 128Mi.")
        add(f"--cpu-{kind}", metavar="CORES", help=f"CPU {kind}, as in 100m.")
    add(
        "--timeout",
        metavar="DURATION",
        expose_value=False,
        callback=_keep_seconds(_DEPLOY_S),
        help="How long a deployment may take. [default: 10m]",
    )
    add("--read-template/--no-read-template", default=True, help="Send the process that an image's template names.")
    add("--readonly", is_flag=True, help="Containers: a root filesystem that cannot be written.")
    add("--replace", is_flag=True, help="Remove the function first, instead of updating it.")
    add("--update/--no-update", default=True, help="Update functions that are there. [default: update]")
    add("--fprocess", metavar="COMMAND", help="The process that a watchdog starts.")
    many("--constraint", "constraints", help_="Where it may run", callback=None)
    many("--secret", "secrets", help_="Secret that it may read", callback=None, metavar="NAME")
    many("--annotation", "annotations", help_="Annotation, over the stack file's")
    many("-l", "--label", "labels", help_="Label, over the stack file's")
    many("-e", "--env", "env", help_="Environment variable, over the stack file's")
    return command


def remote_builder(command: _F) -> _F:
    """Who builds images where there is no docker; read by `remote_of`."""
    command = click.option(
        "--builder-public-key", metavar="FILE|KEY", envvar="OPENFAAS_BUILDER_PUBLIC_KEY",
        help="That build_secrets are sealed for; else the builder is asked. [env: OPENFAAS_BUILDER_PUBLIC_KEY]",
    )(command)  # fmt: skip
    command = click.option(
        "--payload-secret", metavar="FILE", envvar="OPENFAAS_PAYLOAD_SECRET", type=click.Path(path_type=Path),
        help="Has the secret that builds are signed with. [env: OPENFAAS_PAYLOAD_SECRET]",
    )(command)  # fmt: skip
    return click.option(
        "--remote-builder", metavar="URL", envvar="OPENFAAS_REMOTE_BUILDER",
        help="Have images built there: no docker is needed here. [env: OPENFAAS_REMOTE_BUILDER]",
    )(command)  # fmt: skip


def remote_of(given: dict[str, Any]) -> "RemoteBuilder | None":
    """Take what `remote_builder` gave out of *given*. :raises InvalidSpec: a file that it names cannot be used"""
    from gpufaas_cli.remote_builder import RemoteBuilder, read_payload_secret, read_public_key

    url, secret, key = (given.pop(each) for each in ("remote_builder", "payload_secret", "builder_public_key"))
    if not url:
        return None
    if secret is None:
        raise click.UsageError("--remote-builder needs --payload-secret FILE, with the secret that the builder knows")
    for name in ("extra_tags", "build_labels", "squash"):
        if given.get(name):
            raise click.UsageError(f"--{name.replace('_', '-').removesuffix('s')} cannot be asked of a remote builder")
    verify = not click.get_current_context().meta.get(_NO_VERIFY)
    return RemoteBuilder(url, read_payload_secret(secret), read_public_key(key) if key else None, verify)


def extra_of(given: dict[str, Any]) -> "Extra":
    """Take what `deploying` and ``namespace`` gave out of *given*."""
    from gpufaas_cli.publish import Extra, taken

    if given.get("replace"):
        given["update"] = False
    found = {kind: {} for kind in ("limit", "request")}  # type: dict[str, dict[str, str]]
    for kind, resources in found.items():
        for what in ("memory", "cpu"):
            if value := given.pop(f"{what}_{kind}", None):
                resources[what] = value
    given |= {"limits": found["limit"], "requests": found["request"]}
    return taken(Extra, given)


def selected(
    names: tuple[str, ...], yaml_file: Path | None, glob: str | None, regex: str | None, envsubst: bool
) -> tuple[Stack, list[StackFunction]]:
    """:raises BadStack: the file is wrong, or nothing is selected"""
    read = read_stack(yaml_file, envsubst=envsubst)
    return read, read.select(names, glob, regex)


def gateway_url(flag: str | None, yaml_file: Path | None = None) -> str:
    """
    The gateway of a command that needs no stack file, but may stand beside one. That one is read only for its gateway:
    whatever else is wrong with it is not this command's business.
    """
    found = yaml_file or find_stack()
    return choose_gateway(flag, gateway_in(found) if found and not flag else None)
