"""
The main program of a container: serves a handler over HTTP, as OpenFaaS's images do.

``python -m gpufaas_functions.http_server [FOLDER]``; FOLDER, by default ``function``, has handler.py. The author's API
is `author`'s: ``load(device)`` and ``handle(model, event, context)``, or only ``handle(event, context)``, which may be
async. A ``handle_batch`` without a ``handle`` gets each call by itself.

It listens at once. ``/_/health`` is 200 while it runs, ``/_/ready`` while the model is loaded and SIGTERM has not come;
calls wait for the load. A load that fails ends the process with status 1. Calls are served one at a time, since a model
has its device to itself, or `GPUFAAS_SLOTS` at a time. After SIGTERM it takes no new connections, and running calls
have `write_timeout` to end.

Environment variables, all optional: PORT; GPUFAAS_DEVICE and GPUFAAS_DEVICE_MEMORY, which the platform sets
(``cuda:0``, and the bytes that torch's allocator may take of it); GPUFAAS_SLOTS; GPUFAAS_PREFLIGHTS (the handler
answers CORS preflights); write_timeout; OPENFAAS_NAME and OPENFAAS_NAMESPACE.
"""

import asyncio
import concurrent.futures
import contextlib
import math
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvicorn

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.hop_by_hop import end_to_end
from gpufaas_core.log_marks import MARK_VARIABLE
from gpufaas_core.units import Bytes, Seconds, parse_duration
from gpufaas_functions import batches, call_lines, exit_hooks
from gpufaas_functions.answers import Handle, answer_of, in_one_line, traceback_of
from gpufaas_functions.author import BadBody, Context, Event, HandlerAnswer, piece_of, to_answer
from gpufaas_functions.author_modules import import_handler
from gpufaas_functions.coroutines import Pieces, aopened, called, closed, is_async
from gpufaas_functions.memory import is_out_of_memory
from gpufaas_functions.thread_state import ThreadState, give_loops

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Coroutine[Any, Any, None]]

SECRETS: Final = "/var/openfaas/secrets"
_TEXT: Final = [(b"content-type", b"text/plain; charset=utf-8")]
_OURS: Final = frozenset((b"content-length", b"transfer-encoding", b"connection"))
"""Headers that say how the answer is sent, which the author does not know."""
_OF_PREFLIGHTS: Final = frozenset((b"origin", b"access-control-request-method"))
_WITHOUT_BODY: Final = frozenset((204, 304))
_CPU_MAX: Final = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class ContainerSettings:
    folder: Path
    port: int = 8080
    device: str = ""
    """Empty: a GPU if torch finds one, else the CPU."""
    device_memory: Bytes = 0
    """The bytes of the device that it may use; 0: all."""
    slots: int = 1
    drain_s: Seconds = 30.0
    function: str = ""

    @classmethod
    def of(cls, arguments: list[str], env: Mapping[str, str]) -> "ContainerSettings":
        """:raises InvalidSpec: a value cannot be read; names its variable"""
        return cls(
            folder=Path(arguments[0] if arguments else "function").absolute(),
            port=_number(env, "PORT", 8080, 65_535),
            device=env.get("GPUFAAS_DEVICE", ""),
            device_memory=_number(env, "GPUFAAS_DEVICE_MEMORY", 0, 1 << 62),
            slots=_number(env, "GPUFAAS_SLOTS", 1, 1024),
            drain_s=_drain_s(env.get("write_timeout", "30s")),
            function=f"{env.get('OPENFAAS_NAME', 'function')}.{env.get('OPENFAAS_NAMESPACE', 'openfaas-fn')}",
        )


def _number(env: Mapping[str, str], name: str, otherwise: int, most: int) -> int:
    text = env.get(name, "") or str(otherwise)
    if not text.isdecimal() or not min(1, otherwise) <= int(text) <= most:
        raise InvalidSpec(f"{name}: {text[:80]!r} is not a whole number up to {most}")
    return int(text)


def _drain_s(text: str) -> Seconds:
    """A bare number is in seconds, as OpenFaaS's watchdogs read it."""
    try:
        return parse_duration(f"{text}s" if text.strip().isdecimal() else text)
    except InvalidSpec as exc:
        raise InvalidSpec(f"write_timeout: {exc}") from exc


class Gone(Exception):
    """The caller went away."""


class Application:
    """
    The ASGI application. Handlers run in threads of ours, as many as there are slots; async ones on an event loop in a
    thread of its own. So health checks are answered, whatever handlers do.
    """

    def __init__(self, settings: ContainerSettings) -> None:
        self._settings = settings
        self._pool = concurrent.futures.ThreadPoolExecutor(settings.slots, "slot")
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.Future[Handle] = self._loop.create_future()
        self._handlers: asyncio.AbstractEventLoop | None = None
        """The event loop of an async handler."""
        self._slots = asyncio.Semaphore(settings.slots)
        self._answered = "" if "GPUFAAS_PREFLIGHTS" in os.environ else "OPTIONS"
        """The method of preflights, which are answered here; empty: they are calls."""
        self.draining: Callable[[], bool] = lambda: False

    async def load(self) -> None:
        """Make the model, in a thread that will serve it. Raises what the handler's code raises."""
        loaded = self._loop.run_in_executor(self._pool, lambda: (self._load(), ThreadState()))
        handle, self._state = await loaded
        if (loop := self._handlers) is not None:
            loop.set_default_executor(self._state.executor())
            threading.Thread(target=self._state.run, args=(loop.run_forever,), name="handlers", daemon=True).start()
        self._handle.set_result(handle)

    def _load(self) -> Handle:
        settings = self._settings
        self._device = _prepare(settings)
        sys.path.insert(0, str(settings.folder))
        os.chdir(settings.folder)
        handler = import_handler()
        handle: Handle | None = getattr(handler, "handle", None)
        together = getattr(handler, batches.NAME, None)
        with_model = callable(getattr(handler, "load", None))
        if not callable(handle) and not (with_model and callable(together)):
            raise AttributeError("handler.py defines no function handle()")
        if is_async(handle):
            self._handlers = asyncio.new_event_loop()
        if handle is not None and not with_model:
            return handle
        model = handler.load(self._device)
        exit_hooks.kept.append(model)
        if handle is None:
            assert together is not None
            return batches.BatchHandler(partial(together, model)).one
        return partial(handle, model)

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            return
        match scope["path"]:
            case "/_/health":
                await _send_whole(send, HandlerAnswer(200, _TEXT, b"OK", None))
            case "/_/ready":
                ready = self._handle.done() and not self.draining()
                await _send_whole(send, HandlerAnswer(200 if ready else 503, _TEXT, b"", None))
            case _ if scope["method"] == self._answered and dict(scope["headers"]).keys() >= _OF_PREFLIGHTS:
                await _send_whole(send, HandlerAnswer(204, [], b"", None))
            case _:
                with contextlib.suppress(Gone):
                    await self._call(scope, receive, send)

    async def _call(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        body = await _whole_body(receive)
        handle = await asyncio.shield(self._handle)
        event = Event(
            scope["method"], scope["raw_path"].decode("latin-1"), scope["query_string"], scope["headers"], body
        )
        call_id = next((value for name, value in scope["headers"] if name == b"x-call-id"), b"").decode("latin-1")
        context = Context(call_id, self._settings.function, self._device)
        kind = _ThreadCall if self._handlers is None else _Call
        call = kind(handle, event, context, send, self._loop, self._settings.slots == 1)
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            async with self._slots:
                if not gone.done():
                    await self._run(call, gone)
        finally:
            gone.cancel()

    async def _run(self, call: "_Call", gone: asyncio.Future[None]) -> None:
        """Run *call* with all that the load has set. Its caller is *gone*: a coroutine is cancelled."""
        if isinstance(call, _ThreadCall):
            running = self._loop.run_in_executor(self._pool, self._state.run, call.run_here)
        else:
            assert self._handlers is not None
            begun = self._state.context.run(asyncio.run_coroutine_threadsafe, call.run(), self._handlers)
            running = asyncio.wrap_future(begun)
        await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            call.gone = True
            if not isinstance(call, _ThreadCall):
                running.cancel()
                raise Gone
        await running


@dataclass(eq=False)
class _Call:
    """One call of an async handler."""

    handle: Handle
    event: Event
    context: Context
    send: _Send
    loop: asyncio.AbstractEventLoop
    """That of `send`."""
    alone: bool
    """No other call runs meanwhile."""
    gone: bool = False
    """The caller is gone: the next piece is not sent."""

    async def run(self) -> None:
        """:raises Gone: the caller went away"""
        call_lines.begin(self.context.call_id, self.alone)
        try:
            await self._answer()
        finally:
            call_lines.end(self.context.call_id, self.alone)

    async def _answer(self) -> None:
        pieces: Pieces | None = None
        first = b""
        try:
            answer, pieces = await self._called()
            if pieces is not None:
                first = await aopened(answer, pieces, -1)
        except BaseException as exc:  # a handler that raises SystemExit fails, and does not end this process
            if self.gone and isinstance(exc, asyncio.CancelledError):
                raise
            answer = _failure(exc, self.context.device)
        if answer.body is not None or pieces is None:
            await self._sent(_send_whole(self.send, answer))
            return
        try:
            await self._sent(self.send(_start(answer)))
            await self._sent_piece(first)
            async for each in pieces:
                await self._sent_piece(piece_of(each))
                await asyncio.sleep(0)  # else a generator that never waits would stop the other calls
        except BaseException as exc:
            if isinstance(exc, Gone) or (self.gone and isinstance(exc, asyncio.CancelledError)):
                raise
            print(traceback_of(exc), end="", file=sys.stderr)
            raise RuntimeError("the answer broke off") from None  # the connection is cut: half must not look whole
        finally:
            await closed(pieces)
        await self._sent(self.send({"type": "http.response.body"}))

    async def _sent_piece(self, piece: bytes) -> None:
        if self.gone:
            raise Gone
        if piece:
            await self._sent(self.send({"type": "http.response.body", "body": piece, "more_body": True}))

    async def _sent(self, sending: Coroutine[Any, Any, None]) -> None:
        """Let the other loop send, and wait until the connection takes more, which is the back-pressure."""
        try:
            await self._wait(asyncio.run_coroutine_threadsafe(sending, self.loop))
        except (OSError, RuntimeError, concurrent.futures.CancelledError):
            raise Gone from None

    async def _called(self) -> tuple[HandlerAnswer, Pieces | None]:
        return await called(self.handle, self.event, self.context)

    async def _wait(self, sent: "concurrent.futures.Future[None]") -> None:
        await asyncio.wrap_future(sent)


class _ThreadCall(_Call):
    """One call of a plain handler, in a slot's thread: where the other kind awaits something, it blocks."""

    def run_here(self) -> None:
        """As `run`, without an event loop."""
        running = self.run()
        with contextlib.suppress(StopIteration):
            while True:
                running.send(None)

    async def _called(self) -> tuple[HandlerAnswer, Pieces | None]:
        answer = to_answer(self.handle(self.event, self.context))
        return answer, None if answer.chunks is None else _each(answer.chunks)

    async def _wait(self, sent: "concurrent.futures.Future[None]") -> None:
        sent.result()


async def _each(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield *chunks*, and close them."""
    with contextlib.closing(chunks):  # type: ignore[type-var]  # a generator, see `to_answer`
        for each in chunks:
            yield each


async def _until_gone(receive: _Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole_body(receive: _Receive) -> bytes:
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


def _start(answer: HandlerAnswer) -> dict[str, Any]:
    headers = [each for each in end_to_end(answer.headers) if each[0] not in _OURS]
    if answer.body is not None and answer.status not in _WITHOUT_BODY:
        headers.append((b"content-length", str(len(answer.body)).encode()))
    return {"type": "http.response.start", "status": answer.status, "headers": headers}


async def _send_whole(send: _Send, answer: HandlerAnswer) -> None:
    await send(_start(answer))
    body = b"" if answer.status in _WITHOUT_BODY else answer.body
    await send({"type": "http.response.body", "body": body})


def _failure(exc: BaseException, device: str) -> HandlerAnswer:
    """Return an answer with the text of *exc*. Its traceback goes to the log, unless it is the caller's fault."""
    if isinstance(exc, BadBody):
        return answer_of(exc)
    print(traceback_of(exc), end="", file=sys.stderr)
    if not is_out_of_memory(exc):
        return answer_of(exc)
    if device.startswith("cuda") and "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
    advice = "send less at once, or deploy it with a larger gpufaas.memory"
    text = f"out of memory on {device} ({in_one_line(exc)}): {advice}"
    return HandlerAnswer(507, [*_TEXT, (b"x-gpufaas-error", b"out-of-memory")], text.encode(), None)


def _prepare(settings: ContainerSettings) -> str:
    """
    Return the device for `load`, and limit torch to its share of that device and of the processors.

    :raises InvalidSpec: the container was given a GPU that torch does not find
    """
    try:
        import torch
    except ImportError:  # it may do without: with onnxruntime, say
        return settings.device or "cpu"
    if (cores := _cores()) and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores)
    there = torch.cuda.is_available()
    device = settings.device or ("cuda:0" if there else "cpu")
    if device.startswith("cuda"):
        if not there:
            raise InvalidSpec(
                f"the container was given a GPU, and torch {torch.__version__} finds none: build the image with a "
                "CUDA build of torch that the driver is new enough for"
            )
        if settings.device_memory:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, settings.device_memory / total), device)
    return device


def _cores() -> int:
    """Return how many cores this container may use, rounded up; 0: as many as there are."""
    try:
        quota, period = _CPU_MAX.read_text().split()
        return 0 if quota == "max" else max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return 0


async def serve(settings: ContainerSettings) -> int:
    """Serve until SIGTERM; return the exit status."""
    application = Application(settings)
    server = uvicorn.Server(
        uvicorn.Config(
            application, host="0.0.0.0", port=settings.port, lifespan="off", ws="none", access_log=False,
            log_level="warning", server_header=False, timeout_keep_alive=75,
            timeout_graceful_shutdown=math.ceil(settings.drain_s),
        )
    )  # fmt: skip
    application.draining = lambda: server.should_exit
    serving = asyncio.ensure_future(server.serve())
    loading = asyncio.ensure_future(application.load())
    await asyncio.wait((serving, loading), return_when=asyncio.FIRST_COMPLETED)
    if loading.done() and (error := loading.exception()) is not None:
        print(traceback_of(error), end="", file=sys.stderr)
        server.should_exit = server.force_exit = True
        await serving
        return 1
    if not serving.done():
        print(f"gpufaas: {settings.function} is ready", flush=True)
    await serving
    if not loading.done():
        os._exit(0)  # a load that still goes on in its thread is not waited for
    return 0


def main() -> None:
    os.environ.setdefault("secret_mount_path", SECRETS)
    call_lines.install()
    give_loops()
    call_lines.mark_with(os.environ.pop(MARK_VARIABLE, ""))
    try:
        settings = ContainerSettings.of(sys.argv[1:], os.environ)
    except InvalidSpec as exc:
        sys.exit(f"gpufaas: {exc}")
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn has its own handlers while it serves, and raises the signal again afterwards.
        signal.signal(number, lambda *_: None)
    status = asyncio.run(serve(settings))
    exit_hooks.run()
    exit_hooks.end_process(status)


if __name__ == "__main__":
    main()
