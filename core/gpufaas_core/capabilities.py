"""The capabilities of Linux that processes of a function's container may have."""

import re
from typing import Final

from gpufaas_core.errors import InvalidSpec

CAPABILITIES: Final = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID")
"""Needed by images that begin as root and change their user, as nginx does. All others are dropped."""


def read_capabilities(text: str) -> tuple[str, ...]:
    """
    Return those of `CAPABILITIES` that *text* names, which are kept; ``none`` names none.

    :raises InvalidSpec: it names others
    """
    names = [each.upper().removeprefix("CAP_") for each in re.split(r"[\s,]+", text.strip())]
    if names == ["NONE"]:
        return ()
    if unknown := [each for each in names if each not in CAPABILITIES]:
        raise InvalidSpec(
            f"{unknown[0][:80]!r} is none that a container has: name those to keep of {', '.join(CAPABILITIES)}, or "
            "write none"
        )
    return tuple(sorted(set(names)))
