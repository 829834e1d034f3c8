"""``gpufaas registry-login``: a file that docker, and clusters' pull secrets, log in to a registry with."""

import base64
import json
from pathlib import Path
from typing import Final

import click

from gpufaas_cli import declare, output
from gpufaas_cli.commands.login import password_options, read_password
from gpufaas_cli.files import alone, replace_file
from gpufaas_core.errors import GpufaasError

_FILE: Final = Path("credentials/config.json")
_DOCKER_HUB: Final = "https://index.docker.io/v1/"


@declare.command("registry-login")
@click.option("-u", "--username", metavar="NAME", help="The user that the registry knows.")
@password_options
@click.option("--server", default=_DOCKER_HUB, show_default=True, metavar="HOST")
def command(username: str | None, password: str | None, from_stdin: bool, server: str) -> None:
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
