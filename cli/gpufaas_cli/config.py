"""
Logins are kept in ``~/.openfaas/config.yml``. faas-cli reads and writes the same file, so that a login
with one is a login with the other.

``OPENFAAS_CONFIG`` names another folder; where ``CI`` is ``true`` or ``1`` it is ``./.openfaas``. Keys that we do not
know stay in the file.
"""

import base64
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from gpufaas_cli.files import alone, replace_file
from gpufaas_core.errors import GpufaasError
from gpufaas_templates import bounded_yaml


class BadConfig(GpufaasError):
    """The file is not what faas-cli or we write. It may hold logins: its owner mends it, and we leave it alone."""


@dataclass(frozen=True, slots=True)
class Login:
    gateway: str
    auth: str
    """``basic``, or ``oauth2``: a bearer token."""
    token: str
    """With basic auth: base64 of ``user:password``."""

    @property
    def header(self) -> str:
        """The value of ``Authorization``."""
        return f"{'Basic' if self.auth == 'basic' else 'Bearer'} {self.token}"


def basic(gateway: str, user: str, password: str) -> Login:
    return Login(gateway, "basic", base64.b64encode(f"{user}:{password}".encode()).decode())


def config_file() -> Path:
    usual = ".openfaas" if os.environ.get("CI") in ("true", "1") else "~/.openfaas"
    return Path(os.environ.get("OPENFAAS_CONFIG") or usual).expanduser() / "config.yml"


def find_login(gateway: str) -> Login | None:
    """
    Return the login that is kept for *gateway*, a URL as `stack.choose_gateway` gives it.

    :raises BadConfig: the file cannot be read
    """
    for each in _read(config_file())["auths"]:
        if _is_of(each, gateway):
            return Login(gateway, str(each.get("auth") or "basic"), str(each.get("token") or ""))
    return None


def save_login(login: Login) -> None:
    """
    Keep *login*, instead of an older one for the same gateway, in a file that only its owner can read.

    :raises GpufaasError: the file cannot be read or written
    """
    _replace(login.gateway, [asdict(login)])


def remove_login(gateway: str) -> bool:
    """Return False when there was none."""
    if found := find_login(gateway):
        _replace(gateway, [])
    return found is not None


def _replace(gateway: str, by: list[dict[str, Any]]) -> None:
    with alone(file := config_file()):
        content = _read(file)
        kept = [each for each in content["auths"] if not _is_of(each, gateway)]
        replace_file(file, yaml.safe_dump({**content, "auths": [*kept, *by]}, sort_keys=False))


def _is_of(entry: Mapping[str, Any], gateway: str) -> bool:
    return str(entry.get("gateway") or "").rstrip("/").lower() == gateway.rstrip("/").lower()


def _read(file: Path) -> dict[str, Any]:
    try:
        content = bounded_yaml.load(file.read_text())
    except FileNotFoundError:
        content = None
    except OSError as exc:
        raise BadConfig(f"{file}: {exc.strerror}: it keeps the logins of gateways") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise BadConfig(f"{file}: it is not YAML: correct it, or remove it and log in again") from exc
    content = {} if content is None else content
    auths = (content.get("auths") or []) if isinstance(content, dict) else None
    if not isinstance(auths, list) or not all(isinstance(each, dict) for each in auths):
        raise BadConfig(f"{file}: it is not a list of logins under 'auths': correct it, or remove it and log in again")
    return {**content, "auths": auths}
