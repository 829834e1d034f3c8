"""
The HTTP front of asynchronous calls: ``/async-function/NAME[/path]``, a plain ASGI application, and the routes that
tell what became of a call (docs/async.md).

202 means: the call is durable and will be executed. What can be known to be wrong is refused before.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final, cast

from fastapi import APIRouter, HTTPException, Path, Query
from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from gpufaas_async_calls.call import INLINE_BODY, AcceptedCall, CallStatus, Header
from gpufaas_async_calls.callbacks import HttpCallbacks
from gpufaas_async_calls.calls import AsyncCalls
from gpufaas_async_calls.spool_file import KeptBody
from gpufaas_core.errors import CallCancelled, DeadlineExceeded, GpufaasError, StorageFailed
from gpufaas_gateway.answering import Answer, refusal
from gpufaas_gateway.asked import read_asked
from gpufaas_gateway.call_body import Caller, too_large
from gpufaas_gateway.call_headers import new_call_id, read_head, told_size
from gpufaas_gateway.catalogue import Catalogue, ServedRevision
from gpufaas_gateway.errors import BadQuery, CallEnded, UnknownCall
from gpufaas_gateway.spec import DEFAULT_NAMESPACE
from gpufaas_gateway.typed_routes import refuses, router
from gpufaas_gateway.wire import InNamespace, Number

PREFIX: Final = b"/async-function/"
METHOD: Final = "POST"
"""Other methods are about a call, not a function: `async_routes` has them, behind the password."""
_MOST_LISTED: Final = 10_000


@dataclass(frozen=True, eq=False)
class AsyncInvocations:
    """The ASGI application, for `METHOD` only."""

    catalogue: Catalogue
    calls: AsyncCalls
    served_by: str
    """Our product token, ``NAME/VERSION``."""
    callbacks: HttpCallbacks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start_ns = time.time_ns()
        raw: bytes = scope["raw_path"]
        name, slash, path = raw[len(PREFIX) :].partition(b"/")
        passed, call_id, length, told = read_head(scope["headers"], scope.get("client"))
        headers = tuple(pair for pair in passed if pair[0] != b"expect")
        call_id, told = call_id or new_call_id().encode(), told or {}
        said = dict(headers).get(b"x-callback-url")
        url = None if said is None else said.decode("latin-1").strip()
        answered: list[Header] = [
            (b"x-call-id", call_id), (b"x-start-time", b"%d" % start_ns), (b"x-served-by", self.served_by.encode()),
        ]  # fmt: skip
        asked = name.decode("latin-1")
        answer = Answer(202, [(b"content-length", b"0"), *answered])
        try:
            deployed = self.catalogue.find(asked)
            if deployed is None or deployed.unavailable is not None:
                raise self.catalogue.why_not(asked)
            if url is not None:
                self.callbacks.check(url)
            if size := told.get(b"x-gpufaas-size"):
                told_size(size)
            read_asked(told, deployed.function, None)
            if length > deployed.max_body:
                raise too_large(deployed, length)
            call = AcceptedCall(
                call_id.decode("latin-1"), deployed.full_name, asked, slash + path, scope["query_string"],
                headers, url or None, start_ns,
            )  # fmt: skip
            await self._accept(call, deployed, AsgiCaller(receive))
            if url and (doubt := await self.callbacks.doubt(url, self.catalogue.find)):
                answer.headers.append((b"x-callback-warning", doubt.encode()))
        except CallCancelled:
            return
        except GpufaasError as error:
            answer = refusal(error, answered)
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        await send({"type": "http.response.body", "body": bytes(answer.body)})

    async def _accept(self, call: AcceptedCall, deployed: ServedRevision, caller: Caller) -> None:
        """Read the body of *call*, and return once it is durable."""
        self.calls.backlog.reserve(call.function)
        body = KeptBody(self.calls.new_file, INLINE_BODY)
        try:
            await self._read(body, deployed, caller)
            whole = await body.keep()
        except BaseException:
            self.calls.backlog.release(call.function)
            body.discard()
            raise
        try:
            await self.calls.accept(replace(call, body=whole))
        except StorageFailed:
            body.discard()
            raise

    async def _read(self, body: KeptBody, deployed: ServedRevision, caller: Caller) -> None:
        piece, more = await caller.receive()
        try:
            async with asyncio.timeout(deployed.timeout_s if more else None):
                while True:
                    if (size := body.size + len(piece)) > deployed.max_body:
                        raise too_large(deployed, size)
                    body.write(piece)
                    if not more:
                        return
                    piece, more = await caller.receive()
        except TimeoutError as exc:
            raise DeadlineExceeded(
                f"the body for {deployed.name} did not arrive within {deployed.timeout_s:g} s, its time limit"
            ) from exc


class AsgiCaller(Caller):
    """The client of an HTTP request."""

    __slots__ = ("_receive",)

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    async def receive(self) -> tuple[bytes, bool]:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise CallCancelled("the caller went away")
        return message.get("body", b""), message.get("more_body", False)


_Id = Annotated[str, Path(description="X-Call-Id of the call")]
_Time = Annotated[str | None, Meta(extra_json_schema={"format": "date-time"})]


class AsyncCall(Struct, rename="camel"):
    """What may be told of a call: never its body, headers or answer."""

    call_id: str
    function: str
    state: str
    attempts: int
    callback_attempts: int
    status: Annotated[int | None, Meta(description="of the last execution")]
    reason: str | None
    accepted_at: _Time
    ended_at: _Time
    due_at: _Time


def async_routes(
    calls: AsyncCalls, invocations: AsyncInvocations, is_function: Callable[[str], bool] = lambda _: False
) -> APIRouter:
    """
    Return the routes about asynchronous calls, for the management app, whose auth and error answers they get. None of
    them shows a body.

    :param invocations: served in front of the router, too; here they tell which methods a path has
    :param is_function: whether a name in a URL is a function's; then another method than POST is answered 405
    """
    routes = router()
    routes.add_route("/async-function/{name:path}", cast(Any, invocations), methods=[METHOD], include_in_schema=False)

    @routes.get("/async/{call}", responses=refuses(UnknownCall))
    async def describe_call(call: _Id) -> AsyncCall:
        """What became of an asynchronous call."""
        return _shown(call, await calls.status(call))

    # Ids are what callers say: they may have slashes, which `auth.CleanPaths` leaves alone only here.
    @routes.get("/async-function/{name:path}", responses={405: {}, **refuses(UnknownCall)})
    async def describe_call_here(name: _Id) -> AsyncCall:
        """What became of an asynchronous call."""
        found = await calls.status(name)
        if found is None and is_function(name.partition("/")[0]):
            raise HTTPException(405)
        return _shown(name, found)

    @routes.delete(
        "/async-function/{name:path}", status_code=202, responses=refuses(UnknownCall, CallEnded, StorageFailed)
    )
    async def cancel_call(name: _Id) -> None:
        state = await calls.cancel(name)
        if state is None:
            raise _unknown(name)
        if state != "cancelled":
            raise CallEnded(f"call {name[:128]!r} has ended ({state}): there is nothing left to cancel")

    @routes.get("/system/async/dead", responses=refuses(BadQuery))
    async def list_dead_letters(
        function: Annotated[str, Query(description="the function, in full or in its namespace")] = "",
        namespace: InNamespace = None,
        limit: Annotated[Number, Query(description="at most so many, 1000 unless given")] = None,
    ) -> list[AsyncCall]:
        if function and "." not in function:
            function = f"{function}.{namespace or DEFAULT_NAMESPACE}"
        found = await calls.dead(function or None, min(max(1, limit or 1000), _MOST_LISTED))
        return [_shown(each.id, each) for each in found]

    @routes.post("/system/async/dead/{call}/retry", status_code=202, responses=refuses(UnknownCall, StorageFailed))
    async def retry_dead_letter(call: _Id) -> None:
        if not await calls.retry(call):
            raise _not_dead(call)

    @routes.delete("/system/async/dead/{call}", status_code=202, responses=refuses(UnknownCall, StorageFailed))
    async def discard_dead_letter(call: _Id) -> None:
        if not await calls.discard(call):
            raise _not_dead(call)

    return routes


def _shown(call: str, status: CallStatus | None) -> AsyncCall:
    """:raises UnknownCall: there is none of the id *call*"""
    if status is None:
        raise _unknown(call)
    times = (status.accepted_at, status.ended_at, status.due_at)
    return AsyncCall(
        status.id, status.function, status.state, status.attempts, status.deliveries, status.status, status.reason,
        *(None if at is None else datetime.fromtimestamp(at, UTC).isoformat() for at in times),
    )  # fmt: skip


def _not_dead(call: str) -> UnknownCall:
    return UnknownCall(f"there is no dead letter {call[:128]!r}: GET /system/async/dead lists them")


def _unknown(call: str) -> UnknownCall:
    return UnknownCall(
        f"there is no asynchronous call {call[:128]!r}, or it ended too long ago (functions are called with POST)"
    )
