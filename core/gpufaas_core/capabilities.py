"""The capabilities of Linux that processes of a function's container may have."""

from typing import Final

from gpufaas_core.errors import InvalidSpec

CAPABILITIES: Final = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID")
"""Needed by images that begin as root and change their user, as nginx does. All others are dropped."""


def read_capabilities(text: str) -> tuple[str, ...]:
    """
    Return those of `CAPABILITIES` that *text* names, which are kept; ``none`` names none.

    :raises InvalidSpec: it names others
    """
    names = {each.removeprefix("CAP_") for each in text.upper().replace(",", " ").split()}
    if names == {"NONE"}:
        return ()
    if not names or not names <= set(CAPABILITIES):
        raise InvalidSpec(f"{text[:80]!r}: name those to keep of {', '.join(CAPABILITIES)}, or write none")
    return tuple(sorted(names))
