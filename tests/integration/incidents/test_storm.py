"""A process that had served a storm of calls kept several times the memory that it needed, for ever."""

import asyncio
import random
from collections.abc import Callable

from tests.integration.conftest import HTTP, Peak, Platform, private_bytes, until

SLOW = """
    import time

    def handle(event, context):
        time.sleep(0.1)
        return "done"
"""
CALLS, AT_ONCE = 600, 64


def test_what_a_storm_of_callers_who_hang_up_took_is_given_back(make_platform: Callable[..., Platform]) -> None:
    platform = make_platform("--device", "cpu:0=400MiB").start()
    path = platform.deploy("slow", SLOW, HTTP)
    assert platform.call(path, b"x" * 100).text == "done"
    before = private_bytes(platform.pid) or 0
    peak = Peak(platform.pid)

    while peak.growth <= 1.2 * before:  # on a slow machine most callers have left before their bodies come
        asyncio.run(_storm(platform.port, path))

    def held() -> float:
        return (private_bytes(platform.pid) or 0) / before

    until(
        lambda: held() <= 1.5,
        lambda: f"{held():.2f} times as much as before, {peak.growth >> 20} MiB more in the storm",
    )


async def _storm(port: int, path: str) -> None:
    chance, room = random.Random(1), asyncio.Semaphore(AT_ONCE)

    async def hang_up() -> None:
        async with room:
            size, patience_s = chance.randrange(10_000, 3 << 20), chance.random() * 0.2
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n".encode()
                + b"x" * size
            )
            await asyncio.sleep(patience_s)
            writer.transport.abort()

    await asyncio.gather(*(hang_up() for _ in range(CALLS)))
