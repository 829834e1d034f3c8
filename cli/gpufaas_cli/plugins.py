"""
Plugins: executables that become commands, by their file names. Those of faas-cli are used,
too: ``~/.gpufaas/plugins`` goes before ``~/.openfaas/plugins``, and our own commands go before both.
"""

import os
import re
from pathlib import Path
from typing import Final, NoReturn

from gpufaas_core.errors import GpufaasError

_DIRS: Final = ("~/.gpufaas/plugins", "~/.openfaas/plugins")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def installed() -> dict[str, Path]:
    """Return the plugins that there are by their names, sorted."""
    found: dict[str, Path] = {}
    for each in _DIRS:
        try:
            files = sorted(Path(each).expanduser().iterdir())
        except OSError:
            continue
        for file in files:
            if _NAME.fullmatch(file.name) and file.is_file() and os.access(file, os.X_OK):
                found.setdefault(file.name, file)
    return dict(sorted(found.items()))


def run(plugin: Path, arguments: list[str]) -> NoReturn:
    """
    Replace this process by *plugin*.

    :raises GpufaasError: it does not start
    """
    try:
        os.execv(plugin, [str(plugin), *arguments])
    except OSError as exc:
        raise GpufaasError(f"the plugin {plugin} does not start: {exc.strerror}") from exc
