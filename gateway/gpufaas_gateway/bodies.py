"""Reads the bodies of management requests, with bounds on size and time."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from fastapi import Request

from gpufaas_core.errors import BodyTooLarge
from gpufaas_core.units import Bytes, MiB, Seconds, format_bytes
from gpufaas_gateway.errors import BodyTooSlow

_MAX_JSON: Final[Bytes] = 4 * MiB  # etcd takes at most 1 MB for one value
_PATIENCE_S: Final[Seconds] = 30.0  # between two pieces of a body
_MAX_JSON_S: Final[Seconds] = 60.0


async def read_body(request: Request) -> bytes:
    """
    Return the whole body.

    :raises BodyTooLarge: it is over 4 MiB
    :raises BodyTooSlow: it takes over a minute, or nothing comes for half of one
    """
    body = bytearray()
    ends = asyncio.get_running_loop().time() + _MAX_JSON_S
    async for chunk in pieces(request):
        body += chunk
        if len(body) > _MAX_JSON:
            raise BodyTooLarge(f"the body is over {format_bytes(_MAX_JSON)}: a deployment is a few KiB of JSON")
        if asyncio.get_running_loop().time() > ends:
            raise BodyTooSlow(f"the body did not arrive within {_MAX_JSON_S:g} s")
    return bytes(body)


async def pieces(request: Request) -> AsyncIterator[bytes]:
    """
    Yield the body as it comes.

    :raises BodyTooSlow: nothing comes for half a minute
    """
    stream = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise BodyTooSlow(f"nothing of the body arrived for {_PATIENCE_S:g} s") from None
        yield piece
