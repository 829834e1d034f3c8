"""
The two ends of a control connection, on asyncio: handshake, framing, heartbeats. Its messages are in `control.py`.

Messages of one turn of the event loop are written together: under load, many share one system call.
"""

import asyncio
import logging
import os
import resource
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from gpufaas_cluster import control
from gpufaas_cluster.lane_connection import LaneConnection
from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.errors import GpufaasError

log = logging.getLogger(__name__)

HANDSHAKE_S: Final[Seconds] = 5.0
_LATE_S: Seconds = 1.0
"""If a timer of ours is so late, this process or its machine was suspended. On a busy machine it is less late."""
MAX_UNPROVEN: Final = 4096
"""
At most so many connections to one listening address are in their handshake at once, or a quarter of the open files
that this process may have, if that is less. Of these, at most a quarter come from one peer's address.
"""
_CROWDED_EVERY_S: Final[Seconds] = 10.0
_HIGH: Final = 32 * 1024 * 1024
"""If so many bytes wait to be sent, the other end does not read, and the link is closed."""


class TurnedAway(GpufaasError):
    """The other end refused the connection; `code` and `leader` as in `control.Turned`."""

    def __init__(self, code: str, message: str, leader: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.leader = leader


class NotReached(GpufaasError):
    """No service answered at the address."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The name of this process, and what proves that it belongs to the cluster."""

    role: control.Role
    id: str
    boot: str
    token: bytes
    version: str = ""
    tls: ssl.SSLContext | None = None
    """For outgoing connections; None: they are not encrypted."""
    tls_served: ssl.SSLContext | None = None
    """For incoming connections."""


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[HOST]:PORT``. :raises GpufaasError: it is neither"""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise GpufaasError(f"{address!r} is no address: write HOST:PORT, as in 10.0.0.5:7070")
    return host.strip("[]"), int(port)


class Link(asyncio.Protocol):
    """
    One end, during and after the handshake. `on_message` gets each message, but for handshake and heartbeats;
    `on_lost` is called once, with the reason, when the link is over.
    """

    def __init__(self, on_message: Callable[[object], None], on_lost: Callable[[str], None]) -> None:
        self.on_message = on_message
        self.on_lost = on_lost
        self.epoch = 0
        """The epoch of the scheduler that we connected to."""
        self.successor: asyncio.Protocol | None = None
        """The protocol that gets the connection after the welcome; set by `Accept`."""
        self.early: list[object] = []
        self._loop = asyncio.get_running_loop()
        self._reader = control.MessageReader()
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._heard = self._sent = self._loop.time()
        self._beat: asyncio.TimerHandle | None = None
        self._due = self._heard
        self._why = ""
        self.closed = False

    def attend(self, on_message: Callable[[object], None]) -> asyncio.Future[str]:
        """Have *on_message* get what came since the handshake, and all that comes; return why the link will be over."""
        lost: asyncio.Future[str] = self._loop.create_future()
        self.on_message, self.on_lost = on_message, lambda why: None if lost.done() else lost.set_result(why)
        early, self.early = self.early, []
        for each in early:
            on_message(each)
        if self.closed:
            self.on_lost(self._why or "it was closed")
        return lost

    def send(self, message: control.Message) -> None:
        """Send it, together with the other messages of this turn of the loop. Does nothing once the link is over."""
        if self.closed:
            return
        out = self._out
        if not out:
            self._loop.call_soon(self._flush)
        out.append(control.encode(message))

    def close(self, why: str = "closed here") -> None:
        """Close the link after what was sent before."""
        if self.closed:
            return
        self._why = self._why or why
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self, why: str) -> None:
        """Close the link at once: the other end does not answer."""
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort()

    def hand_over(self, successor: asyncio.Protocol) -> None:
        """
        Give the connection to *successor*; this link is over.

        :raises NotReached: it is closed already
        """
        self._flush()
        if self.closed or self._transport is None or self._transport.is_closing():
            raise NotReached(f"the connection closed: {self._why or 'by the other end'}")
        self.closed = True
        if self._beat is not None:
            self._beat.cancel()
        self._transport.set_protocol(successor)
        successor.connection_made(self._transport)

    def start_beats(self) -> None:
        """Begin to send heartbeats, and to expect them."""
        self._heard = self._loop.time()
        self._next_beat(control.BEAT_S)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if not out or self._transport is None or self._transport.is_closing():
            return
        self._sent = self._loop.time()
        self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        if self._transport.get_write_buffer_size() > _HIGH:
            self.abort(f"it does not read: {_HIGH} bytes wait for it")

    def _on_beat(self) -> None:
        now = self._loop.time()
        if now - self._due > _LATE_S:
            # This process was suspended: what the other end sent meanwhile waits in the socket, and is read first.
            self._heard = min(now, self._heard + now - self._due)
        if now - self._heard > control.SILENCE_S:
            self.abort(f"nothing was heard for {now - self._heard:.1f} s")
            return
        if now - self._sent >= control.BEAT_S * 0.9:
            self.send(control.Beat())
        self._next_beat(min(control.BEAT_S, self._heard + control.SILENCE_S - now + 0.001))

    def _next_beat(self, in_s: Seconds) -> None:
        self._due = self._loop.time() + in_s
        self._beat = self._loop.call_later(in_s, self._on_beat)

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        try:
            for message in self._reader.feed(data):
                if self.closed:
                    return
                if type(message) is not control.Beat:
                    self.on_message(message)
        except control.BrokenMessage as exc:
            self.abort(f"it said what is no message: {exc}")

    def connection_lost(self, exc: Exception | None) -> None:
        if self.closed:
            return
        self.closed = True
        if self._beat is not None:
            self._beat.cancel()
        self.on_lost(self._why or (str(exc) if exc else "the other end closed it"))


async def connect(
    address: str, me: Identity, timeout_s: Seconds = HANDSHAKE_S, successor: LaneConnection[Any] | None = None
) -> Link:
    """
    Return a link to *address*. The caller listens to it by `Link.attend`.

    :param successor: the connection will carry calls, and is handed over to this protocol
    :raises NotReached: nothing listens there, or it does not answer
    :raises TurnedAway: it refused us, or did not prove that it has the token
    """
    # Made here: the other end may speak before `create_connection` returns.
    link = _Connecting(address, me, 0 if successor is None else successor.window)
    host, port = split_address(address)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().create_connection(
                lambda: link, host, port, ssl=me.tls, server_hostname=host if me.tls else None
            )
            said = await link.answer
    except TimeoutError as exc:
        link.abort("handshake timed out")
        raise NotReached(f"{address} does not answer within {timeout_s:g} s") from exc
    except OSError as exc:
        raise NotReached(f"{address} cannot be reached: {exc.strerror or exc}") from exc
    except BaseException:
        link.answer.cancel()
        link.abort("handshake failed")
        raise
    link.check_welcome(said)
    if successor is not None:
        link.hand_over(successor)
    else:
        link.start_beats()
    return link


class _Connecting(Link):
    """
    The end that connects. It answers the challenge; what comes after the other end's `answer` waits for `attend`.

    :param window: see `control.ClientHello`
    """

    def __init__(self, address: str, me: Identity, window: Bytes) -> None:
        super().__init__(self._on_handshake, self._on_end)
        self.answer: asyncio.Future[Any] = self._loop.create_future()
        """The answer to our hello."""
        self._challenge: control.Challenge | None = None
        self._address = address
        self._me = me
        self._window = window
        self._nonce = os.urandom(16)

    def check_welcome(self, said: object) -> None:
        """
        Check the answer *said*; set `epoch`.

        :raises TurnedAway: it is no welcome, or does not prove that the other end has the token; the link is closed
        """
        if isinstance(said, control.Turned):
            self.close()
            raise TurnedAway(said.code, said.message, said.leader)
        if not isinstance(said, control.Welcome) or not control.proves(
            self._me.token, self._nonce, "server", said.id, said.proof
        ):
            self.close()
            raise TurnedAway("token", f"{self._address} cannot show that it has our token: it is of another cluster")
        self.epoch = said.epoch

    def _on_handshake(self, message: object) -> None:
        if isinstance(message, control.Challenge):
            self._introduce(message)
        elif not self.answer.done():
            self.answer.set_result(message)
        else:
            self.early.append(message)

    def _introduce(self, challenge: control.Challenge) -> None:
        """Say who we are, also to a release that speaks otherwise: it logs whom it turns away."""
        self._challenge, me = challenge, self._me
        shown = control.proof(me.token, challenge.nonce, me.role, me.id)
        self.send(
            control.ClientHello(
                control.PROTOCOL, me.role, me.id, me.boot, self._nonce, shown, me.version, self._window or False
            )
        )  # fmt: skip

    def _on_end(self, why: str) -> None:
        if self.answer.done():
            return
        other = self._challenge
        if other is None or other.protocol == control.PROTOCOL:
            self.answer.set_exception(NotReached(f"{self._address} closed the connection: {why}"))
            return
        self.answer.set_exception(
            TurnedAway(
                "protocol",
                f"{self._address} speaks protocol {other.protocol} ({other.product}), this release "
                f"({self._me.version or 'unknown'}) speaks {control.PROTOCOL}: run the same release on both",
            )
        )


Accept = Callable[[Link, control.ClientHello], int | control.Turned]
"""
Called with each link whose peer has the token: sets its `on_message` and `on_lost` and returns our epoch, or why the
peer is turned away. It may send messages, which follow the welcome, or set the link's `successor`.
"""


async def listen(address: str, me: Identity, accept: Accept) -> asyncio.Server:
    """
    Listen at *address*; call *accept* with each link whose peer has the token.

    :raises GpufaasError: the address cannot be had
    """
    unproven = _Unproven(address)
    host, port = split_address(address)
    try:
        return await asyncio.get_running_loop().create_server(
            lambda: _Taken(me, accept, unproven), host, port, ssl=me.tls_served, backlog=1024
        )
    except OSError as exc:
        raise GpufaasError(
            f"cannot listen on {address} ({exc.strerror or exc}): stop what is there, or choose another --listen"
        ) from exc


class _Taken(Link):
    """The listening end. It reads at most `control.MAX_HELLO` bytes before its peer has proved to have the token."""

    def __init__(self, me: Identity, accept: Accept, unproven: "_Unproven") -> None:
        super().__init__(self._on_hello, self._end_handshake)
        self.host = ""
        self._address = ""
        self._me = me
        self._accept = accept
        self._unproven = unproven
        self._nonce = os.urandom(16)
        self._timer = self._loop.call_later(HANDSHAKE_S, self.abort, "it did not introduce itself")
        self._taken: Bytes = 0
        self._proven = False
        """The peer has shown that it has the token."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._address, self.host = str(peer), str(peer[0]) if peer else ""
        self._unproven.add(self)
        self.send(
            control.Challenge(f"gpufaas {self._me.role} {self._me.version}".strip(), control.PROTOCOL, self._nonce)
        )

    def data_received(self, data: bytes) -> None:
        if not self._proven:
            self._taken += len(data)
            if self._taken > control.MAX_HELLO:
                self.abort(f"it said {self._taken} bytes before it had shown the token")
                return
        super().data_received(data)

    def _on_hello(self, hello: object) -> None:
        self._end_handshake()
        self.on_message = lambda _: None
        if not isinstance(hello, control.ClientHello):
            self.abort("it did not introduce itself")
            return
        decided: int | control.Turned | None = self._why_not(hello)
        if decided is None:
            self._proven = True
            decided = self._accept(self, hello)
        if isinstance(decided, control.Turned):
            log.warning("turned away %s: %s", self._address, decided.message)
            self.send(decided)
            self.close()
            return
        # The welcome goes first, before what `accept` has sent.
        said, self._out = self._out, []
        proof = control.proof(self._me.token, hello.nonce, "server", self._me.id)
        self.send(control.Welcome(decided, proof, self._me.id))
        self._out += said
        if self.successor is not None:
            self.hand_over(self.successor)
        else:
            self.start_beats()

    def _why_not(self, hello: control.ClientHello) -> control.Turned | None:
        """Return why *hello* is turned away: another protocol, or no proof of the token."""
        me = self._me
        if hello.protocol != control.PROTOCOL:
            return control.Turned(
                "protocol",
                f"{hello.role} {hello.id} speaks protocol {hello.protocol} (release {hello.version!r}), "
                f"this {me.role} speaks {control.PROTOCOL} (release {me.version or 'unknown'}): "
                "run the same release on both",
            )
        if not control.proves(me.token, self._nonce, hello.role, hello.id, hello.proof):
            return control.Turned(
                "token",
                f"{hello.role} {hello.id} has another token than {me.role} {me.id}: give it the same --token-file",
            )
        return None

    def _end_handshake(self, _: str = "") -> None:
        self._timer.cancel()
        self._unproven.discard(self)


class _Unproven:
    """
    Connections in their handshake, oldest first.

    When there are too many, the oldest is closed: an honest peer is done within a round trip, and strangers that hold
    connections open push out each other.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._most = min(MAX_UNPROVEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._all: dict[_Taken, None] = {}
        self._of: dict[str, dict[_Taken, None]] = {}
        self._said_at = -_CROWDED_EVERY_S

    def add(self, link: _Taken) -> None:
        of_host = self._of.setdefault(link.host, {})
        crowded = of_host if len(of_host) >= self._most // 4 else self._all if len(self._all) >= self._most else None
        if crowded:
            oldest = next(iter(crowded))
            self._say(oldest)
            self.discard(oldest)
            oldest.abort("too many others wait to introduce themselves")
        self._all[link] = self._of.setdefault(link.host, {})[link] = None

    def discard(self, link: _Taken) -> None:
        self._all.pop(link, None)
        of_host = self._of.get(link.host)
        if of_host is not None:
            of_host.pop(link, None)
            if not of_host:
                del self._of[link.host]

    def _say(self, oldest: _Taken) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._said_at >= _CROWDED_EVERY_S:
            self._said_at = now
            log.warning(
                "listener.crowded address=%s connections=%d peer=%s: too many handshakes, the oldest is closed",
                self._address, len(self._all), oldest.host,
            )  # fmt: skip
