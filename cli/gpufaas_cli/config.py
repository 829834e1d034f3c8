"""
Who we are at which gateway: ``~/.openfaas/config.yml``, the file that faas-cli reads and writes as well
(specs/openfaas.md §14.1), so that a login with one is a login with the other.

``OPENFAAS_CONFIG`` names another folder; where ``CI`` is ``true`` or ``1`` it is ``./.openfaas``. What we do not know
in the file stays in it.
"""

import base64
import binascii
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from gpufaas_core.errors import GpufaasError
from gpufaas_templates import bounded_yaml

FILE_NAME: Final = "config.yml"


class BadConfig(GpufaasError):
    """The file is not what faas-cli or we would write. It may hold logins: nobody but its owner mends it."""


@dataclass(frozen=True, slots=True)
class Login:
    gateway: str
    auth: str
    """``basic``, or ``oauth2``: a bearer token."""
    token: str
    """Of basic auth: base64 of ``user:password``."""

    @property
    def header(self) -> str:
        """The value of ``Authorization``."""
        return f"{'Basic' if self.auth == 'basic' else 'Bearer'} {self.token}"

    @property
    def user(self) -> str:
        """Empty when there is none to be told."""
        try:
            return base64.b64decode(self.token).decode().partition(":")[0] if self.auth == "basic" else ""
        except (binascii.Error, UnicodeDecodeError):
            return ""


def basic(gateway: str, user: str, password: str) -> Login:
    return Login(gateway, "basic", base64.b64encode(f"{user}:{password}".encode()).decode())


def config_file(env: Mapping[str, str] | None = None) -> Path:
    env = os.environ if env is None else env
    if named := env.get("OPENFAAS_CONFIG"):
        return Path(named).expanduser() / FILE_NAME
    if env.get("CI") in ("true", "1"):
        return Path(".openfaas") / FILE_NAME
    return Path("~/.openfaas").expanduser() / FILE_NAME


def find_login(gateway: str, file: Path | None = None) -> Login | None:
    """
    Return how we are known at *gateway*, a URL as `stack.choose_gateway` gives it.

    :raises BadConfig: the file cannot be read
    """
    for each in _entries(_read(file or config_file())):
        if _same(each, gateway):
            return Login(gateway, str(each.get("auth") or "basic"), str(each.get("token") or ""))
    return None


def save_login(login: Login, file: Path | None = None) -> Path:
    """
    Keep *login*, instead of an older one for the same gateway; return the file, which only its owner can read.

    :raises BadConfig: the file cannot be read or written
    """
    file = file or config_file()
    content = _read(file)
    entry = {"gateway": login.gateway, "auth": login.auth, "token": login.token}
    kept = [each for each in _entries(content) if not _same(each, login.gateway)]
    _write(file, {**content, "auths": [*kept, entry]})
    return file


def remove_login(gateway: str, file: Path | None = None) -> bool:
    """Return False when there was none."""
    file = file or config_file()
    content = _read(file)
    entries = _entries(content)
    kept = [each for each in entries if not _same(each, gateway)]
    if len(kept) == len(entries):
        return False
    _write(file, {**content, "auths": kept})
    return True


def _same(entry: Mapping[str, Any], gateway: str) -> bool:
    return str(entry.get("gateway") or "").rstrip("/").lower() == gateway.rstrip("/").lower()


def _read(file: Path) -> dict[str, Any]:
    try:
        content = bounded_yaml.load(file.read_text())
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise BadConfig(f"{file}: {exc.strerror}: it keeps the logins of gateways") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise BadConfig(f"{file}: it is not YAML: correct it, or remove it and log in again") from exc
    if content is None:
        return {}
    auths = content.get("auths") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not (
        auths is None or (isinstance(auths, list) and all(isinstance(each, dict) for each in auths))
    ):
        raise BadConfig(f"{file}: it is not a list of logins under 'auths': correct it, or remove it and log in again")
    return content


def _entries(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(content.get("auths") or [])


def _write(file: Path, content: Mapping[str, Any]) -> None:
    """Aside first, then renamed: it is never half there, and never open to others, not for a moment."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, encoding="utf-8", delete=False) as aside:  # mode 0600
            yaml.safe_dump(dict(content), aside, sort_keys=False)
        os.replace(aside.name, file)
    except OSError as exc:
        raise BadConfig(
            f"{file} cannot be written: {exc.strerror}: logins are kept there, or in OPENFAAS_CONFIG"
        ) from exc
