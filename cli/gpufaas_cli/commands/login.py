"""``gpufaas login``: what is kept is what faas-cli keeps, in the same file."""

import math
import sys
from pathlib import Path

import click

from gpufaas import NotAuthorised
from gpufaas_cli import config, declare, flags, output
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import Seconds, parse_duration


def _seconds(_: click.Context, __: click.Parameter, text: str) -> Seconds:
    try:
        return parse_duration(text) or math.inf
    except InvalidSpec as exc:
        raise click.BadParameter(str(exc)) from exc


@declare.command("login")
@click.option("-u", "--username", default="admin", show_default=True, metavar="NAME")
@click.option("-p", "--password", metavar="PASSWORD", help="Seen by all users of this machine: better is -s.")
@click.option("-s", "--password-stdin", "from_stdin", is_flag=True, help="Read the password from stdin.")
@click.option("--timeout", "timeout_s", default="5s", callback=_seconds, metavar="DURATION", help="[default: 5s]")
@click.option("--tls-no-verify", is_flag=True, help="Take any certificate of an https:// gateway.")
@click.option("-g", "--gateway", metavar="URL", help="Gateway; else the stack file's, else OPENFAAS_URL.")
@flags.yaml_file
def command(
    username: str, password: str | None, from_stdin: bool, timeout_s: Seconds, tls_no_verify: bool,
    gateway: str | None, yaml_file: Path | None,
) -> None:  # fmt: skip
    """
    Log in to a gateway. User and password are tried, then kept in ~/.openfaas/config.yml, for faas-cli as well.

    OPENFAAS_CONFIG names another folder for it; in CI it is ./.openfaas.

    Examples:
      cat password.txt | gpufaas login --password-stdin
      cat password.txt | gpufaas login -u me -s -g https://gateway.example.com
      gpufaas login                       asks for the password
    """
    if password is not None and from_stdin:
        raise click.UsageError("--password and --password-stdin exclude each other")
    url = flags.gateway_url(gateway, yaml_file)
    if "@" in url:
        raise click.UsageError("give the user with -u and the password on stdin, and neither in the gateway's URL")
    if not username:
        raise click.UsageError("--username must not be empty")
    if password is not None:
        output.note("WARNING! Using --password is insecure, consider: cat password.txt | gpufaas login -s")
    elif from_stdin:
        password = sys.stdin.read().rstrip("\r\n") if sys.stdin else ""
    elif sys.stdin is not None and sys.stdin.isatty():
        password = click.prompt("Password", hide_input=True, default="", show_default=False, err=True)
    if not password:
        raise click.UsageError("the password is missing: give it on stdin, with --password-stdin")
    login = config.basic(url, username, password)
    output.show("Asking the gateway whether it knows the credentials...")
    with flags.client_of(login.gateway, login.header, verify=not tls_no_verify, timeout_s=timeout_s) as client:
        flags.warn_of_plain_http(login.gateway)
        try:
            client.functions()
        except NotAuthorised as exc:
            raise NotAuthorised("Unable to login, either username or password is incorrect") from exc
    config.save_login(login)
    output.show(f"credentials saved for {username} {client.shown}")
