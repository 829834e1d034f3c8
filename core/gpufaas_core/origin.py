"""
The addresses by which workers call the platform: each has its own, so that a call which a handler makes is known for
one, whatever client makes it. ``http://gateway:8080/from/TOKEN`` in ``OPENFAAS_URL``; what follows is as without it.

The token is signed and says which worker it is of, so that any gateway that has the key can read it, and asks nobody.
"""

import base64
import binascii
import hashlib
import hmac
import os
from typing import Final

from gpufaas_core.grant import Outer
from gpufaas_core.model import DeviceId, FunctionId

PREFIX: Final = "/from/"
GATEWAY_NAMES: Final = ("gateway", "gateway.openfaas", "gateway.openfaas.svc", "gateway.openfaas.svc.cluster.local")
"""Names by which functions call OpenFaaS's gateway."""
_SIGNATURE_BYTES: Final = 16


class Origins:
    """Makes and reads tokens. *key*: that of the process which makes them and of those which read them."""

    def __init__(self, key: bytes = b"") -> None:
        """:param key: empty: a random one, for a platform that is one process"""
        self._key = hmac.digest(key or os.urandom(32), b"gpufaas: calls of workers", hashlib.sha256)

    def address(self, gateway: str, worker: Outer) -> str:
        """Return the URL of *gateway* as *worker* is to call it."""
        said = f"{worker.device}\n{worker.function}\n{worker.copy}".encode()
        token = base64.urlsafe_b64encode(self._sign(said) + said).rstrip(b"=").decode()
        return f"{gateway.rstrip('/')}{PREFIX}{token}"

    def read(self, token: str) -> Outer | None:
        """Return the worker that *token* was made for; None: it was not made with our key."""
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True)
        except (ValueError, binascii.Error):
            return None
        signature, said = raw[:_SIGNATURE_BYTES], raw[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._sign(said)):
            return None
        device, function, copy = said.decode().split("\n")
        return Outer(DeviceId(device), FunctionId(function), int(copy))

    def _sign(self, said: bytes) -> bytes:
        return hmac.digest(self._key, said, hashlib.sha256)[:_SIGNATURE_BYTES]


def without_origin(path: str) -> tuple[str, str]:
    """Return the token that *path* begins with (empty: none) and the path that is meant."""
    if not path.startswith(PREFIX):
        return "", path
    token, _, rest = path[len(PREFIX) :].partition("/")
    return token, f"/{rest}"
