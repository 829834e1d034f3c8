"""
`EtcdConnection`: requests to etcd's members, of which one is used until it fails; authentication.

Built on aetcd's stubs and messages (`aetcd.rpc`), not on its `Client`: that one has no TLS, does not renew its auth
token, tells no revision of a transaction, and ends watches with the connection (docs/adr/0021).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from aetcd import rpc

from gpufaas_adapters.etcd.client.failures import EtcdUnreachable, failure_of, is_token_trouble
from gpufaas_adapters.etcd.client.settings import EtcdSettings, address_of
from gpufaas_core.errors import InvalidSpec, StorageFailed
from gpufaas_core.units import Seconds

log = logging.getLogger(__name__)

Metadata: TypeAlias = tuple[tuple[str, str], ...]

REQUIRE_LEADER: Final[Metadata] = (("hasleader", "true"),)
"""Metadata of streams: a member that is cut from the others ends them, instead of keeping them silent."""

_RECONNECT_MS: Final = 500
_CONNECT_MS: Final = 2_000
"""For one try; an etcd whose machine is busy, or that has just started, needs more than a moment for the handshake."""
# gRPC's own backoff goes up to two minutes: a watch would come back that long after etcd did. Pings find out about a
# connection that is cut without a word; etcd refuses clients that ping more often than every 5 s.
_CHANNEL: Final = (
    ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS),
    ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", 2 * _RECONNECT_MS),
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)


class Member:
    """One endpoint and its channel, which connects when it is needed, and again after it was cut."""

    def __init__(self, endpoint: str, credentials: Any) -> None:
        self.endpoint = endpoint
        address = address_of(endpoint)
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(address, options=_CHANNEL)
        else:
            self.channel = grpc.aio.secure_channel(address, credentials, options=_CHANNEL)
        self.kv: Any = rpc.KVStub(self.channel)
        self.lease: Any = rpc.LeaseStub(self.channel)
        self.watch: Any = rpc.WatchStub(self.channel)
        self.auth: Any = rpc.AuthStub(self.channel)


class EtcdConnection:
    """
    Belongs to the event loop on which it is opened, or first used; it is never used across a fork.

    :raises InvalidSpec: a certificate or key cannot be read
    """

    def __init__(self, settings: EtcdSettings) -> None:
        self.settings = settings
        self.loop: asyncio.AbstractEventLoop | None = None
        """None until it is used."""
        self._credentials = _credentials(settings)
        self._members: list[Member] = []
        self._current = 0
        self._token: Metadata = ()
        self._token_lock = asyncio.Lock()
        self._closed = False

    def open(self) -> None:
        """:raises StorageFailed: it was closed"""
        if self._closed:
            raise self._is_closed()
        loop = asyncio.get_running_loop()
        if self.loop is None:
            self.loop = loop
            self._members = [Member(each, self._credentials) for each in self.settings.endpoints]
        elif self.loop is not loop:
            raise RuntimeError("Etcd is used on another event loop than it belongs to")

    async def close(self) -> None:
        self._closed = True
        for member in self._members:
            await member.channel.close()

    @property
    def endpoint(self) -> str:
        """The endpoint in use, or the one that is tried next."""
        return self.settings.endpoints[self._current]

    async def call(
        self,
        what: str,
        method: Callable[[Member], Callable[..., Awaitable[Any]]],
        request: Any,
        *,
        reads: bool = False,
        timeout_s: Seconds | None = None,
    ) -> Any:
        """
        Ask one member after the other until one answers. A request that changes something is sent to another member
        only if it has not left this process: etcd cannot tell that a write came twice.

        :param what: for messages: a verb and its object
        :param reads: the request changes nothing, or nothing that matters if it comes twice
        """
        end = time.monotonic() + (timeout_s or self.settings.timeout_s)
        tried, renewed = 0, False
        while True:
            member = self.member()
            left = end - time.monotonic()
            try:
                metadata = await self.authenticated(member, left)
                return await method(member)(request, timeout=max(left, 0.001), metadata=metadata)
            except asyncio.CancelledError:
                self.check_closed()
                raise
            except grpc.aio.AioRpcError as exc:
                if self.settings.user and not renewed and is_token_trouble(exc.details() or ""):
                    renewed = True
                    self.forget_token()
                    continue
                failure = self.failed(exc, member, what)
                if not isinstance(failure, EtcdUnreachable):
                    raise failure from exc
                tried += 1
                again = (reads or not failure.maybe_done) and tried < len(self._members) and time.monotonic() < end
                if not again:
                    raise failure from exc

    # --- for streams ---

    def member(self) -> Member:
        if self._closed or asyncio.get_running_loop() is not self.loop:
            self.open()
        return self._members[self._current]

    async def authenticated(self, member: Member, timeout_s: Seconds) -> Metadata:
        """Return the metadata that authenticate a request."""
        if not self.settings.user or self._token:
            return self._token
        async with self._token_lock:
            if not self._token:
                request = rpc.AuthenticateRequest(name=self.settings.user, password=self.settings.password)
                try:
                    answer = await member.auth.Authenticate(request, timeout=max(timeout_s, 0.001))
                except grpc.aio.AioRpcError as exc:
                    # As etcd's own client does: so a cluster can be told its user before etcd asks for one.
                    if "authentication is not enabled" not in (exc.details() or ""):
                        raise
                    log.warning("etcd.auth_not_enabled endpoint=%s user=%s", member.endpoint, self.settings.user)
                    return ()
                self._token = (("token", answer.token),)
            return self._token

    def forget_token(self) -> None:
        """Let the next request ask for another token: etcd has forgotten ours."""
        self._token = ()

    def failed(self, exc: grpc.aio.AioRpcError, member: Member, what: str) -> StorageFailed:
        """Return the error to raise. If *member* could not be reached, the next one is used from now on."""
        failure = failure_of(exc, self.settings, member.endpoint, what)
        if isinstance(failure, EtcdUnreachable):
            self.leave(member)
        return failure

    def leave(self, member: Member) -> None:
        """Use the next member from now on, unless another task left this one first."""
        if self._members[self._current] is member:
            self._current = (self._current + 1) % len(self._members)

    def check_closed(self) -> None:
        """
        gRPC cancels the tasks that wait on a channel when it is closed.

        :raises StorageFailed: that is why this task was cancelled
        """
        task = asyncio.current_task()
        if self._closed and task is not None and not task.cancelling():
            raise self._is_closed() from None

    def _is_closed(self) -> StorageFailed:
        return StorageFailed(f"the connection to etcd at {self.endpoint} is closed: this process is stopping")


def _credentials(settings: EtcdSettings) -> Any:
    if not settings.tls:
        return None

    def read(path: Path | None, what: str) -> bytes | None:
        try:
            return path.read_bytes() if path else None
        except OSError as exc:
            raise InvalidSpec(f"etcd: the {what} {path} cannot be read: {exc.strerror}") from exc

    return grpc.ssl_channel_credentials(
        read(settings.ca, "CA certificate"), read(settings.key, "client key"), read(settings.cert, "client certificate")
    )
