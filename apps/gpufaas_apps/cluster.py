"""What the services of a cluster share: their identity, etcd, and the addresses at which they find each other."""

import contextlib
import logging
import secrets
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from importlib.metadata import version
from typing import Final

from gpufaas_adapters.etcd.client import Etcd, EtcdSettings, open_store
from gpufaas_adapters.etcd.election import watch_leader
from gpufaas_apps.options import ClusterOptions
from gpufaas_cluster import control
from gpufaas_cluster.connection import Identity, split_address
from gpufaas_core.errors import InvalidSpec

log = logging.getLogger("service")

_MIN_TOKEN: Final = 16


def identity(options: ClusterOptions, role: control.Role) -> Identity:
    """Return the identity of this process. :raises InvalidSpec: the token file or a certificate is missing or bad"""
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
    """Return the contexts for outgoing and incoming connections: both ends show a certificate of the cluster's CA."""
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


@contextlib.asynccontextmanager
async def opened(options: ClusterOptions) -> AsyncGenerator[Etcd]:
    """Yield etcd when it answers and its keys are ours; meanwhile, log what is waited for."""
    async with Etcd(etcd_settings(options)) as etcd:
        await open_store(etcd, lambda line: log.warning("etcd.waits %s", line))
        yield etcd


async def leader_addresses(etcd: Etcd) -> AsyncIterator[str]:
    """Yield the address of the scheduler that leads, after each change; empty: none leads."""
    async for leader in watch_leader(etcd):
        yield "" if leader is None else leader.address


def listening(listen: str, advertise: str, port: int) -> str:
    """
    Return where to listen: *listen* if it is given; all addresses if *advertise* names one that is not this machine's
    own; else the loopback address.
    """
    if listen:
        return listen
    host = split_address(advertise)[0] if advertise else ""
    return f"127.0.0.1:{port}" if host in ("", "localhost", "::1") or host.startswith("127.") else f"0.0.0.0:{port}"


def advertised(listen: str, advertise: str, port: int) -> str:
    """
    Return the address at which others reach this service, which listens at *listen*; *port*: the port that it got.

    :raises InvalidSpec: it listens on all addresses, and this machine's name has no address
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
                f"--listen {listen} is every address, and this machine's name ({host}) has none: give with --advertise "
                "HOST:PORT the address at which the other services reach it"
            ) from None
    return f"{host}:{port}"
