"""Runs an accepted asynchronous call as all other calls are run."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpufaas_async_calls.call import AcceptedCall
from gpufaas_core.units import Bytes
from gpufaas_gateway.answering import Answer, Run
from gpufaas_gateway.request import Request

_PIECE: Final[Bytes] = 256 * 1024


async def execute(run: Run, call: AcceptedCall) -> Answer:
    """
    Return what *run* (`Calls.run`) answers.

    :raises CallCancelled: the call was ended before there was an answer
    """
    if isinstance(call.body, Path):
        body, size = None, call.body.stat().st_size
        caller = _FileCaller(call.body, size)
    else:
        body, size, caller = call.body, len(call.body), None
    headers = [*call.headers, (b"x-call-id", call.id.encode("latin-1")), (b"content-length", b"%d" % size)]
    path = call.path.decode("latin-1") or "/"
    return await run(Request(call.function, "POST", path, call.query, headers, body, caller=caller))


class _FileCaller:
    """`Caller` whose body is a file, and who never goes away."""

    def __init__(self, path: Path, size: Bytes) -> None:
        self._path = path
        self._size = size
        self._at: Bytes = 0

    async def receive(self) -> tuple[bytes, bool]:
        if self._at >= self._size:
            await asyncio.Event().wait()
        piece = await asyncio.to_thread(self._read)
        self._at = self._at + len(piece) if piece else self._size
        return piece, self._at < self._size

    def on_gone(self, tell: Callable[[], None] | None) -> bool:  # noqa: ARG002 - the port's
        return True

    def _read(self) -> bytes:
        with self._path.open("rb") as file:  # each time: nothing tells when the file is not needed any more
            file.seek(self._at)
            return file.read(_PIECE)
