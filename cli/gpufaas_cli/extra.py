"""Says which extra of the package is missing, where a command cannot start without it."""

import contextlib
from collections.abc import Generator

import click

from gpufaas_core.errors import GpufaasError, InvalidSpec


@contextlib.contextmanager
def needing(command: str, extras: str) -> Generator[None]:
    """:raises GpufaasError: a package cannot be imported inside; names what to install"""
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.startswith("gpufaas"):
            raise
        raise GpufaasError(
            f"'gpufaas {command}' needs {exc.name}, which is not installed: pip install 'gpufaas[{extras}]'"
        ) from exc
    except InvalidSpec as exc:
        raise click.UsageError(str(exc)) from exc
