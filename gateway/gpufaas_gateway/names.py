"""Which names users may choose for functions, namespaces and secrets, and what is a digest."""

import re
from typing import Final

from gpufaas_core.errors import InvalidSpec

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL: Final = "use at most 63 of a-z, 0-9 and '-', beginning and ending with a letter or digit"
_SUBDOMAIN: Final = re.compile(rf"{_NAME.pattern}(\.{_NAME.pattern})*")
_MAX_SUBDOMAIN: Final = 253
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def check_name(name: str) -> None:
    """:raises InvalidSpec: *name* is not a DNS label, as function names must be"""
    if not _NAME.fullmatch(name):
        raise InvalidSpec(f"service: {name[:80]!r} is not a function name: {_LABEL}")


def check_namespace(name: str) -> None:
    """:raises InvalidSpec: *name* is not a DNS label, or one of Kubernetes' own namespaces"""
    if not _NAME.fullmatch(name) or name.startswith("kube-"):
        raise InvalidSpec(f"name: {name[:80]!r} is not a namespace: {_LABEL}, and not with 'kube-'")


def check_secret(name: str) -> None:
    """:raises InvalidSpec: *name* is not a DNS subdomain, as secret names must be (so they are safe file names)"""
    if len(name) > _MAX_SUBDOMAIN or not _SUBDOMAIN.fullmatch(name):
        raise InvalidSpec(
            f"name: {name[:80]!r} is not a secret's name: use at most {_MAX_SUBDOMAIN} of a-z, 0-9, '-' and '.', "
            "every part between dots beginning and ending with a letter or digit"
        )


def check_digest(digest: str, what: str) -> None:
    """:raises InvalidSpec: *digest* is not a sha256 in lower-case hex; *what* names the field in the message"""
    if not _SHA256.fullmatch(digest):
        raise InvalidSpec(f"{what}: {digest[:80]!r} is not a sha256 digest: 64 lower-case hex digits are expected")
