"""
Typed routes: FastAPI checks their parameters and bodies, and describes them (`openapi`).

A handler takes parameters and bodies of `wire`, and returns one of its structs. `refuses` lists what it raises.
"""

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from gpufaas_core.errors import BodyTooLarge, GpufaasError, InvalidSpec
from gpufaas_core.units import Bytes, MiB, Seconds, format_bytes
from gpufaas_gateway.catalogue import Catalogue
from gpufaas_gateway.errors import BodyTooSlow, Starting, status_of

Responses = dict[int | str, dict[str, Any]]

encode: Final = msgspec.json.Encoder().encode

SCHEMAS: Final = "x-schemas"
"""Key in the description of an answer: the schemas that it refers to. `openapi` moves them to the components."""
_MAX_JSON: Final[Bytes] = 4 * MiB  # etcd takes at most 1 MB for one value
_PATIENCE_S: Final[Seconds] = 30.0  # between two pieces of a body
_MAX_JSON_S: Final[Seconds] = 60.0
TEXT: Final = {"text/plain": {"schema": {"type": "string"}}}


class Route(APIRoute):
    """
    A route that encodes what its handler returns, by the annotation: None as an empty body, a Response as it is, all
    else as JSON by msgspec.

    Reads a body as JSON whatever its Content-Type, as OpenFaaS does.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        returned = inspect.signature(endpoint).return_annotation
        is_response = inspect.isclass(returned) and issubclass(returned, Response)
        if returned is not None and not is_response:
            status = options.get("status_code") or 200
            options["responses"] = {**(options.get("responses") or {}), status: json_of(returned)}
            endpoint = _encoded(endpoint)
        options |= {"response_model": None, "response_class": returned if is_response else Response}
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_first(request: Request) -> Response:
            return await handle(_JsonRequest(request, await read_body(request)))

        return handle if self.body_field is None else read_first


class _JsonRequest(Request):
    """A request whose body was read and parsed."""

    def __init__(self, request: Request, body: bytes) -> None:
        """:raises InvalidSpec: *body* is not JSON"""
        headers = [each for each in request.scope["headers"] if each[0] != b"content-type"]
        super().__init__({**request.scope, "headers": [*headers, (b"content-type", b"application/json")]})
        self._read = body
        try:
            self._parsed = from_json(body) if body else None
        except ValueError as exc:
            raise InvalidSpec(f"the body is not JSON: {exc}") from None

    async def body(self) -> bytes:
        return self._read

    async def json(self) -> Any:
        return self._parsed


def _encoded(handler: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[Response]]:
    @functools.wraps(handler)
    async def answer(*args: Any, **options: Any) -> Response:
        return Response(encode(await handler(*args, **options)), media_type="application/json")

    return answer


def router(catalogue: Catalogue | None = None) -> APIRouter:
    """Return a router of typed routes. With *catalogue* they answer 503 until it is loaded."""

    async def check_started() -> None:
        if catalogue is not None and not catalogue.loaded:
            raise Starting("the platform is starting: its functions are not all loaded")

    if catalogue is None:
        return APIRouter(route_class=Route)
    return APIRouter(route_class=Route, dependencies=[Depends(check_started)], responses=refuses(Starting))


def get_and_head(routes: APIRouter, path: str, **options: Any) -> Callable[[Callable[..., Any]], None]:
    """Return a decorator that adds a handler for GET and HEAD."""

    def add(handler: Callable[..., Any]) -> None:
        for method in ("GET", "HEAD"):
            routes.add_api_route(path, handler, methods=[method], **options)

    return add


def json_of(returned: Any) -> dict[str, Any]:
    """Return the description of an answer with JSON of the type *returned*."""
    (schema,), schemas = msgspec.json.schema_components([returned], ref_template="#/components/schemas/{name}")
    schemas = msgspec.json.decode(msgspec.json.encode(schemas))  # defaults that are tuples are lists then
    return {"content": {"application/json": {"schema": schema}}, SCHEMAS: schemas}


def lines_of(each: type[msgspec.Struct], media_type: str) -> dict[str, Any]:
    """Return the description of an answer with JSON of *each* in every line."""
    schema = {"type": "string", "description": f"one {each.__name__}, JSON, in every line"}
    return {"content": {media_type: {"schema": schema}}, SCHEMAS: json_of(each)[SCHEMAS]}


def refuses(*errors: type[GpufaasError]) -> Responses:
    """Return the descriptions of *errors* by status (`errors.STATUS`), from the docstrings of their classes."""
    described: Responses = {}
    for each in errors:
        answer = described.setdefault(status_of(each), {"description": "", "content": TEXT})
        about = " ".join((each.__doc__ or "").split("\n\n")[0].split())
        answer["description"] = f"{answer['description']} {about}".strip()
    return described


async def read_body(request: Request, most: Bytes = _MAX_JSON, why: str = "a deployment is a few KiB of JSON") -> bytes:
    """
    Return the whole body.

    :raises BodyTooLarge: it is over *most*, which is for that reason
    :raises BodyTooSlow: it takes over a minute, or nothing comes for half of one
    """
    body = bytearray()
    ends = asyncio.get_running_loop().time() + _MAX_JSON_S
    async for chunk in pieces(request):
        body += chunk
        if len(body) > most:
            raise BodyTooLarge(f"the body is over {format_bytes(most)}: {why}")
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
