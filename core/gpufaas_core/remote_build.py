"""
What a client and a remote builder say to each other.

A POST of a tar::

    com.openfaas.docker.config    a `BuildConfig`, JSON
    com.openfaas.secrets          sealed secrets of the build (`sealing`); absent when there are none
    context/...                   the build context, its Dockerfile among it

signed with the payload secret that both sides know. The answer is a `BuildStatus` for each step, one JSON object in a
line; the last one says how it ended.
"""

import hashlib
import hmac
from typing import Final, Literal

from msgspec import Struct, field

CONFIG: Final = "com.openfaas.docker.config"
SECRETS: Final = "com.openfaas.secrets"
CONTEXT: Final = "context"
SIGNATURE_HEADER: Final = "X-Build-Signature"
BUILD_PATH: Final = "/build"
PUBLIC_KEY_PATH: Final = "/publickey"
NDJSON: Final = "application/x-ndjson"

Status = Literal["in_progress", "success", "failed"]
"""``failed``, and not ``failure`` as OpenFaaS's documentation has it: its client takes that for a success."""


class BuildConfig(Struct, frozen=True, rename="camel", omit_defaults=True):
    image: str
    build_args: dict[str, str] = field(default_factory=dict)
    platforms: tuple[str, ...] = ()
    skip_push: bool = False


class BuildStatus(Struct, frozen=True):
    log: list[str] = field(default_factory=list)
    """What is new since the status before."""
    image: str = ""
    status: Status = "in_progress"
    error: str = ""


class Signer:
    """The signature of a body that is given in pieces."""

    def __init__(self, payload_secret: bytes) -> None:
        """White space around the secret is none of it: files end with a newline, and both sides trim it."""
        self._mac = hmac.new(payload_secret.strip(), digestmod=hashlib.sha256)

    def update(self, piece: bytes | bytearray) -> None:
        self._mac.update(piece)

    def header(self) -> str:
        return f"sha256={self._mac.hexdigest()}"

    def matches(self, header: str) -> bool:
        """Whether *header* signs what was given; takes as long for a wrong one as for the right one."""
        return hmac.compare_digest(self.header().encode(), header.strip().encode("utf-8", "replace"))
