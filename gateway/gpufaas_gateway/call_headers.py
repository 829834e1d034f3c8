"""
Headers of a call: those that the platform reads, those that the function gets, those that the caller gets.

Pure functions of pairs of bytes; names are in lower case. The rules are in docs/openfaas.md.
"""

import math
import os
import uuid
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.hop_by_hop import HOP_BY_HOP, NAMES_NONE, end_to_end
from gpufaas_core.messages import Grant
from gpufaas_core.model import DeviceId, Seconds
from gpufaas_core.units import parse_duration
from gpufaas_core.wire.heads import AnswerHead
from gpufaas_gateway.asked import HEADERS

Header = tuple[bytes, bytes]

BODILESS: Final = frozenset((204, 304))
"""Statuses without a body: a client would take a body for the start of the connection's next answer."""
ASKED: Final = HEADERS | {b"x-timeout", b"x-gpufaas-size"}
"""What callers ask of the platform. It is passed on."""
_NOTED: Final = HOP_BY_HOP | ASKED | {
    b"content-length", b"server-timing", b"x-call-id", b"x-start-time", b"x-forwarded-for", b"x-forwarded-host",
    b"host",
}  # fmt: skip
"""Request headers that are read here, or not passed on."""
_DROPPED: Final = HOP_BY_HOP | {
    b"content-length", b"server-timing", b"x-call-id", b"x-start-time", b"x-served-by", b"x-gpufaas-start",
    b"x-gpufaas-device", b"x-gpufaas-share", b"x-gpufaas-batch",
}  # fmt: skip
"""Headers of a function's answer that are not passed on: a function may answer with those of one that it called."""
_HIT: Final = (b"x-gpufaas-start", b"hit")
_FROM: Final = {each: (b"x-gpufaas-start", each.encode()) for each in ("parked", "host", "peer", "disk", "store")}


ReadHead = tuple[list[Header], bytes, int, dict[bytes, bytes] | None]
"""See `read_head`."""


def read_head(headers: Sequence[Header], client: tuple[str, int] | None) -> ReadHead:
    """
    Return the headers that the function is given, and what the platform itself reads.

    :param client: address and port of the caller, for X-Forwarded-For
    :return: the function's headers (a new list); X-Call-Id, empty if the caller gave none; Content-Length, -1 if
        unknown; those of `ASKED` that came, None if none did
    """
    passed: list[Header] = []
    call_id = b""
    asked: dict[bytes, bytes] | None = None
    length = -1
    host: Header | None = None
    forwarded_for = forwarded_host = False
    for pair in headers:
        key = pair[0]
        if key in _NOTED:
            if key == b"host":
                host = pair
            elif key == b"content-length":
                length = int(pair[1])
            elif key == b"x-forwarded-for":
                forwarded_for = True
            elif key == b"x-forwarded-host":
                forwarded_host = True
            elif key in ASKED:
                asked = asked or {}
                asked[key] = pair[1]
            elif key == b"x-call-id":
                call_id = b"".join(pair[1][:128].splitlines())  # of which a parser passes one
                continue
            elif key == b"connection" and pair[1] not in NAMES_NONE:
                return read_head(end_to_end(headers), client)
            else:
                continue
        passed.append(pair)
    if not forwarded_for and client:
        passed.append(_forwarded_for(client))
    if not forwarded_host and host is not None:
        passed.append((b"x-forwarded-host", host[1]))
    return passed, call_id, length, asked


@lru_cache(1024)  # a connection has one address and many calls
def _forwarded_for(client: tuple[str, int]) -> Header:
    return b"x-forwarded-for", f"{client[0]}:{client[1]}".encode()


def answer_headers(given: list[Header]) -> list[Header]:
    """Return *given*, a function's headers, without those of its connection and those that are ours to set."""
    return [pair for pair in end_to_end(given) if pair[0] not in _DROPPED]


def call_headers(answer: AnswerHead, asked: list[Header], run_s: Seconds) -> list[Header]:
    """
    Return the headers of a function's answer.

    Without a Content-Type it gets that of the request, else text/plain, as with OpenFaaS's provider.
    X-Duration-Seconds is the watchdog's if the function has one, else ours.
    """
    given = answer.headers
    if len(given) == 1 and given[0][0] == b"content-type":  # nearly every answer
        return [given[0], (b"x-duration-seconds", b"%.6f" % run_s)]
    out = answer_headers(given)
    names = {name for name, _ in out}
    if b"content-type" not in names and answer.status not in BODILESS:
        out.append(next((pair for pair in asked if pair[0] == b"content-type"), (b"content-type", b"text/plain")))
    if b"x-duration-seconds" not in names:
        out.append((b"x-duration-seconds", b"%.6f" % run_s))
    return out


def placement_headers(grant: Grant, tier: str = "disk") -> tuple[Header, ...]:
    """
    Return whether the call was a hit, or where its weights came from; its device, its copy's share of that, and how
    many ran together in a batch.
    """
    start = _FROM.get(tier, _FROM["disk"]) if grant.cold else _HIT
    found = (start, *_on_device(grant.device, grant.parts[0].share))
    return found if len(grant.calls) == 1 else (*found, (b"x-gpufaas-batch", b"%d" % len(grant.calls)))


@lru_cache(1024)
def _on_device(device: DeviceId, share: int) -> tuple[Header, ...]:
    found = (b"x-gpufaas-device", device.encode())
    return (found, (b"x-gpufaas-share", b"%d" % share)) if share else (found,)


def timing(
    queue_s: Seconds,
    load_s: Seconds,
    run_s: Seconds,
    phases: tuple[tuple[str, Seconds], ...] = (),
    held_s: Seconds = 0.0,
    awaited_s: Seconds = 0.0,
) -> Header:
    """
    Return Server-Timing, in ms; after a start also the phases of the load, as ``load-room`` and so on.

    :param held_s: how long the batch was held back for more calls; a call that came later has queued for less
    :param awaited_s: how long it waited for a load that was for another call
    """
    value = b"queue;dur=%.3f, load;dur=%.3f, run;dur=%.3f" % (queue_s * 1e3, load_s * 1e3, run_s * 1e3)
    if held_s:
        value += b", queue-batch;dur=%.3f" % (min(held_s, queue_s) * 1e3)
    if awaited_s > 0.0:
        value += b", queue-load;dur=%.3f" % (min(awaited_s, queue_s) * 1e3)
    for name, seconds in phases:
        value += b", load-%s;dur=%.3f" % (name.encode(), seconds * 1e3)
    return b"server-timing", value


@lru_cache(512)  # one header that is another one each time is not worth more
def head_template(given: tuple[Header, ...], served_by: Header, device: DeviceId, share: int) -> bytes:
    """
    Return the headers of a whole answer of a hit with the headers *given* by the function, as `call_headers`,
    `placement_headers` and `timing` make them. What differs from call to call is filled in: run, id, start, queue, load
    and run in ms, and the length of the body. Empty: they are not of the common kind, or there is a line break in them.
    """
    names = [name for name, _ in given]
    if b"content-type" not in names or b"x-duration-seconds" in names or not _DROPPED.isdisjoint(names):
        return b""
    first = [b"%b: %b\r\n" % pair for pair in given]
    last = [b"%b: %b\r\n" % pair for pair in (served_by, _HIT, *_on_device(device, share))]
    form = (
        b"".join(first).replace(b"%", b"%%")
        + b"x-duration-seconds: %.6f\r\nx-call-id: %b\r\nx-start-time: %b\r\n"
        + b"".join(last).replace(b"%", b"%%")
        + b"server-timing: queue;dur=%.3f, load;dur=%.3f, run;dur=%.3f\r\ncontent-length: %d\r\n"
    )
    return form if form.count(b"\n") == len(first) + len(last) + 5 == form.count(b"\r") else b""


def asked_timeout(text: bytes) -> Seconds:
    """Return the seconds that an X-Timeout asks for; infinity if it cannot be read, as with OpenFaaS."""
    try:
        return parse_duration(text.decode("latin-1")) or math.inf
    except InvalidSpec:
        return math.inf


def told_size(text: bytes) -> float:
    """
    Return the number in an X-Gpufaas-Size.

    :raises InvalidSpec: it is not a number, or negative, or infinite
    """
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0.0 <= size < math.inf:
        shown = text[:40].decode("latin-1")
        raise InvalidSpec(f"X-Gpufaas-Size is a number, 0 or more, in any unit of the function's own; not {shown!r}")
    return size


def _drawn() -> Iterator[str]:
    """Yield UUIDs, version 4 by their form. They protect nothing: one in 4096 is drawn, and those that follow count."""
    while True:
        drawn = str(uuid.uuid4())[:-3]
        for each in _ENDS:
            yield drawn + each


def _draw_anew() -> None:
    global _ids
    _ids = _drawn()


_ENDS: Final = [f"{number:03x}" for number in range(4096)]
_ids = _drawn()
os.register_at_fork(after_in_child=_draw_anew)


def new_call_id() -> str:
    """Return a UUID that no other call has."""
    return next(_ids)
