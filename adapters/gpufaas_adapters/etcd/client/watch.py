"""`Watch`: the changes below a prefix, over restarts of etcd and lost connections."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

import grpc.aio
from aetcd import rpc

from gpufaas_adapters.etcd.client.connection import REQUIRE_LEADER, EtcdConnection, Member
from gpufaas_adapters.etcd.client.failures import EtcdUnreachable, is_token_trouble, not_allowed
from gpufaas_adapters.etcd.client.messages import Messages
from gpufaas_adapters.etcd.client.values import Change, Deleted, Listed, Put, Range
from gpufaas_core.errors import StorageFailed

_BACKOFF_S: Final = (0.02, 0.1, 0.25, 0.5, 1.0)


@dataclass(eq=False)
class Watch:
    """See module."""

    connection: EtcdConnection
    messages: Messages
    prefix: str
    span: tuple[bytes, bytes]
    """The first key, and the first one after the last; empty: there is one key."""
    listed: Callable[[], Awaitable[Range]]
    """Reads what is there."""
    _known: dict[str, int] = field(default_factory=dict)
    """The revision of each key that was told."""
    _revision: int = 0
    """All changes up to it are told; 0: what is there must be listed."""

    async def changes(self, on_trouble: Callable[[StorageFailed], None] | None) -> AsyncGenerator[Change]:
        """See `Etcd.watch`."""
        failures = 0
        while True:
            try:
                if not self._revision:
                    listed = await self.listed()
                    for change in self._differences(listed):
                        yield change
                    self._revision = listed.revision
                    yield Listed()
                async with aclosing(self._answers()) as answers:
                    async for answer in answers:
                        failures = 0
                        if answer is None:
                            self._revision = 0
                            break
                        for change in self._told(answer):
                            yield change
                        # Beside events the header tells where the store is, not where this watch is.
                        if answer.events:
                            self._revision = int(answer.events[-1].kv.mod_revision)
                        elif not answer.created:
                            self._revision = max(self._revision, int(answer.header.revision))
            except EtcdUnreachable as exc:
                if on_trouble is not None:
                    on_trouble(exc)
                # The first time nearly at once: with several members another one answers.
                await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1

    def _differences(self, listed: Range) -> Iterator[Change]:
        """Yield how *listed* differs from what was told."""
        there = {item.key for item in listed.items}
        for key in [key for key in self._known if key not in there]:
            del self._known[key]
            yield Deleted(key)
        for item in listed.items:
            if self._known.get(item.key) != item.mod_revision:
                self._known[item.key] = item.mod_revision
                yield Put(item)

    def _told(self, answer: Any) -> Iterator[Change]:
        for event in answer.events:
            key = self.messages.name(event.kv.key)
            if event.type == rpc.Event.EventType.DELETE:
                self._known.pop(key, None)
                yield Deleted(key)
            else:
                self._known[key] = int(event.kv.mod_revision)
                yield Put(self.messages.item(event.kv))

    async def _answers(self) -> AsyncGenerator[Any]:
        """Yield etcd's answers from after the revision; None: they cannot be had any more, list again."""
        connection, timeout_s = self.connection, self.connection.settings.timeout_s
        member = connection.member()
        stream = None
        try:
            async with asyncio.timeout(timeout_s):
                metadata = await connection.authenticated(member, timeout_s)
                stream = member.watch.Watch(metadata=(*metadata, *REQUIRE_LEADER))
                await stream.write(rpc.WatchRequest(create_request=self._request()))
                response = await stream.read()
            if response is not grpc.aio.EOF and response.created and response.header.revision < self._revision:
                yield None  # etcd was restored from a backup: its revisions began anew
                return
            while response is not grpc.aio.EOF:
                if response.compact_revision:
                    yield None
                    return
                if response.canceled:
                    raise self._cancelled(member, response.cancel_reason)
                yield response
                response = await stream.read()
            raise EtcdUnreachable(f"etcd at {member.endpoint} ended the watch of {self.prefix}", maybe_done=False)
        except TimeoutError:
            connection.leave(member)
            raise EtcdUnreachable(
                f"etcd at {member.endpoint} did not begin to watch {self.prefix} within {timeout_s:g} s",
                maybe_done=False,
            ) from None
        except asyncio.CancelledError:
            connection.check_closed()
            raise
        except grpc.aio.AioRpcError as exc:
            raise connection.failed(exc, member, f"watch {self.prefix}") from exc
        finally:
            if stream is not None:
                stream.cancel()

    def _request(self) -> Any:
        start, end = self.span
        return rpc.WatchCreateRequest(key=start, range_end=end, start_revision=self._revision + 1, progress_notify=True)

    def _cancelled(self, member: Member, reason: str) -> StorageFailed:
        prefix = self.prefix
        if is_token_trouble(reason):
            self.connection.forget_token()
            return EtcdUnreachable(f"etcd at {member.endpoint} forgot who watches {prefix}", maybe_done=False)
        if "permission denied" in reason:
            return not_allowed(self.connection.settings, member.endpoint, f"watch {prefix}")
        return EtcdUnreachable(f"etcd at {member.endpoint} ended the watch of {prefix}: {reason}", maybe_done=False)
