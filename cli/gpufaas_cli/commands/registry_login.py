"""``gpufaas registry-login``: a file that docker, and clusters' pull secrets, log in to a registry with."""

import base64
import json
import os
import sys
from pathlib import Path
from typing import Final

import click

from gpufaas_cli import declare, output
from gpufaas_core.errors import GpufaasError

_FILE: Final = Path("credentials/config.json")
_DOCKER_HUB: Final = "https://index.docker.io/v1/"


@declare.command("registry-login")
@click.option("-u", "--username", metavar="NAME", help="Whom the registry knows.")
@click.option("--password", metavar="PASSWORD", help="Seen by all users of this machine: better is -s.")
@click.option("-s", "--password-stdin", "from_stdin", is_flag=True, help="Read the password from stdin.")
@click.option("--server", default=_DOCKER_HUB, show_default=True, metavar="HOST")
@click.option("--ecr", is_flag=True, help="Not supported: see the message.")
@click.option("--account-id", hidden=True)
@click.option("--region", hidden=True)
def command(
    username: str | None, password: str | None, from_stdin: bool, server: str, ecr: bool, account_id: str | None,
    region: str | None,
) -> None:  # fmt: skip
    """
    Write user and password of a registry to ./credentials/config.json, as docker keeps them.

    They are not tried. Logins for other registries stay in the file.

    Examples:
      cat password.txt | gpufaas registry-login -u me --password-stdin
      cat password.txt | gpufaas registry-login -u me -s --server registry.example.com:5000
      DOCKER_CONFIG=./credentials gpufaas push
    """
    if ecr or account_id or region:
        raise click.UsageError(
            "--ecr is not supported: Amazon's registry wants a helper program; pipe what 'aws ecr get-login-password' "
            "prints to 'gpufaas registry-login -u AWS -s --server ACCOUNT.dkr.ecr.REGION.amazonaws.com'"
        )
    if not username:
        raise click.UsageError("the user is missing: give --username NAME (-u)")
    if password is not None and from_stdin:
        raise click.UsageError("--password and --password-stdin exclude each other")
    if password is not None:
        output.note("WARNING! Using --password is insecure, consider: cat password.txt | gpufaas registry-login -s")
    elif from_stdin:
        password = sys.stdin.read().strip() if sys.stdin else ""
    elif sys.stdin is not None and sys.stdin.isatty():
        password = click.prompt("Password", hide_input=True, default="", show_default=False, err=True)
    if not password:
        raise click.UsageError("the password is missing: give it on stdin, with --password-stdin")
    _keep(server, base64.b64encode(f"{username}:{password}".encode()).decode())
    output.show(f"\nWrote ./{_FILE}..OK")


def _keep(server: str, login: str) -> None:
    try:
        content = json.loads(_FILE.read_text()) if _FILE.exists() else {}
        auths = content.setdefault("auths", {})
        auths[server] = {"auth": login}
    except (ValueError, AttributeError, TypeError) as exc:
        raise GpufaasError(f"{_FILE} is there, and is not docker's JSON: correct it, or remove it") from exc
    aside = _FILE.with_name(".config.json.new")
    try:
        _FILE.parent.mkdir(exist_ok=True, mode=0o700)
        aside.unlink(missing_ok=True)
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as made:
            json.dump(content, made, indent=1)
        os.replace(aside, _FILE)
    except OSError as exc:
        raise GpufaasError(f"{_FILE} cannot be written: {exc.strerror}") from exc
