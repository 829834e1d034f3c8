"""
Callers that read an answer of 20 MB a byte at a time held all slots of a CPU function for its time limit: it served no
other caller.
"""

import contextlib
import time

import pytest
from tests.integration.conftest import HTTP, Platform, until
from tests.integration.test_streaming import slow_reader

pytestmark = pytest.mark.timeout(120)

LARGE = """
    def handle(event, context):
        return (b"x" * 65536 for _ in range(320)) if event.body == b"large" else b"small"
"""


def test_slow_readers_hold_no_slot(platform: Platform) -> None:
    path = platform.deploy("large", LARGE, HTTP, slots="2", timeout="5s")
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(slow_reader(platform)) for _ in range(4)]
        for each in slow:
            each.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nlarge".encode())
            each.recv(1)

        answer = platform.call(path, b"x")

        assert answer.text == "small"
        until(platform.is_idle, "no slot is held, although nothing was read")
        assert platform.spooled() == [], "the files of answers have no names, so none is left"

        time.sleep(5.5)  # longer than the function may take: it is done, and this caller has a slow line
        size = 1
        while size < 320 * 65536:
            piece = slow[0].recv(1 << 20)
            assert piece, f"cut off after {size} bytes"
            size += len(piece)
