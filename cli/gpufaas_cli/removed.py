"""What the CLI had once: each command and flag, and what does it now."""

import os
from collections.abc import Mapping, Sequence
from typing import Final

import click

_PROBLEMS: Final = ("compute", "hardware", "partition", "select", "size", "variants")
COMMANDS: Final[Mapping[str, str]] = {
    "generate": "faas-cli generate -f STACK_FILE",
    **{f"plan {each}": f"gpufaas solve {each} FILE" for each in _PROBLEMS},
    "secret generate": "faas-cli secret generate",
    "secret keygen": "faas-cli secret keygen",
    "secret seal": "faas-cli secret seal PUBLIC_KEY",
    "secret unseal": "faas-cli secret unseal PRIVATE_KEY",
    "store": "faas-cli store list",
    "store deploy": "faas-cli store deploy NAME -g GATEWAY",
    "store describe": "faas-cli store describe NAME",
    "store inspect": "faas-cli store describe NAME",
    "template store": "faas-cli template store list",
    "template store describe": "faas-cli template store describe NAME",
    "template store pull": "faas-cli template store pull NAME",
}

_BUILD: Final = "build and push images with 'docker buildx build --push' or 'faas-cli publish', and deploy them by name"
_PUBLISH: Final = (
    "use 'gpufaas publish' where docker is, or 'faas-cli publish --remote-builder URL --payload-secret FILE'"
)
FLAGS: Final[Mapping[str, str]] = {
    "--builder-push": _BUILD,
    "--builder-secret": _BUILD,
    "--remote-builder": _PUBLISH,
    "--payload-secret": _PUBLISH,
    "--builder-public-key": _PUBLISH,
}

_VARIABLE: Final = "OPENFAAS_REMOTE_BUILDER"


def command(words: Sequence[str]) -> str | None:
    """Return what to say of the command that *words* begin with; None: it was not removed."""
    for count in (3, 2, 1):
        name = " ".join(words[:count])
        if name in COMMANDS:
            return f"'gpufaas {name}' was removed: use '{COMMANDS[name]}'"
    return None


def flag(error: click.UsageError) -> str | None:
    """Return what to say of the flag that *error* does not know; None: it was not removed, or another mistake."""
    name = error.option_name if isinstance(error, click.NoSuchOption) else ""
    return f"{name} was removed: {FLAGS[name]}" if name in FLAGS else None


def check_environment() -> None:
    """:raises click.UsageError: the environment asks for a remote builder"""
    if os.environ.get(_VARIABLE):
        raise click.UsageError(f"{_VARIABLE} is set, and no longer read here: unset it, or use 'faas-cli publish'")
