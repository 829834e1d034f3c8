"""Logins: to gateways, kept in the file of faas-cli (``login``, ``logout``), and to registries (``registry-login``)."""

import base64
import json
import math
import sys
from pathlib import Path
from typing import Final

import click

from gpufaas import NotAuthorised
from gpufaas_cli import config, declare, flags, output
from gpufaas_cli.files import alone, replace_file
from gpufaas_core.errors import GpufaasError
from gpufaas_core.units import Seconds, parse_duration

password_options = declare.options(
    click.option("-p", "--password", metavar="PASSWORD", help="Other users of this machine see it: prefer -s."),
    click.option("-s", "--password-stdin", "from_stdin", is_flag=True, help="Read the password from stdin."),
)


def read_password(given: str | None, from_stdin: bool, command: str) -> str:
    """Return the password of `password_options`, or ask for it on a terminal."""
    if given is not None and from_stdin:
        raise click.UsageError("--password and --password-stdin exclude each other")
    if given is not None:
        output.note(f"WARNING! Using --password is insecure, consider: cat password.txt | gpufaas {command} -s")
    elif from_stdin:
        given = sys.stdin.read().rstrip("\r\n") if sys.stdin else ""
    elif sys.stdin is not None and sys.stdin.isatty():
        given = click.prompt("Password", hide_input=True, default="", show_default=False, err=True)
    if not given:
        raise click.UsageError("the password is missing: give it on stdin, with --password-stdin")
    return given


@declare.command("login")
@click.option("-u", "--username", default="admin", show_default=True, metavar="NAME")
@password_options
@click.option("--timeout", "timeout_s", default="5s", show_default=True, metavar="DURATION",
              callback=declare.parsed(lambda text: parse_duration(text) or math.inf))  # fmt: skip
@click.option("--tls-no-verify", is_flag=True, help="Accept any certificate of an https:// gateway.")
@flags.gateway_only
@flags.yaml_file
def login(
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
    url = flags.gateway_url(gateway, yaml_file)
    if "@" in url:
        raise click.UsageError("give the user with -u and the password on stdin, and neither in the gateway's URL")
    if not username:
        raise click.UsageError("--username must not be empty")
    login = config.basic(url, username, read_password(password, from_stdin, "login"))
    output.show("Asking the gateway whether it knows the credentials...")
    with flags.client_of(login.gateway, login.header, verify=not tls_no_verify, timeout_s=timeout_s) as client:
        flags.warn_of_plain_http(login.gateway)
        try:
            client.functions()
        except NotAuthorised as exc:
            raise NotAuthorised("Unable to login, either username or password is incorrect") from exc
    config.save_login(login)
    output.show(f"credentials saved for {username} {client.shown}")


@declare.command("logout")
@flags.gateway_only
@flags.yaml_file
def logout(gateway: str | None, yaml_file: Path | None) -> None:
    """
    Forget user and password of a gateway. The gateway itself is not asked.

    Examples:
      gpufaas logout
      gpufaas logout -g https://gateway.example.com
    """
    url = flags.gateway_url(gateway, yaml_file)
    if not config.remove_login(url):
        raise GpufaasError(f"there is no login for {url} in {config.config_file()}")
    output.show(f"credentials removed for {url}")


_FILE: Final = Path("credentials/config.json")
_DOCKER_HUB: Final = "https://index.docker.io/v1/"


@declare.command("registry-login")
@click.option("-u", "--username", metavar="NAME", help="The user that the registry knows.")
@password_options
@click.option("--server", default=_DOCKER_HUB, show_default=True, metavar="HOST")
def registry_login(username: str | None, password: str | None, from_stdin: bool, server: str) -> None:
    """
    Write user and password of a registry to ./credentials/config.json, as docker keeps them.

    They are not tried. Logins for other registries stay in the file. For Amazon's registry, pipe the output of
    'aws ecr get-login-password' to it, with -u AWS.

    Examples:
      cat password.txt | gpufaas registry-login -u me --password-stdin
      cat password.txt | gpufaas registry-login -u me -s --server registry.example.com:5000
      DOCKER_CONFIG=./credentials gpufaas push
    """
    if not username:
        raise click.UsageError("the user is missing: give --username NAME (-u)")
    login = f"{username}:{read_password(password, from_stdin, 'registry-login')}"
    with alone(_FILE):
        try:
            content = json.loads(_FILE.read_text()) if _FILE.exists() else {}
            content.setdefault("auths", {})[server] = {"auth": base64.b64encode(login.encode()).decode()}
        except (ValueError, AttributeError, TypeError) as exc:
            raise GpufaasError(f"{_FILE} is there, and is not docker's JSON: correct it, or remove it") from exc
        replace_file(_FILE, json.dumps(content, indent=1))
    output.show(f"\nWrote ./{_FILE}..OK")
