"""
Asynchronous invocations: ``/async-function/NAME[/path]``, a plain ASGI application beside `invoke.Invocations`, and the
routes that tell what became of them (openfaas.md §3.6, §10; the latter are ours, docs/async.md).

202 means: it is on the disk and will be executed. Everything that can be known to be wrong is said before.
"""

import asyncio
import random
import time
import uuid
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from typing import Any, Final, cast

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response
from msgspec.structs import replace

from gpufaas_async_calls.call import INLINE_BODY, AcceptedCall, Body, CallStatus, Header
from gpufaas_async_calls.callbacks import check_url
from gpufaas_async_calls.calls import AsyncCalls
from gpufaas_async_calls.ports import SpooledBody
from gpufaas_core.errors import (
    CallCancelled,
    DeadlineExceeded,
    GpufaasError,
    InvalidSpec,
    StorageFailed,
    UnknownFunction,
)
from gpufaas_gateway.answers import error_answer
from gpufaas_gateway.call_body import Caller, too_large
from gpufaas_gateway.call_headers import told_size
from gpufaas_gateway.catalogue import Catalogue, Deployed
from gpufaas_gateway.errors import Unavailable
from gpufaas_gateway.invoke import AsgiCaller, Receive, Send, send_whole
from gpufaas_gateway.request import Answer, refusal

PREFIX: Final = b"/async-function/"
METHOD: Final = "POST"
"""With others it is about a call and not a function: `async_routes` has these, behind the password."""
_DROPPED: Final = frozenset((
    b"connection", b"proxy-connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te",
    b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"expect", b"x-call-id", b"x-start-time",
))  # fmt: skip
"""What belongs to this connection, and what the execution says anew."""
_MOST_LISTED: Final = 10_000


class AsyncInvocations:
    """The ASGI application, for `METHOD` only."""

    def __init__(
        self,
        catalogue: Catalogue,
        calls: AsyncCalls,
        *,
        served_by: str,
        allow_local_callbacks: bool = False,
        rng: random.Random | None = None,
    ) -> None:
        """
        :param served_by: our product token, ``NAME/VERSION``
        :param rng: of call ids, which name and guard nothing
        """
        self._catalogue = catalogue
        self._calls = calls
        self._served_by = served_by.encode()
        self._allow_local = allow_local_callbacks
        self._rng = rng or random.Random()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        start_ns = time.time_ns()
        raw: bytes = scope["raw_path"]
        name, slash, path = raw[len(PREFIX) :].partition(b"/")
        headers: list[Header] = []
        call_id, url = b"", None
        size = b""
        length = -1
        forwarded = False
        for key, value in scope["headers"]:
            if key == b"x-call-id":
                call_id = value[:128]
            elif key == b"content-length":
                length = int(value)
            elif key not in _DROPPED:
                headers.append((key, value))
                if key == b"x-callback-url":
                    url = value.decode("latin-1").strip()
                elif key == b"x-gpufaas-size":
                    size = value
                elif key == b"x-forwarded-for":
                    forwarded = True
        call_id = call_id or str(uuid.UUID(int=self._rng.getrandbits(128), version=4)).encode()
        answered: list[Header] = [
            (b"x-call-id", call_id), (b"x-start-time", b"%d" % start_ns), (b"x-served-by", self._served_by),
        ]  # fmt: skip
        if not forwarded and scope.get("client"):
            host, port = scope["client"]
            headers.append((b"x-forwarded-for", f"{host}:{port}".encode()))
        asked = name.decode("latin-1")
        answer = Answer(202, [(b"content-length", b"0"), *answered])
        try:
            deployed = self._find(asked)
            if url is not None:
                check_url(url, self._allow_local)
            if size:
                told_size(size)
            if length > deployed.max_body:
                raise too_large(deployed, length)
            call = AcceptedCall(
                call_id.decode("latin-1"), deployed.full_name, asked, slash + path, scope["query_string"],
                tuple(headers), url or None, start_ns,
            )  # fmt: skip
            await self._accept(call, deployed, AsgiCaller(receive))
        except CallCancelled:
            return
        except GpufaasError as error:
            answer = refusal(error, answered)
        await send_whole(send, answer)

    async def _accept(self, call: AcceptedCall, deployed: Deployed, caller: Caller) -> None:
        """Read the body of *call*, and return once it is durable."""
        self._calls.backlog.reserve(call.function)
        try:
            body, file = await self._read(deployed, caller)
        except BaseException:
            self._calls.backlog.release(call.function)
            raise
        try:
            await self._calls.accept(replace(call, body=body))
        except StorageFailed:
            if file is not None:
                file.discard()
            raise

    def _find(self, name: str) -> Deployed:
        deployed = self._catalogue.find(name)
        if deployed is None:
            if not self._catalogue.loaded:
                raise Unavailable("the platform is starting: its functions are not all loaded; try again in a second")
            raise UnknownFunction(f"there is no function {name[:200]!r}: deploy it (gpufaas up), or see gpufaas list")
        if deployed.unavailable is not None:
            raise Unavailable(f"{deployed.name} cannot be called: {deployed.unavailable}")
        return deployed

    async def _read(self, deployed: Deployed, caller: Caller) -> tuple[Body, SpooledBody | None]:
        """Return the body; beyond `INLINE_BODY`, its file and whose it is until it is accepted."""
        pieces: list[bytes] = []
        size, file = 0, None
        piece, more = await caller.receive()
        try:
            async with asyncio.timeout(deployed.timeout_s if more else None):
                while True:
                    size += len(piece)
                    if size > deployed.max_body:
                        raise too_large(deployed, size)
                    pieces.append(piece)
                    if size > INLINE_BODY:
                        if file is None:
                            file = self._calls.new_file()
                        for each in pieces:
                            file.write(each)
                        pieces.clear()
                    if not more:
                        break
                    piece, more = await caller.receive()
            if file is None:
                return b"".join(pieces), None
            return await asyncio.to_thread(file.keep), file
        except BaseException as exc:
            if file is not None:
                file.discard()
            if isinstance(exc, TimeoutError):
                raise DeadlineExceeded(
                    f"the body for {deployed.name} did not arrive within {deployed.timeout_s:g} s, its time limit"
                ) from exc
            raise


def async_routes(
    calls: AsyncCalls, invocations: AsyncInvocations, is_function: Callable[[str], bool] = lambda _: False
) -> APIRouter:
    """
    Return the routes about asynchronous calls; to be included in the management app, whose auth and error answers they
    get. None of them shows a body.

    :param invocations: are served in front of the router, which has them too: it says which methods a path has
    :param is_function: by a name as URLs have it: whoever asks for a function's path has mistaken the method
    """
    router = APIRouter()
    router.add_route("/async-function/{name:path}", cast(Any, invocations), methods=[METHOD], include_in_schema=False)

    @router.get("/async/{call}")
    async def status(call: str) -> Response:
        found = await calls.status(call)
        return _unknown(call) if found is None else _json(_shown(found))

    # Ids are what callers say: they may have slashes, which `auth.CleanPaths` leaves alone only here.
    @router.get("/async-function/{name:path}")
    async def status_here(name: str) -> Response:
        found = await calls.status(name)
        if found is None and is_function(name.partition("/")[0]):
            raise HTTPException(405)
        return _unknown(name) if found is None else _json(_shown(found))

    @router.delete("/async-function/{name:path}")
    async def cancel(name: str) -> Response:
        state = await calls.cancel(name)
        if state == "cancelled":
            return Response(status_code=202)
        if state is None:
            return _unknown(name)
        return error_answer(409, f"call {name[:128]!r} has ended ({state}): there is nothing left to cancel")

    @router.get("/system/async/dead")
    async def dead(request: Request) -> Response:
        function = request.query_params.get("function") or None
        namespace = request.query_params.get("namespace") or "openfaas-fn"
        if function is not None and "." not in function:
            function = f"{function}.{namespace}"
        try:
            limit = int(request.query_params.get("limit") or 1000)
        except ValueError as exc:
            raise InvalidSpec(f"limit: {exc}") from exc
        return _json([_shown(each) for each in await calls.dead(function, min(max(1, limit), _MOST_LISTED))])

    @router.post("/system/async/dead/{call}/retry")
    async def retry(call: str) -> Response:
        return Response(status_code=202) if await calls.retry(call) else _not_dead(call)

    @router.delete("/system/async/dead/{call}")
    async def discard(call: str) -> Response:
        return Response(status_code=202) if await calls.discard(call) else _not_dead(call)

    return router


def _shown(status: CallStatus) -> dict[str, object]:
    """As JSON: camel case as in OpenFaaS's types, and times that its clients can read."""
    return {
        "callId": status.id,
        "function": status.function,
        "state": status.state,
        "attempts": status.attempts,
        "callbackAttempts": status.deliveries,
        "status": status.status,
        "reason": status.reason,
        "acceptedAt": _time(status.accepted_at),
        "endedAt": _time(status.ended_at),
        "dueAt": _time(status.due_at),
    }


def _time(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _not_dead(call: str) -> Response:
    return error_answer(404, f"there is no dead letter {call[:128]!r}: GET /system/async/dead lists them")


def _unknown(call: str) -> Response:
    return error_answer(
        404,
        f"there is no asynchronous call {call[:128]!r}, or it ended too long ago (functions are called with POST)",
    )
