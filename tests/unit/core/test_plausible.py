"""Messages of a worker are believed only as far as they can be true."""

from math import inf, nan

import msgspec
import pytest

from gpufaas_core.model import Profile
from gpufaas_core.plausible import is_size, is_time, read_profile, shortened, why_no_answer, why_not_ready
from gpufaas_core.wire.heads import FailedHead, ReadyHead


def test_times_and_sizes_are_finite_and_not_negative() -> None:
    assert [is_time(each) for each in (0.0, 0.1, 86_400.0)] == [True] * 3
    assert [is_time(each) for each in (nan, inf, -inf, -1e-9, 1e300)] == [False] * 5
    assert [is_size(each) for each in (0, 141 << 30)] == [True] * 2
    assert [is_size(each) for each in (-1, 1 << 63)] == [False] * 2


@pytest.mark.parametrize(
    ("status", "headers", "why"),
    [
        (200, [(b"content-type", b"text/plain; charset=utf-8"), (b"x-tab", b"a\tb \xe9")], ""),
        (599, [(b"x", b"a" * 65_535)], ""),
        (199, [], "status 199"),
        (600, [], "status 600"),
        (-1, [], "status -1"),
        (200, [(b"x", b"a\r\nset-cookie: b")], "is no header"),
        (200, [(b"x", b"a\x00")], "is no header"),
        (200, [(b"x", b"a\x0bb")], "is no header"),
        (200, [(b"x y", b"")], "is no header"),
        (200, [(b"Transfer-Encoding", b"chunked")], "is no header"),
        (200, [(b"", b"")], "is no header"),
        (200, [(b"x", b"a" * 65_536)], "headers of 64 KiB: an answer may have 64 KiB"),
        (200, [(b"x", b"a" * 1000)] * 66, "headers of 65 KiB"),
        (200, [(b"x", b"")] * 1001, "1001 headers: an answer may have 1000"),
    ],
)
def test_the_head_of_an_answer(status: int, headers: list[tuple[bytes, bytes]], why: str) -> None:
    found = why_no_answer(status, headers)

    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize(
    ("head", "fine"),
    [
        (ReadyHead(1 << 30, [("read", 0.1), ("init", 2.0)], 1 << 20), True),
        (ReadyHead(-1, []), False),
        (ReadyHead(0, [], 1 << 60), False),
        (ReadyHead(0, [("load", nan)]), False),
        (ReadyHead(0, [("load\r\nx: y", 0.1)]), False),  # it becomes a header
        (ReadyHead(0, [("load", 0.1)] * 17), False),
    ],
)
def test_what_is_said_of_a_load(head: ReadyHead, fine: bool) -> None:
    assert bool(why_not_ready(head)) != fine


def test_the_reason_of_a_failure_is_as_long_as_an_error_can_be() -> None:
    assert shortened(FailedHead("a" * 9999, "b" * 999_999, True)) == FailedHead("a" * 2000, "b" * 65_536, True)


@pytest.mark.parametrize(
    "stored",
    [
        msgspec.json.encode(Profile(nan, 0.1, 100)),  # null
        msgspec.json.encode(Profile(1.0, -0.1, 100)),
        msgspec.json.encode(Profile(1.0, 1e300, 100)),
        msgspec.json.encode(Profile(1.0, 0.1, -1)),
        b"{",
        b"\xff\xfe",
    ],
)
def test_a_stored_profile_that_is_none_is_not_read(stored: bytes) -> None:
    with pytest.raises(ValueError):
        read_profile(stored)
