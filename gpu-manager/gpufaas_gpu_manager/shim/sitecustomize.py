"""
Runs first in a Python server whose port is fixed in its code, as in OpenFaaS's templates (5000): it listens on PORT.

In containers each has a port 5000 of its own; processes share the machine's. What it calls is left alone.
"""

import os
import socket
from typing import Any

_FIXED = int(os.environ.get("GPUFAAS_FIXED_PORT", "0"))
_bind = socket.socket.bind


def _bind_instead(self: socket.socket, address: Any, /) -> None:
    if _FIXED and isinstance(address, tuple) and len(address) >= 2 and address[1] == _FIXED:
        address = (address[0], int(os.environ["PORT"]), *address[2:])
    _bind(self, address)


socket.socket.bind = _bind_instead  # type: ignore[method-assign, assignment]
