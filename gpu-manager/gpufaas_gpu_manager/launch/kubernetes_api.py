"""
The Kubernetes API server: lightkube, and the three operations that it lacks (docs/adr/0036).

Nothing here retries: the caller knows whether that is safe.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import httpx2
import msgspec
from lightkube import AsyncClient
from lightkube.config import client_adapter
from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import Cluster, Context, User
from lightkube.core.exceptions import ConfigError
from lightkube.models.core_v1 import PodStatus
from lightkube.models.meta_v1 import Status
from lightkube.resources.core_v1 import Pod, PodResize, Secret

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import Seconds

log = logging.getLogger(__name__)

T = TypeVar("T")
_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_NAME: Final = "gpufaas"
_REQUEST_S: Final[Seconds] = 30.0
_CONNECT_S: Final[Seconds] = 10.0
WATCH_S: Final = 240
"""The server ends a watch after so many seconds; it would choose five to ten minutes."""
_SILENT_S: Final[Seconds] = WATCH_S + 30.0
"""A watch that sends nothing for so long, not even its end, is dead."""


class ApiError(Exception):
    """The server refused: its ``Status`` in words, and the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ApiLost(Exception):
    """The server was not reached, or the connection broke: the request may have been executed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The address of the API server, and our credentials."""

    url: str
    namespace: str
    """The namespace of all objects that we create."""
    token_file: Path | None = None
    ca_file: Path | None = None
    """Certificates that sign the server's; None: the usual authorities."""


def access_from(env: Mapping[str, str], account: Path = _ACCOUNT) -> Access:
    """
    Return the access of the pod that we run in, each part of which ``GPUFAAS_KUBERNETES_URL``, ``_NAMESPACE``,
    ``_TOKEN_FILE`` and ``_CA_FILE`` replace.

    :raises InvalidSpec: *env* has no address of a server
    """
    host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
    url = env.get("GPUFAAS_KUBERNETES_URL", "")
    if not url and not host:
        raise InvalidSpec(
            "this process is in no pod of Kubernetes (KUBERNETES_SERVICE_HOST is not set): set GPUFAAS_KUBERNETES_URL, "
            "_TOKEN_FILE, _CA_FILE and _NAMESPACE, or run it there"
        )
    ours = not url

    def file(name: str, default: str) -> Path | None:
        if given := env.get(name):
            return Path(given)
        return account / default if ours and (account / default).exists() else None

    namespace = env.get("GPUFAAS_KUBERNETES_NAMESPACE", "")
    if not namespace and ours and (account / "namespace").exists():
        namespace = (account / "namespace").read_text().strip()
    return Access(
        url=url.rstrip("/") or f"https://{f'[{host}]' if ':' in host else host}:{port}",
        namespace=namespace or "default",
        token_file=file("GPUFAAS_KUBERNETES_TOKEN_FILE", "token"),
        ca_file=file("GPUFAAS_KUBERNETES_CA_FILE", "ca.crt"),
    )


class Change(NamedTuple):
    """One event of a watch."""

    kind: str
    """``ADDED``, ``MODIFIED``, ``DELETED`` or ``BOOKMARK``."""
    version: str
    """The version from which a watch resumes."""
    pod: str
    """The pod's name; empty: a bookmark."""
    status: PodStatus
    """Empty where it does not fit lightkube's model."""


class ApiServer:
    """Used on one event loop. All methods raise `ApiError` and `ApiLost`."""

    def __init__(self, access: Access) -> None:
        """:raises InvalidSpec: the certificate file cannot be used"""
        user = User(token_file=_absolute(access.token_file))
        config = SingleConfig(
            context_name=_NAME,
            context=Context(cluster=_NAME, user=_NAME, namespace=access.namespace),
            cluster=Cluster(server=access.url, certificate_auth=_absolute(access.ca_file)),
            user=user,
        )
        timeout = httpx2.Timeout(_REQUEST_S, connect=_CONNECT_S)
        try:
            trust = client_adapter.verify_cluster(config.cluster, user, config.abs_file, trust_env=False)
        except (OSError, ssl.SSLError) as exc:
            raise InvalidSpec(f"the CA file of Kubernetes, {access.ca_file}, cannot be used: {exc}") from exc
        self._core = f"/api/v1/namespaces/{access.namespace}"
        self._objects = AsyncClient(config, timeout=timeout, trust_env=False)
        # Not limited to 100 connections: each pod's log is one.
        transport = httpx2.AsyncHTTPTransport(verify=trust, limits=httpx2.Limits(max_keepalive_connections=1))
        self._streams = client_adapter.AsyncClient(
            config,
            client_adapter.ConnectionParams(timeout=timeout, trust_env=False, transport=transport),  # type: ignore[arg-type]
        )

    async def close(self) -> None:
        await self._objects.close()
        await self._streams.aclose()

    async def create(self, made: Pod | Secret) -> None:
        await _ask(self._objects.create(made))

    async def delete(self, kind: type[Pod] | type[Secret], name: str, grace_s: int | None = None) -> None:
        await _ask(self._objects.delete(kind, name, grace_period=grace_s))

    async def resize(self, pod: str, change: dict[str, object]) -> None:
        await _ask(self._objects.patch(PodResize, pod, change))

    async def list(self, labels: Mapping[str, str]) -> tuple[dict[str, PodStatus], str]:
        """Return the pods that have *labels* by their names, and the version to watch them from."""
        found = self._objects.list(Pod, labels=dict(labels))
        return await _ask(_by_name(found)), found.resourceVersion

    # --- lightkube's selects nothing when it deletes, does not end a silent watch, and follows logs by whole lines ---

    async def delete_all(self, kind: str, labels: Mapping[str, str], grace_s: int | None = None) -> None:
        """Delete what has *labels* of *kind* (``pods``, ``secrets``)."""
        params = {"labelSelector": _selector(labels)}
        if grace_s is not None:
            params["gracePeriodSeconds"] = str(grace_s)
        response = await _ask(self._streams.delete(f"{self._core}/{kind}", params=params))
        if response.is_error:
            raise _refusal(response)

    async def watch(self, labels: Mapping[str, str], version: str) -> AsyncIterator[Change]:
        """Yield what happens to the pods that have *labels*, until the server ends the watch after some minutes."""
        params = {
            "labelSelector": _selector(labels), "resourceVersion": version, "watch": "1",
            "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S),
        }  # fmt: skip
        async with self._stream("pods", params, _SILENT_S) as response:
            left = b""
            async for piece in response.aiter_bytes():  # not aiter_lines: a message may contain other ends of lines
                *lines, left = (left + piece).split(b"\n")
                for line in lines:
                    yield _change(line)

    async def log(self, pod: str, container: str, since: str) -> AsyncIterator[bytes]:
        """Yield a container's output as it comes, with timestamps, from *since* (RFC 3339; empty: the beginning) on."""
        params = {"follow": "true", "container": container, "timestamps": "true"}
        if since:
            params["sinceTime"] = since
        async with self._stream(f"pods/{pod}/log", params, None) as response:
            async for piece in response.aiter_bytes():
                yield piece

    @contextlib.asynccontextmanager
    async def _stream(
        self, path: str, params: Mapping[str, str], silent_s: Seconds | None
    ) -> AsyncIterator[httpx2.Response]:
        """:param silent_s: after how long without a byte it is given up; None: never"""
        timeout = httpx2.Timeout(_REQUEST_S, connect=_CONNECT_S, read=silent_s)
        with _translated():
            async with self._streams.stream("GET", f"{self._core}/{path}", params=params, timeout=timeout) as response:
                if response.is_error:
                    await response.aread()
                    raise _refusal(response)
                yield response


class _Meta(msgspec.Struct):
    name: str = ""
    resourceVersion: str = ""


class _Object(msgspec.Struct):
    """What bookmarks have, too: their pods lack what lightkube's model asks for."""

    metadata: _Meta
    status: msgspec.Raw = msgspec.Raw(b"{}")


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


def _change(line: bytes) -> Change:
    event = msgspec.json.decode(line, type=_Event)
    if event.type == "ERROR":
        refused = msgspec.json.decode(event.object, type=Status)
        raise ApiError(refused.code or 500, refused.message or "")
    seen = msgspec.json.decode(event.object, type=_Object)
    try:
        status = msgspec.json.decode(seen.status, type=PodStatus)
    except msgspec.ValidationError as exc:
        log.warning("kubernetes.not_understood pod=%s: %s", seen.metadata.name, exc)
        status = PodStatus()
    return Change(event.type, seen.metadata.resourceVersion, seen.metadata.name, status)


async def _by_name(found: AsyncIterable[Pod]) -> dict[str, PodStatus]:
    return {each.metadata.name or "": each.status or PodStatus() async for each in found if each.metadata}


async def _ask(work: Awaitable[T]) -> T:
    with _translated():
        async with asyncio.timeout(_REQUEST_S):
            return await work


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except httpx2.HTTPStatusError as exc:  # lightkube's own ApiError is one, too
        raise _refusal(exc.response) from exc
    except (httpx2.HTTPError, ConfigError, TimeoutError, OSError) as exc:
        raise ApiLost(str(exc) or type(exc).__name__) from exc


def _refusal(response: httpx2.Response) -> ApiError:
    try:
        message = msgspec.json.decode(response.content, type=Status).message
    except (msgspec.DecodeError, UnicodeDecodeError):  # from something between us and the server
        message = response.text[:2000].strip()
    return ApiError(response.status_code, message or f"status {response.status_code}")


def _selector(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())


def _absolute(file: Path | None) -> str | None:
    return str(file.absolute()) if file is not None else None
