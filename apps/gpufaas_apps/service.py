"""What the three services share: who they are, etcd, the status port, the stop."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import uvicorn

from gpufaas_apps.options import ClusterOptions
from gpufaas_apps.resources import keep_private, raise_descriptors
from gpufaas_apps.watchdog import watched
from gpufaas_core import wire
from gpufaas_core.connection import Identity, split_address
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.model import Seconds
from gpufaas_store.election import watch_leader
from gpufaas_store.etcd import Etcd, EtcdSettings, open_store

log = logging.getLogger("service")

_MIN_TOKEN: Final = 16
App = Callable[[Any, Any, Any], Awaitable[None]]


def run_service(main: Coroutine[Any, Any, None], grace_s: Seconds = 0.0) -> None:
    """Run *main* on uvloop, with log lines on stderr. *grace_s*: how long calls may run on once it is to stop."""
    import uvloop

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for noisy in ("httpx", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    raise_descriptors()
    if sys.version_info >= (3, 12):
        uvloop.run(watched(main, grace_s))
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(watched(main, grace_s))


def identity(options: ClusterOptions, role: wire.Role) -> Identity:
    """:raises InvalidSpec: the token file, or a certificate, is not there or no good"""
    try:
        token = options.token_file.read_bytes().strip()
    except OSError as exc:
        raise InvalidSpec(
            f"--token-file {options.token_file}: {exc.strerror}: write the cluster's token there, as made by "
            "'openssl rand -hex 32', the same for every service"
        ) from exc
    if len(token) < _MIN_TOKEN:
        raise InvalidSpec(
            f"--token-file {options.token_file}: {len(token)} bytes are no secret: give {_MIN_TOKEN} or more, as made "
            "by 'openssl rand -hex 32'"
        )
    client, server = _tls(options)
    return Identity(role, options.id, secrets.token_hex(4), token, version("gpufaas"), client, server)


def _tls(options: ClusterOptions) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """Return the contexts for connections that are made and taken; both ends show a certificate of the cluster's CA."""
    given = (options.tls_ca, options.tls_cert, options.tls_key)
    if not any(given):
        return None, None
    if not all(given):
        raise InvalidSpec("--tls-ca, --tls-cert and --tls-key go together: give all three, or none")
    contexts = []
    for purpose in (ssl.Purpose.SERVER_AUTH, ssl.Purpose.CLIENT_AUTH):
        try:
            context = ssl.create_default_context(purpose, cafile=options.tls_ca)
            context.load_cert_chain(str(options.tls_cert), options.tls_key)
        except (OSError, ssl.SSLError) as exc:
            raise InvalidSpec(f"--tls-ca, --tls-cert, --tls-key: {exc}") from exc
        context.verify_mode = ssl.CERT_REQUIRED
        contexts.append(context)
    return contexts[0], contexts[1]


def etcd_settings(options: ClusterOptions) -> EtcdSettings:
    password = ""
    if options.etcd_password_file is not None:
        try:
            password = options.etcd_password_file.read_text().strip()
        except OSError as exc:
            raise InvalidSpec(f"--etcd-password-file {options.etcd_password_file}: {exc.strerror}") from exc
    return EtcdSettings(
        options.etcd, options.etcd_prefix, options.etcd_ca, options.etcd_cert, options.etcd_key, options.etcd_user,
        password,
    )  # fmt: skip


async def leader_addresses(etcd: Etcd) -> AsyncIterator[str]:
    """Yield where the scheduler that leads listens, after each change; empty: nobody leads."""
    async for leader in watch_leader(etcd):
        yield "" if leader is None else leader.address


def listening(listen: str, advertise: str, port: int) -> str:
    """
    Return where to listen: at *listen* if that is said; at all addresses, if *advertise* says that others come from
    elsewhere; or else where only this machine comes.
    """
    if listen:
        return listen
    host = split_address(advertise)[0] if advertise else ""
    return f"127.0.0.1:{port}" if host in ("", "localhost", "::1") or host.startswith("127.") else f"0.0.0.0:{port}"


def advertised(listen: str, advertise: str, port: int) -> str:
    """
    Return where others reach what listens at *listen*, whose port turned out to be *port*.

    :raises InvalidSpec: it listens on all addresses, and nobody said by which others know this machine
    """
    if advertise:
        host, given = split_address(advertise)
        return f"{host}:{given or port}"
    host, _ = split_address(listen)
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            raise InvalidSpec(
                f"--listen {listen} is every address, and this machine's name ({host}) has none: say with --advertise "
                "HOST:PORT where the other services reach it"
            ) from None
    return f"{host}:{port}"


@dataclass
class Status:
    """What the status port says. `ready` returns why it is not, or an empty text."""

    ready: Callable[[], str] = lambda: ""
    metrics: Callable[[], bytes] = lambda: b""
    more: App | None = None
    """Serves all other paths."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/healthz":
            await _answer(send, 200, b"OK\n")
        elif path == "/readyz":
            why = self.ready()
            await _answer(send, 503 if why else 200, f"{why or 'ready'}\n".encode())
        elif path == "/metrics":
            await _answer(send, 200, self.metrics(), b"text/plain; version=0.0.4; charset=utf-8")
        elif self.more is not None:
            await self.more(scope, receive, send)
        else:
            await _answer(send, 404, b"here are /healthz, /readyz and /metrics\n")


async def _answer(send: Any, status: int, body: bytes, kind: bytes = b"text/plain; charset=utf-8") -> None:
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _StatusServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield  # signals are for the service


@contextlib.asynccontextmanager
async def status_served(status: Status, host: str, port: int) -> AsyncGenerator[int]:
    """Serve *status* meanwhile; give the port."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except OSError as exc:
        raise GpufaasError(
            f"cannot listen on {host}:{port} ({exc.strerror or exc}): stop what is there, or choose another "
            "--status-port"
        ) from exc
    config = uvicorn.Config(
        status.app,
        interface="asgi3",
        http="h11",  # it bounds heads: no password is asked for here
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    server = _StatusServer(config)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield int(listening.getsockname()[1])
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def opened(options: ClusterOptions) -> AsyncGenerator[Etcd]:
    """Give etcd once it answers and what it has is ours, saying meanwhile what is waited for."""
    async with Etcd(etcd_settings(options)) as etcd:
        await open_store(etcd, lambda line: log.warning("etcd.waits %s", line))
        yield etcd


def on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


async def first_of(*tasks: Awaitable[Any]) -> None:
    """Run all until one ends; what it raised is raised, and the others are cancelled."""
    running = [asyncio.ensure_future(each) for each in tasks]
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def own_directory(path: Path, option: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        keep_private(path)
    except OSError as exc:
        raise InvalidSpec(f"{option} {path}: {exc.strerror}: make it writable, or name another") from exc
    if not os.access(path, os.W_OK):
        raise InvalidSpec(f"{option} {path}: it is not writable: make it so, or name another")
