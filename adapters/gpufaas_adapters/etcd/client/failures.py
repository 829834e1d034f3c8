"""
What can go wrong with etcd, and what gRPC and etcd report of it as our errors: one line that says what was asked, what
is the case, what to do.
"""

import re
from typing import Final

import grpc
import grpc.aio

from gpufaas_adapters.etcd.client.settings import EtcdSettings
from gpufaas_core.errors import StorageAway, StorageFailed


class EtcdUnreachable(StorageAway):
    """etcd does not answer: try again later. With `maybe_done`, a write may have been done."""

    def __init__(self, message: str, maybe_done: bool = True) -> None:
        super().__init__(message)
        self.maybe_done = maybe_done


class EtcdRefused(StorageFailed):
    """etcd answers and refuses, and will until its configuration or ours is changed."""


class EtcdFull(StorageFailed):
    """etcd's database has reached its quota: it only reads and deletes until an operator makes room."""


class Compacted(EtcdRefused):
    """etcd has dropped the history that was asked for."""


class ForeignKeys(EtcdRefused):
    """The keys below our prefix are not ours, or of a version that this one does not know."""


_TOKEN_TROUBLE: Final = ("invalid auth token", "user name is empty", "revision of auth store is old")
"""What etcd says of a token that it forgot (a restart, five idle minutes) or that is older than its users."""
_MESSAGES: Final[tuple[tuple[tuple[str, ...], type[StorageFailed], str], ...]] = (
    (
        ("NOSPACE", "database space exceeded"),
        EtcdFull,
        "its database is full (alarm NOSPACE): compact and defragment it, then 'etcdctl alarm disarm', or raise "
        "--quota-backend-bytes",
    ),
    (("request is too large", "larger than max", "too many operations"), EtcdRefused, "{details}: write less at once"),
    (("user name is empty",), EtcdRefused, "it asks for a user: give one with its password"),
    (("invalid user ID or password",), EtcdRefused, "it does not know the user {user}, or not by that password"),
    (("has been compacted",), Compacted, "{details}"),
    (("requested lease not found",), EtcdRefused, "the lease has ended"),
)
"""By words in etcd's own message, the first that fits."""


def is_token_trouble(text: str) -> bool:
    """Whether etcd asks for a new auth token."""
    return any(word in text for word in _TOKEN_TROUBLE)


def failure_of(exc: grpc.aio.AioRpcError, settings: EtcdSettings, endpoint: str, what: str) -> StorageFailed:
    """Return the error of a request to *endpoint*. *what* was asked is a verb with its object: ``read v1/meta``."""
    code, details = exc.code(), exc.details() or ""
    at = f"cannot {what} in etcd at {endpoint}"
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return not_allowed(settings, endpoint, what)
    for words, kind, text in _MESSAGES:
        if any(word in details for word in words):
            return kind(f"{at}: {text.format(details=_short(details), user=settings.user)}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return EtcdUnreachable(f"{at}: no answer in time: see whether it is overloaded, stopped or cut off")
    if "handshake" in details.lower() or "certificate" in details.lower():
        why = "see whether the certificates given for etcd are the right ones, and it speaks TLS"
        return EtcdUnreachable(f"{at}: no TLS connection ({_short(details)}): {why}", maybe_done=False)
    if code is grpc.StatusCode.UNAVAILABLE:
        unsent = any(word in details for word in ("failed to connect", "no leader", "onnection refused"))
        advice = "start it, or give the right endpoint"
        if "no leader" in details:
            advice = "its cluster has lost its majority: bring members back"
        elif not settings.tls:
            advice += " (with certificates, if it speaks TLS)"
        return EtcdUnreachable(f"{at}: {_short(details)}: {advice}", maybe_done=not unsent)
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.UNIMPLEMENTED):
        return EtcdRefused(f"{at}: {_short(details)}")
    return EtcdUnreachable(f"{at}: {_short(details)} ({code.name}): look into etcd's log")


def not_allowed(settings: EtcdSettings, endpoint: str, what: str) -> EtcdRefused:
    who = f"the user {settings.user}" if settings.user else "who gives no user"
    return EtcdRefused(
        f"cannot {what} in etcd at {endpoint}: {who} may not: grant a role that reads and writes {settings.prefix}/ "
        "and all below it"
    )


def _short(details: str) -> str:
    """gRPC tells the last of several causes last, behind an address that the message has already."""
    last = re.sub(r"^[A-Z_]+: ipv[46]:\S+: ", "", details.rpartition("last error: ")[2])
    return (
        last.removeprefix("Failed to connect to remote host: ").removeprefix("etcdserver: ").strip()[:200]
        or "no reason given"
    )
