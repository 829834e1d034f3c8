"""
`Etcd`: what we ask of etcd, on asyncio. The only module that knows the client library.

Built on aetcd's stubs and messages (`aetcd.rpc`), not on its `Client`: that one has no TLS, does not renew its auth
token, tells no revision of a transaction, and ends watches with the connection (docs/adr/0021).

Keys are text below the prefix, as docs/etcd-keys.md writes them: ``v1/functions/openfaas-fn/echo``. Values are bytes.
Nothing here waits without a limit but `Etcd.watch`, whose business it is. Several endpoints are members of one cluster:
one is used until it fails, then the next.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias, TypeVar

import grpc
import grpc.aio
import msgspec
from aetcd import rpc
from msgspec import Struct

from gpufaas_core.errors import InvalidSpec, StorageAway, StorageFailed
from gpufaas_core.units import Bytes, MiB, Seconds

log = logging.getLogger(__name__)

_T = TypeVar("_T")

DEFAULT_PREFIX: Final = "/gpufaas"
LAYOUT: Final = 1
"""Of the keys below ``v1/``; one that cannot be read by this version gets the next number, and a folder of its own."""
META: Final = "v1/meta"
MAX_OPERATIONS: Final = 128
"""In one transaction; etcd's own limit (``--max-txn-ops``)."""
MAX_VALUE: Final[Bytes] = 1 * MiB
"""A value that is safe to write: etcd takes 1.5 MiB for a whole request (``--max-request-bytes``)."""

_PAGE: Final = 500
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
# A member that is cut from the others ends streams that say so, instead of keeping them silent.
_REQUIRE_LEADER: Final = (("hasleader", "true"),)
_BACKOFF_S: Final = (0.02, 0.1, 0.25, 0.5, 1.0)


class EtcdUnreachable(StorageAway):
    """etcd does not answer. It will again: try later. A write may have been done all the same (`maybe_done`)."""

    def __init__(self, message: str, maybe_done: bool = True) -> None:
        super().__init__(message)
        self.maybe_done = maybe_done


class EtcdRefused(StorageFailed):
    """etcd answers, and will say no until somebody changes its or our configuration."""


class EtcdFull(StorageFailed):
    """etcd's database has reached its quota: it only reads and deletes until an operator makes room."""


class _Compacted(EtcdRefused):
    """The revision that was asked for is history that etcd has dropped."""


class ForeignKeys(EtcdRefused):
    """What is below our prefix is not ours, or of a version that we do not know."""


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """
    Where etcd is and who we are to it.

    :raises InvalidSpec: what does not go together; files are read by `Etcd`
    """

    endpoints: tuple[str, ...] = ("127.0.0.1:2379",)
    """HOST:PORT, or a URL as etcd itself writes it (``https://`` asks for TLS)."""
    prefix: str = DEFAULT_PREFIX
    ca: Path | None = None
    """Certificates of who may have signed etcd's; with it, or with *cert*, the connection is TLS."""
    cert: Path | None = None
    key: Path | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    timeout_s: Seconds = 5.0
    """Of one request, with its repetitions at other endpoints."""

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise InvalidSpec("etcd: no endpoint is given: name at least one, as HOST:PORT")
        for endpoint in self.endpoints:
            _address_of(endpoint)
        if bool(self.cert) != bool(self.key):
            raise InvalidSpec("etcd: a client certificate and its key go together: give both, or neither")
        if bool(self.user) != bool(self.password):
            raise InvalidSpec("etcd: a user and a password go together: give both, or neither")
        if not self.prefix.strip("/") or self.prefix.endswith("/"):
            raise InvalidSpec(f"etcd: {self.prefix!r} is no prefix for our keys: write for example {DEFAULT_PREFIX}")

    @property
    def tls(self) -> bool:
        return bool(self.ca or self.cert) or any(each.startswith("https://") for each in self.endpoints)


def _address_of(endpoint: str) -> str:
    address = endpoint.removeprefix("http://").removeprefix("https://").rstrip("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or "/" in address:
        raise InvalidSpec(f"etcd: {endpoint[:200]!r} is not an endpoint: write HOST:PORT, for example 10.0.0.5:2379")
    return address


# --- what is read and written ---


class Item(Struct, frozen=True):
    """A key as it is. `create_revision` stays while it exists, `mod_revision` is of its last change."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


class Put(Struct, frozen=True, tag=True):
    """Seen by a watch: *item* is there, or has another value."""

    item: Item


class Deleted(Struct, frozen=True, tag=True):
    """Seen by a watch: the key is gone, by a hand or with its lease."""

    key: str
    revision: int


class Listed(Struct, frozen=True, tag=True):
    """All that is there has been told; what follows happened later. Comes again after a gap in a watch was closed."""

    revision: int


Change: TypeAlias = Put | Deleted | Listed


class Compare(Struct, frozen=True):
    """A condition of a transaction; made by the functions below."""

    key: str
    target: Literal["value", "mod", "create", "version", "lease"]
    expected: bytes | int
    result: Literal["==", "!=", "<", ">"] = "=="


def absent(key: str) -> Compare:
    return Compare(key, "create", 0)


def present(key: str) -> Compare:
    return Compare(key, "create", 0, "!=")


def unchanged(key: str, mod_revision: int) -> Compare:
    """Nobody wrote it since it was read; 0: it was not there, and still is not."""
    return Compare(key, "mod", mod_revision)


def created_at(key: str, create_revision: int) -> Compare:
    """It was not deleted since, not even to be made anew."""
    return Compare(key, "create", create_revision)


class DoPut(Struct, frozen=True):
    key: str
    value: bytes
    lease: int = 0


class DoDelete(Struct, frozen=True):
    key: str


class DoDeletePrefix(Struct, frozen=True):
    prefix: str


class DoGet(Struct, frozen=True):
    key: str


class DoRange(Struct, frozen=True):
    prefix: str


Operation: TypeAlias = DoPut | DoDelete | DoDeletePrefix | DoGet | DoRange


class Outcome(Struct, frozen=True):
    """What a transaction did, all of it at `revision`."""

    succeeded: bool
    revision: int
    found: tuple[tuple[Item, ...], ...]
    """What each of the operations that were carried out read; empty of those that read nothing."""


class Range(Struct, frozen=True):
    """Items ordered by key, as they were at `revision`: what happened later is what a watch from there tells."""

    items: tuple[Item, ...]
    revision: int


class Etcd:
    """
    A connection to etcd. Belongs to the event loop that it is first used on; never used across a fork.

    Every method raises a `StorageFailed` that names the endpoint: `EtcdUnreachable`, `EtcdRefused`, `EtcdFull`.

    :raises InvalidSpec: a certificate or key cannot be read
    """

    def __init__(self, settings: EtcdSettings, clock: Callable[[], Seconds] | None = None) -> None:
        self.settings = settings
        self.clock: Callable[[], Seconds] = clock or boottime
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop that it belongs to; None until it is used."""
        self._prefix = f"{settings.prefix}/"
        self._credentials = _credentials(settings)
        self._members: list[_Member] = []
        self._current = 0
        self._token: tuple[tuple[str, str], ...] = ()
        self._token_lock = asyncio.Lock()
        self._leases: set[Lease] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End watches and keep-alives. Leases are not revoked: what is under them stays until it times out."""
        self._closed = True
        for lease in list(self._leases):
            await lease.abandon()
        for member in self._members:
            await member.channel.close()

    @property
    def endpoint(self) -> str:
        """The one in use, or the next to be tried."""
        return self.settings.endpoints[self._current]

    # --- keys ---

    async def get(self, key: str) -> Item | None:
        request = rpc.RangeRequest(key=self._key(key))
        found = await self._call(f"read {key}", lambda to: to.kv.Range, request, reads=True)
        return self._item(found.kvs[0]) if found.kvs else None

    async def range(self, prefix: str) -> Range:
        """Return all that begins with *prefix*, of one moment however much it is."""
        start, end = self._span(prefix)
        items: list[Item] = []
        revision = 0
        while True:
            request = rpc.RangeRequest(key=start, range_end=end, limit=_PAGE, revision=revision)
            try:
                page = await self._call(f"list {prefix}", lambda to: to.kv.Range, request, reads=True)
            except _Compacted:
                # Between two pages: begin anew. Compactions are minutes apart.
                items.clear()
                (start, _), revision = self._span(prefix), 0
                continue
            revision = revision or page.header.revision
            items += map(self._item, page.kvs)
            if not page.more:
                return Range(tuple(items), revision)
            start = page.kvs[-1].key + b"\0"

    async def keys(self, prefix: str, limit: int = 0) -> list[str]:
        """Return the keys that begin with *prefix*, in order, without their values; 0: no limit."""
        start, end = self._span(prefix)
        request = rpc.RangeRequest(key=start, range_end=end, keys_only=True, limit=limit)
        found = await self._call(f"list {prefix}", lambda to: to.kv.Range, request, reads=True)
        return [self._name(each.key) for each in found.kvs]

    async def count(self, prefix: str) -> int:
        start, end = self._span(prefix)
        request = rpc.RangeRequest(key=start, range_end=end, count_only=True)
        found = await self._call(f"count {prefix}", lambda to: to.kv.Range, request, reads=True)
        return int(found.count)

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write; return the revision. On a majority of the members' disks when it returns."""
        request = rpc.PutRequest(key=self._key(key), value=value, lease=lease)
        done = await self._call(f"write {key}", lambda to: to.kv.Put, request)
        return int(done.header.revision)

    async def delete(self, key: str) -> bool:
        """Return whether it was there."""
        request = rpc.DeleteRangeRequest(key=self._key(key))
        done = await self._call(f"delete {key}", lambda to: to.kv.DeleteRange, request)
        return bool(done.deleted)

    async def delete_prefix(self, prefix: str) -> int:
        """Return how many there were."""
        start, end = self._span(prefix)
        request = rpc.DeleteRangeRequest(key=start, range_end=end)
        done = await self._call(f"delete {prefix}", lambda to: to.kv.DeleteRange, request)
        return int(done.deleted)

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> Outcome:
        """Carry out *then* if all of *compares* hold, else *otherwise*, in one step. At most `MAX_OPERATIONS` each."""
        request = rpc.TxnRequest(
            compare=[self._compare(each) for each in compares],
            success=[self._operation(each) for each in then],
            failure=[self._operation(each) for each in otherwise],
        )
        first = next((each for each in (*then, *otherwise, *compares)), None)
        what = f"change {getattr(first, 'key', None) or getattr(first, 'prefix', '')}"
        reads = all(isinstance(each, DoGet | DoRange) for each in (*then, *otherwise))
        done = await self._call(what, lambda to: to.kv.Txn, request, reads=reads)
        found = tuple(tuple(map(self._item, each.response_range.kvs)) for each in done.responses)
        return Outcome(done.succeeded, done.header.revision, found)

    # --- leases ---

    async def grant(self, ttl_s: int) -> "Lease":
        """
        Return a lease that is kept alive until it is revoked or abandoned; what is put under it goes when it ends.

        :param ttl_s: etcd's least is about 2 s, and it is late by up to one
        """
        asked_at = self.clock()
        granted = await self._grant(ttl_s)
        lease = Lease(self, int(granted.ID), float(min(ttl_s, granted.TTL)), asked_at)
        self._leases.add(lease)
        return lease

    async def grant_once(self, ttl_s: int) -> int:
        """Return a lease that nobody keeps alive: what is put under it is forgotten after about so long."""
        return int((await self._grant(ttl_s)).ID)

    async def _grant(self, ttl_s: int) -> Any:
        # A lease that was granted without our knowing is nobody's, and ends by itself: it may be asked for again.
        request = rpc.LeaseGrantRequest(TTL=ttl_s)
        return await self._call("grant a lease", lambda to: to.lease.LeaseGrant, request, reads=True)

    async def _revoke(self, lease: int) -> None:
        await self._call("revoke a lease", lambda to: to.lease.LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease))

    async def _keep_alive(self, lease: int, timeout_s: Seconds) -> float:
        """Return the seconds that it has; 0: it has ended."""

        def once(to: "_Member") -> Callable[..., Awaitable[Any]]:
            async def ask(request: Any, timeout: Seconds, metadata: Any) -> Any:
                stream = to.lease.LeaseKeepAlive(timeout=timeout, metadata=(*metadata, *_REQUIRE_LEADER))
                try:
                    await stream.write(request)
                    answer = await stream.read()
                    if answer is grpc.aio.EOF:
                        raise EtcdUnreachable(f"etcd at {to.endpoint} ended a keep-alive without an answer")
                    return answer
                finally:
                    stream.cancel()

            return ask

        request = rpc.LeaseKeepAliveRequest(ID=lease)
        answer = await self._call("keep a lease", once, request, reads=True, timeout_s=timeout_s)
        return float(answer.TTL)

    # --- watches ---

    async def watch(
        self, prefix: str, *, exact: bool = False, on_trouble: Callable[[StorageFailed], None] | None = None
    ) -> AsyncGenerator[Change]:
        """
        Yield what is there (`Put`), then `Listed`, then each change as it comes, for ever: it outlives etcd's
        restarts, and misses nothing that is still there. What came and went while nobody could tell is not told.

        :param exact: *prefix* is a key, and nothing else is meant
        :param on_trouble: told whenever etcd does not answer; it is asked again after at most a second
        :raises EtcdRefused: we may not watch this
        """
        known: dict[str, int] = {}
        revision = 0  # up to which all is told; 0: to be listed
        failures = 0
        while True:
            try:
                if not revision:
                    if exact:
                        now = await self.txn((), (DoGet(prefix),))
                        listed = Range(now.found[0], now.revision)
                    else:
                        listed = await self.range(prefix)
                    there = {item.key for item in listed.items}
                    for key in [key for key in known if key not in there]:
                        del known[key]
                        yield Deleted(key, listed.revision)
                    for item in listed.items:
                        if known.get(item.key) != item.mod_revision:
                            known[item.key] = item.mod_revision
                            yield Put(item)
                    revision = listed.revision
                    yield Listed(revision)
                async with aclosing(self._follow(prefix, exact, revision)) as stream:
                    async for response in stream:
                        failures = 0
                        if response is None:
                            revision = 0
                            break
                        for event in response.events:
                            key, at = self._name(event.kv.key), int(event.kv.mod_revision)
                            if event.type == rpc.Event.EventType.DELETE:
                                known.pop(key, None)
                                yield Deleted(key, at)
                            else:
                                known[key] = at
                                yield Put(self._item(event.kv))
                        # Beside events the header tells where the store is, not where this watch is.
                        if response.events:
                            revision = int(response.events[-1].kv.mod_revision)
                        elif not response.created:
                            revision = max(revision, int(response.header.revision))
            except EtcdUnreachable as exc:
                if on_trouble is not None:
                    on_trouble(exc)
                # The first time nearly at once: with several members another one answers.
                await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1

    async def _follow(self, prefix: str, exact: bool, revision: int) -> AsyncGenerator[Any]:
        """Yield etcd's answers from after *revision*; None: they cannot be had any more, list again."""
        start, end = (self._key(prefix), b"") if exact else self._span(prefix)
        create = rpc.WatchCreateRequest(key=start, range_end=end, start_revision=revision + 1, progress_notify=True)
        member = self._member()
        stream = None
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                metadata = await self._authenticated(member, self.settings.timeout_s)
                stream = member.watch.Watch(metadata=(*metadata, *_REQUIRE_LEADER))
                await stream.write(rpc.WatchRequest(create_request=create))
                response = await stream.read()
            if response is not grpc.aio.EOF and response.created and response.header.revision < revision:
                yield None  # etcd was restored from a backup: its revisions began anew
                return
            while response is not grpc.aio.EOF:
                if response.compact_revision:
                    yield None
                    return
                if response.canceled:
                    raise self._cancelled(member, prefix, response.cancel_reason)
                yield response
                response = await stream.read()
            raise EtcdUnreachable(f"etcd at {member.endpoint} ended the watch of {prefix}", maybe_done=False)
        except TimeoutError:
            self._leave(member)
            raise EtcdUnreachable(
                f"etcd at {member.endpoint} did not begin to watch {prefix} within {self.settings.timeout_s:g} s",
                maybe_done=False,
            ) from None
        except asyncio.CancelledError:
            self._check_closed()
            raise
        except grpc.aio.AioRpcError as exc:
            failure = self._failure(exc, member, f"watch {prefix}")
            if isinstance(failure, EtcdUnreachable):
                self._leave(member)
            raise failure from exc
        finally:
            if stream is not None:
                stream.cancel()

    def _cancelled(self, member: "_Member", prefix: str, reason: str) -> StorageFailed:
        if any(word in reason for word in _TOKEN_TROUBLE):
            self._token = ()
            return EtcdUnreachable(f"etcd at {member.endpoint} forgot who watches {prefix}", maybe_done=False)
        if "permission denied" in reason or "user name is empty" in reason:
            return EtcdRefused(self._not_allowed(member, f"watch {prefix}"))
        return EtcdUnreachable(f"etcd at {member.endpoint} ended the watch of {prefix}: {reason}", maybe_done=False)

    # --- requests ---

    async def _call(
        self,
        what: str,
        method: Callable[["_Member"], Callable[..., Awaitable[Any]]],
        request: Any,
        *,
        reads: bool = False,
        timeout_s: Seconds | None = None,
    ) -> Any:
        """
        Ask one member after the other until one answers; at another only what changes nothing (*reads*), or has not
        left us: etcd cannot tell that a write came twice.
        """
        end = time.monotonic() + (timeout_s or self.settings.timeout_s)
        tried, renewed = 0, False
        while True:
            member = self._member()
            left = end - time.monotonic()
            try:
                metadata = await self._authenticated(member, left)
                return await method(member)(request, timeout=max(left, 0.001), metadata=metadata)
            except asyncio.CancelledError:
                self._check_closed()
                raise
            except grpc.aio.AioRpcError as exc:
                if self.settings.user and not renewed and any(word in (exc.details() or "") for word in _TOKEN_TROUBLE):
                    renewed = True
                    self._token = ()
                    continue
                failure = self._failure(exc, member, what)
                if not isinstance(failure, EtcdUnreachable):
                    raise failure from exc
                self._leave(member)
                tried += 1
                again = (reads or not failure.maybe_done) and tried < len(self._members) and time.monotonic() < end
                if not again:
                    raise failure from exc

    async def _authenticated(self, member: "_Member", timeout_s: Seconds) -> tuple[tuple[str, str], ...]:
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

    def _open(self) -> None:
        if self._closed:
            raise self._is_closed()
        loop = asyncio.get_running_loop()
        if self.loop is None:
            self.loop = loop
            self._members = [_Member(each, self._credentials) for each in self.settings.endpoints]
        elif self.loop is not loop:
            raise RuntimeError("Etcd is used on another event loop than it belongs to")

    def _is_closed(self) -> StorageFailed:
        return StorageFailed(f"the connection to etcd at {self.endpoint} is closed: this process is stopping")

    def _check_closed(self) -> None:
        """gRPC cancels whoever waits when a channel is closed, who was not cancelled by that."""
        task = asyncio.current_task()
        if self._closed and task is not None and not task.cancelling():
            raise self._is_closed() from None

    def _member(self) -> "_Member":
        if self._closed or asyncio.get_running_loop() is not self.loop:
            self._open()
        return self._members[self._current]

    def _leave(self, member: "_Member") -> None:
        """Use the next one from now on, unless somebody else found out first."""
        if self._members[self._current] is member:
            self._current = (self._current + 1) % len(self._members)

    def _failure(self, exc: grpc.aio.AioRpcError, member: "_Member", what: str) -> StorageFailed:
        """Say in one line what was asked, what is the case and what to do."""
        code, details = exc.code(), exc.details() or ""
        at = f"cannot {what} in etcd at {member.endpoint}"
        if "NOSPACE" in details or "database space exceeded" in details:
            return EtcdFull(
                f"{at}: its database is full (alarm NOSPACE): compact and defragment it, then 'etcdctl alarm disarm', "
                "or raise --quota-backend-bytes"
            )
        if any(word in details for word in ("request is too large", "larger than max", "too many operations")):
            return EtcdRefused(f"{at}: {_short(details)}: write less at once")
        if code is grpc.StatusCode.PERMISSION_DENIED:
            return EtcdRefused(self._not_allowed(member, what))
        if "user name is empty" in details:
            return EtcdRefused(f"{at}: it asks for a user: give one with its password")
        if "invalid user ID or password" in details:
            return EtcdRefused(f"{at}: it does not know the user {self.settings.user}, or not by that password")
        if "has been compacted" in details:
            return _Compacted(f"{at}: {_short(details)}")
        if "requested lease not found" in details:
            return EtcdRefused(f"{at}: the lease has ended")
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
            elif not self.settings.tls:
                advice += " (with certificates, if it speaks TLS)"
            return EtcdUnreachable(f"{at}: {_short(details)}: {advice}", maybe_done=not unsent)
        if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.UNIMPLEMENTED):
            return EtcdRefused(f"{at}: {_short(details)}")
        return EtcdUnreachable(f"{at}: {_short(details)} ({code.name}): look into etcd's log")

    def _not_allowed(self, member: "_Member", what: str) -> str:
        who = f"the user {self.settings.user}" if self.settings.user else "who gives no user"
        return (
            f"cannot {what} in etcd at {member.endpoint}: {who} may not: grant a role that reads and writes "
            f"{self._prefix} and all below it"
        )

    # --- keys and messages ---

    def _key(self, key: str) -> bytes:
        return f"{self._prefix}{key}".encode()

    def _span(self, prefix: str) -> tuple[bytes, bytes]:
        """From *prefix* to what comes after all that begins with it."""
        start = self._key(prefix)  # UTF-8: no byte is 0xff
        return start, start[:-1] + bytes([start[-1] + 1])

    def _name(self, key: bytes) -> str:
        return key.decode().removeprefix(self._prefix)

    def _item(self, found: Any) -> Item:
        return Item(self._name(found.key), found.value, found.create_revision, found.mod_revision, found.lease)

    def _compare(self, each: Compare) -> Any:
        field_of = {"value": "value", "mod": "mod_revision", "create": "create_revision"}
        return rpc.Compare(
            key=self._key(each.key),
            target=getattr(rpc.Compare, each.target.upper()),
            result=_RESULTS[each.result],
            **{field_of.get(each.target, each.target): each.expected},
        )

    def _operation(self, each: Operation) -> Any:
        match each:
            case DoPut():
                put = rpc.PutRequest(key=self._key(each.key), value=each.value, lease=each.lease)
                return rpc.RequestOp(request_put=put)
            case DoDelete():
                return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=self._key(each.key)))
            case DoDeletePrefix():
                start, end = self._span(each.prefix)
                return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=start, range_end=end))
            case DoGet():
                return rpc.RequestOp(request_range=rpc.RangeRequest(key=self._key(each.key)))
            case DoRange():
                start, end = self._span(each.prefix)
                return rpc.RequestOp(request_range=rpc.RangeRequest(key=start, range_end=end))


_RESULTS: Final = {
    "==": rpc.Compare.EQUAL,
    "!=": rpc.Compare.NOT_EQUAL,
    "<": rpc.Compare.LESS,
    ">": rpc.Compare.GREATER,
}
_TOKEN_TROUBLE: Final = ("invalid auth token", "user name is empty", "revision of auth store is old")
"""What etcd says of a token that it forgot (a restart, five idle minutes) or that is older than its users."""


class _Member:
    """One endpoint and its channel, which connects when it is needed and again when it was cut."""

    def __init__(self, endpoint: str, credentials: Any) -> None:
        self.endpoint = endpoint
        address = _address_of(endpoint)
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(address, options=_CHANNEL)
        else:
            self.channel = grpc.aio.secure_channel(address, credentials, options=_CHANNEL)
        self.kv: Any = rpc.KVStub(self.channel)
        self.lease: Any = rpc.LeaseStub(self.channel)
        self.watch: Any = rpc.WatchStub(self.channel)
        self.auth: Any = rpc.AuthStub(self.channel)


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


def _short(details: str) -> str:
    """gRPC tells the last of several causes last, behind an address that the message has already."""
    last = re.sub(r"^[A-Z_]+: ipv[46]:\S+: ", "", details.rpartition("last error: ")[2])
    return (
        last.removeprefix("Failed to connect to remote host: ").removeprefix("etcdserver: ").strip()[:200]
        or "no reason given"
    )


def boottime() -> Seconds:
    """Seconds since boot, those asleep included: a lease does not wait for a machine that is."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Hold:
    """
    Whether a lease can still be counted on; pure, for it is asked before every decision of a leader.

    Three things may have happened when nothing was heard for the lease's time. etcd does not answer (`failed` says so
    again and again): then nobody else can have been told that the lease ended, and it holds. This process stood still:
    then it may have ended long ago, and it does not hold until etcd has said so (`renewed`). etcd says that it ended.
    What remains: we are cut off and etcd is not. Epochs are for that.
    """

    def __init__(self, ttl_s: Seconds, asked_at: Seconds) -> None:
        self.ttl_s = ttl_s
        self.renewed_at = asked_at
        self._sign_at = asked_at
        self._doubtful = False
        self._ended = False

    def holds(self, now: Seconds) -> bool:
        if now - self._sign_at >= self.ttl_s:
            self._doubtful = True
        return not (self._doubtful or self._ended)

    def confirmed(self, now: Seconds) -> bool:
        """Whether etcd itself said so less than the lease's time ago."""
        return not self._ended and now - self.renewed_at < self.ttl_s

    def renewed(self, asked_at: Seconds) -> None:
        """etcd answered that it lives, to what was asked then."""
        self.renewed_at = self._sign_at = asked_at
        self._doubtful = False

    def failed(self, now: Seconds) -> None:
        """etcd did not answer; what was asked longer ago than the lease's time says nothing: we stood still."""
        if self.holds(now):
            self._sign_at = now

    def ended(self) -> None:
        self._ended = True


class Lease:
    """
    A lease that a task keeps alive, asking every third of its time; made by `Etcd.grant`.

    `lost` is set when etcd says that it has ended. Whether it can be counted on meanwhile: `holds`.
    """

    def __init__(self, etcd: Etcd, lease_id: int, ttl_s: Seconds, asked_at: Seconds) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self.lost = asyncio.Event()
        self._etcd = etcd
        self._hold = Hold(ttl_s, asked_at)
        self._asking = asyncio.Lock()
        self._task = asyncio.create_task(self._keep(), name=f"etcd-lease-{lease_id:x}")

    def holds(self, now: Seconds) -> bool:
        """
        Whether nobody else can have been told that it ended, as far as this process can know; *now* by `Etcd.clock`.

        False after this process stood still (stopped, suspended, blocked) for the lease's time, until etcd was asked.
        """
        return self._hold.holds(now)

    def confirmed(self, now: Seconds) -> bool:
        return self._hold.confirmed(now)

    async def confirm(self) -> bool:
        """
        Ask etcd now. False: it has ended.

        :raises EtcdUnreachable: nobody can tell
        """
        async with self._asking:
            if self.lost.is_set():
                return False
            asked_at = self._etcd.clock()
            self._hold.holds(asked_at)
            try:
                left_s = await self._etcd._keep_alive(self.id, self.ttl_s / 3)
            except EtcdUnreachable:
                self._hold.failed(self._etcd.clock())
                raise
            if left_s <= 0:
                self._hold.ended()
                self.lost.set()
                return False
            self._hold.renewed(asked_at)
            return True

    async def revoke(self) -> None:
        """End it now; what is under it is gone when this returns."""
        await self.abandon()
        self._hold.ended()
        self.lost.set()
        try:
            await self._etcd._revoke(self.id)
        except EtcdRefused:
            pass  # it has ended already

    async def abandon(self) -> None:
        """Keep it alive no longer; it ends by itself."""
        self._etcd._leases.discard(self)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        is_renewed = True
        while not self.lost.is_set():
            # A beat, not a poll: what is waited for is that etcd would otherwise end the lease.
            await asyncio.sleep(self.ttl_s / 3 if is_renewed else min(0.5, self.ttl_s / 6))
            try:
                await self.confirm()
                is_renewed = True
            except StorageFailed as exc:
                if is_renewed:
                    log.warning("etcd.lease_not_renewed lease=%x reason=%s", self.id, exc)
                is_renewed = False
        self._etcd._leases.discard(self)


# --- whose keys these are ---


class Meta(Struct, frozen=True):
    product: str
    version: int


async def open_store(
    etcd: Etcd, on_wait: Callable[[str], None], retry_s: Sequence[Seconds] = (0.5, 1.0, 2.0, 5.0)
) -> None:
    """
    See that what is below our prefix is ours, and put `META` there if nothing is. Waits for an etcd that does not
    answer, and says so each time it asks in vain.

    :param on_wait: given a line for the log; the last of *retry_s* is repeated
    :raises ForeignKeys: it is somebody else's, or of a newer version
    :raises EtcdRefused: we may not read or write there
    """
    tries = 0
    while True:
        try:
            return await _check_meta(etcd)
        except EtcdUnreachable as exc:
            pause_s = retry_s[min(tries, len(retry_s) - 1)]
            on_wait(f"{exc}; trying again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            tries += 1


async def _check_meta(etcd: Etcd) -> None:
    prefix = etcd.settings.prefix
    meta = await etcd.get(META)
    if meta is None:
        others = await etcd.keys("", limit=1)
        if others and others[0] != META:
            raise ForeignKeys(
                f"etcd at {etcd.endpoint} has keys below {prefix} that are not ours ({prefix}/{others[0]}): give "
                "another prefix, or another etcd"
            )
        mine = msgspec.json.encode(Meta("gpufaas", LAYOUT))
        done = await etcd.txn((absent(META),), (DoPut(META, mine),), (DoGet(META),))
        if done.succeeded:
            return
        meta = done.found[0][0]  # another of us was faster
    try:
        found = msgspec.json.decode(meta.value, type=Meta)
    except msgspec.DecodeError:
        found = Meta("something else", 0)
    if found.product != "gpufaas":
        raise ForeignKeys(
            f"{prefix}/{META} in etcd at {etcd.endpoint} says {found.product}: give another prefix, or another etcd"
        )
    if found.version > LAYOUT:
        raise ForeignKeys(
            f"what is below {prefix} in etcd at {etcd.endpoint} was written by a newer version (keys of version "
            f"{found.version}, this one knows {LAYOUT}): start that version, or give another prefix"
        )
