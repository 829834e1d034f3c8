"""`Client` and `AsyncClient`: the operations, over httpx's two clients."""

import functools
import math
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, Final, ParamSpec, Protocol, Self, TypeAlias, TypeVar, cast, overload
from urllib.parse import urlsplit

import httpx

from gpufaas import operations, plan_operations
from gpufaas.answer import AsyncStream, Stream
from gpufaas.errors import GatewayUnreachable, GpufaasError
from gpufaas.gateway import ENDLESS, ApiRequest, Gateway, Hints, Steps
from gpufaas.resources import CallStatus, LogLine
from gpufaas_core import local_login
from gpufaas_core._types import Seconds

_P = ParamSpec("_P")
_T = TypeVar("_T")
_R = TypeVar("_R", covariant=True)
_Operation: TypeAlias = Callable[Concatenate[Gateway, _P], Steps[_T]]
_Soon: TypeAlias = Coroutine[Any, Any, _T]

DEFAULT_GATEWAY: Final = "http://127.0.0.1:8080"
DEFAULT_NAMESPACE: Final = "openfaas-fn"
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_CONNECT_S: Final[Seconds] = 5.0
_ANSWER_S: Final[Seconds] = 60.0
_DEPLOY_S: Final[Seconds] = 600.0  # a deploy checks the import of the handler, and digests weights of many GB


class _Method(Protocol[_P, _R]):
    """An operation as a method: what it returns, `AsyncClient` returns as a coroutine."""

    @overload
    def __get__(self, client: "Client", kind: Any) -> Callable[_P, _R]: ...
    @overload
    def __get__(self, client: "AsyncClient", kind: Any) -> Callable[_P, _Soon[_R]]: ...


def _method(operation: _Operation[_P, _T]) -> _Method[_P, _T]:
    @functools.wraps(operation)
    def method(self: "_Client", /, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        return self._run(operation(self._at, *args, **kwargs))

    return cast(_Method[_P, _T], method)


class _Client:
    """The settings of both clients, their operations, and the arguments of their requests."""

    functions = _method(operations.functions)
    function = _method(operations.function)
    deploy = _method(operations.deploy)
    remove = _method(operations.remove)
    scale = _method(operations.scale)
    history = _method(operations.history)
    rollback = _method(operations.rollback)
    environments = _method(operations.environments)
    invoke = _method(operations.invoke)
    call = _method(operations.call)
    wait_for_call = _method(operations.wait_for_call)
    cancel_call = _method(operations.cancel_call)
    dead_calls = _method(operations.dead_calls)
    retry_call = _method(operations.retry_call)
    explain = _method(operations.explain)
    info = _method(operations.info)
    status = _method(operations.status)
    is_ready = _method(operations.is_ready)
    prune = _method(operations.prune)
    nodes = _method(operations.nodes)
    cost = _method(operations.cost)
    node = _method(operations.node)
    drain_node = _method(operations.drain_node)
    plan = _method(plan_operations.plan)
    apply_plan = _method(plan_operations.apply_plan)
    plan_history = _method(plan_operations.plan_history)
    roll_back_plan = _method(plan_operations.roll_back_plan)
    pin = _method(plan_operations.pin)
    unpin = _method(plan_operations.unpin)
    make_plan = _method(plan_operations.make_plan)
    take_profile = _method(operations.take_profile)
    profiles = _method(operations.profiles)
    put_profiles = _method(operations.put_profiles)
    secrets = _method(operations.secrets)
    put_secret = _method(operations.put_secret)
    remove_secret = _method(operations.remove_secret)
    namespaces = _method(operations.namespaces)
    namespace = _method(operations.namespace)
    put_namespace = _method(operations.put_namespace)
    remove_namespace = _method(operations.remove_namespace)
    quota = _method(operations.quota)
    put_quota = _method(operations.put_quota)
    remove_quota = _method(operations.remove_quota)
    has_artifact = _method(operations.has_artifact)
    put_artifact = _method(operations.put_artifact)

    def __init__(
        self,
        gateway: str | None = None,
        *,
        auth: tuple[str, str] | str | None = None,
        token: str | None = None,
        verify: bool = True,
        timeout_s: Seconds = _ANSWER_S,
        deploy_s: Seconds = _DEPLOY_S,
        user_agent: str = "gpufaas-python",
        event_hooks: Mapping[str, list[Callable[..., Any]]] | None = None,
        hints: Hints = Hints(),  # noqa: B008 (frozen)
    ) -> None:
        """
        :param gateway: its URL; else OPENFAAS_URL, else http://127.0.0.1:8080. A user and password in it are also sent
            to functions, and go before *auth* and *token*
        :param auth: user and password, or the value of ``Authorization``; it is sent to the management routes, and not
            to functions. Without it, that of a gateway which this user started on this machine is found
        :param token: a bearer token, instead of *auth*
        :param verify: whether the certificate of an https:// gateway is checked
        :param timeout_s: for each answer of the gateway; answers of functions have no limit
        :param deploy_s: for a deployment, for each step of an upload, and for what `prune` removes
        :param event_hooks: httpx's
        :raises GatewayUnreachable: *gateway* is not a URL
        """
        self.gateway = local_login.direct((gateway or os.environ.get("OPENFAAS_URL") or DEFAULT_GATEWAY).rstrip("/"))
        parts = urlsplit(self.gateway)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise GatewayUnreachable(f"{gateway} is not the URL of a gateway: write for example {DEFAULT_GATEWAY}")
        user = parts.netloc.rpartition("@")[0]
        self.shown = self.gateway.replace(f"{user}@", "", 1) if user else self.gateway
        """The gateway without its password, for people."""
        self._given = "" if user else f"Bearer {token}" if token else _header(auth)
        self._at = Gateway(self.shown, deploy_s, hints)
        self._timeout_s = timeout_s
        self._use(
            event_hooks=event_hooks,
            # Reading the certificates takes 20 ms and more, and http:// does not need them.
            verify=ssl.create_default_context() if parts.scheme == "https" and verify else False,
            # A proxy for the internet does not reach this machine's loopback address.
            trust_env=parts.hostname not in LOOPBACK,
            headers={"User-Agent": user_agent},
        )

    @property
    def authorization(self) -> str | None:
        """What is sent to the management routes: what was given, or found. None: nothing, or what the URL has."""
        return _header(local_login.find(self.gateway)) if self._given is None else self._given or None

    def _use(self, **options: Any) -> None:
        """Make httpx's client with *options*."""
        raise NotImplementedError

    def _run(self, steps: Steps[_T]) -> Any:
        """Send the requests of *steps*; return what they return, or a coroutine for it."""
        raise NotImplementedError

    def _arguments(self, request: ApiRequest) -> dict[str, Any]:
        """Return the arguments of httpx's ``build_request``, without the content."""
        headers = list(request.headers)
        if not request.of_function and (authorization := self.authorization):
            headers.append(("Authorization", authorization))
        timeout_s = self._timeout_s if request.timeout_s is None else request.timeout_s
        return {
            "method": request.method,
            "url": self.gateway + request.path,
            "params": request.params,
            "headers": headers,
            "json": request.json,
            "timeout": httpx.Timeout(
                None if math.isinf(timeout_s) else timeout_s, connect=min(self._timeout_s, _CONNECT_S)
            ),
        }

    def _is_read(self, request: ApiRequest, answer: httpx.Response) -> bool:
        return not request.streams or self._at.is_refusal(answer, request.of_function)


def _header(auth: tuple[str, str] | str | None) -> str | None:
    if not isinstance(auth, tuple):
        return auth
    return str(next(httpx.BasicAuth(*auth).auth_flow(httpx.Request("GET", ""))).headers["Authorization"])


# --- blocking ---


def _calling(operation: _Operation[_P, str]) -> Callable[Concatenate["Client", _P], "Call"]:
    @functools.wraps(operation)
    def method(self: "Client", /, *args: _P.args, **kwargs: _P.kwargs) -> "Call":
        return Call(self, self._run(operation(self._at, *args, **kwargs)))

    return method


def _opening(
    operation: _Operation[_P, httpx.Response], read: Callable[[Gateway, httpx.Response], _T]
) -> Callable[Concatenate["Client", _P], AbstractContextManager[_T]]:
    @functools.wraps(operation)
    @contextmanager
    def method(self: "Client", /, *args: _P.args, **kwargs: _P.kwargs) -> Iterator[_T]:
        answer = self._run(operation(self._at, *args, **kwargs))
        try:
            yield read(self._at, answer)
        finally:
            answer.close()

    return method


def _lines(at: Gateway, answer: httpx.Response) -> Iterator[LogLine]:
    with at.translated():
        for line in answer.iter_lines():
            if line.strip():
                yield at.log_line(line)


class Client(_Client):
    """
    A gateway's operations, blocking; one connection pool, safe to use from several threads.

    A gateway that is starting (503) is asked again for up to 30 s; no other request is repeated. Every method raises
    `GatewayUnreachable`, `NotAuthorised` or `Refused`.
    """

    logs = _opening(operations.logs, _lines)
    stream = _opening(operations.stream, lambda _, answer: Stream(answer))
    invoke_async = _calling(operations.invoke_later)

    def _use(self, **options: Any) -> None:
        self._http = httpx.Client(**options)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, steps: Steps[_T]) -> _T:
        try:
            request = next(steps)
            while True:
                time.sleep(request.after_s)
                try:
                    answer = self._send(request)
                except GpufaasError as exc:
                    request = steps.throw(exc)
                else:
                    request = steps.send(answer)
        except StopIteration as end:
            found: _T = end.value
            return found

    def _send(self, request: ApiRequest) -> httpx.Response:
        with self._at.translated():
            built = self._http.build_request(**self._arguments(request), content=request.content)
            answer = self._http.send(built, stream=True)
        if self._is_read(request, answer):
            try:
                with self._at.translated(request.of_function):
                    answer.read()
            finally:
                answer.close()
        return answer


@dataclass(frozen=True, slots=True)
class Call:
    """An asynchronous call that was accepted."""

    _client: Client
    id: str

    def status(self) -> CallStatus:
        return self._client.call(self.id)

    def wait(self, timeout_s: Seconds = ENDLESS) -> CallStatus:
        """See `Client.wait_for_call`."""
        return self._client.wait_for_call(self.id, timeout_s)

    def cancel(self) -> None:
        self._client.cancel_call(self.id)


# --- asynchronous ---


def _calling_async(operation: _Operation[_P, str]) -> Callable[Concatenate["AsyncClient", _P], _Soon["AsyncCall"]]:
    @functools.wraps(operation)
    async def method(self: "AsyncClient", /, *args: _P.args, **kwargs: _P.kwargs) -> "AsyncCall":
        return AsyncCall(self, await self._run(operation(self._at, *args, **kwargs)))

    return method


def _opening_async(
    operation: _Operation[_P, httpx.Response], read: Callable[[Gateway, httpx.Response], _T]
) -> Callable[Concatenate["AsyncClient", _P], AbstractAsyncContextManager[_T]]:
    @functools.wraps(operation)
    @asynccontextmanager
    async def method(self: "AsyncClient", /, *args: _P.args, **kwargs: _P.kwargs) -> AsyncIterator[_T]:
        answer = await self._run(operation(self._at, *args, **kwargs))
        try:
            yield read(self._at, answer)
        finally:
            await answer.aclose()

    return method


async def _lines_async(at: Gateway, answer: httpx.Response) -> AsyncIterator[LogLine]:
    with at.translated():
        async for line in answer.aiter_lines():
            if line.strip():
                yield at.log_line(line)


class AsyncClient(_Client):
    """`Client`, for asyncio: the same methods, awaited."""

    logs = _opening_async(operations.logs, _lines_async)
    stream = _opening_async(operations.stream, lambda _, answer: AsyncStream(answer))
    invoke_async = _calling_async(operations.invoke_later)

    def _use(self, **options: Any) -> None:
        self._http = httpx.AsyncClient(**options)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _run(self, steps: Steps[_T]) -> _T:
        import anyio  # httpx's; quick to import where a loop runs

        try:
            request = next(steps)
            while True:
                await anyio.sleep(request.after_s)
                try:
                    answer = await self._send(request)
                except GpufaasError as exc:
                    request = steps.throw(exc)
                else:
                    request = steps.send(answer)
        except StopIteration as end:
            found: _T = end.value
            return found

    async def _send(self, request: ApiRequest) -> httpx.Response:
        content = request.content
        with self._at.translated():
            built = self._http.build_request(
                **self._arguments(request), content=_unblocked(content) if isinstance(content, Iterator) else content
            )
            answer = await self._http.send(built, stream=True)
        if self._is_read(request, answer):
            try:
                with self._at.translated(request.of_function):
                    await answer.aread()
            finally:
                await answer.aclose()
        return answer


@dataclass(frozen=True, slots=True)
class AsyncCall:
    """`Call`, awaited."""

    _client: AsyncClient
    id: str

    async def status(self) -> CallStatus:
        return await self._client.call(self.id)

    async def wait(self, timeout_s: Seconds = ENDLESS) -> CallStatus:
        """See `Client.wait_for_call`."""
        return await self._client.wait_for_call(self.id, timeout_s)

    async def cancel(self) -> None:
        await self._client.cancel_call(self.id)


async def _unblocked(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Do each step in a thread: it may read a file."""
    import anyio.to_thread

    while (part := await anyio.to_thread.run_sync(next, parts, None)) is not None:
        yield part
