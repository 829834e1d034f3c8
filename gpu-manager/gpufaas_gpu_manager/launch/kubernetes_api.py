"""
The Kubernetes API server over HTTP: requests, watches and logs, as far as `kubernetes.Pods` needs them.

The token of a pod's service account changes while it runs, so its file is read again and again. Nothing here retries:
who asks knows whether that is safe.
"""

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import Seconds

if TYPE_CHECKING:
    import aiohttp

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REQUEST_S: Final[Seconds] = 30.0
WATCH_S: Final = 240
"""The server ends a watch after so many seconds; it would choose five to ten minutes."""
_SILENT_S: Final[Seconds] = WATCH_S + 30.0
"""A watch that says nothing for so long, not even that its time is over, is dead."""
_TOKEN_S: Final[Seconds] = 60.0
_PATCH: Final = "application/strategic-merge-patch+json"


class ApiError(Exception):
    """The server refused: its ``Status`` in words, and the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ApiLost(Exception):
    """The server was not reached, or went away: what was asked for may have been done or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where the API server is, and who we are there."""

    url: str
    namespace: str
    """Of all that we make."""
    token_file: Path | None = None
    ca_file: Path | None = None
    """Whom the server's certificate must be from; None: the usual authorities."""


def access_from(env: Mapping[str, str], account: Path = _ACCOUNT) -> Access:
    """
    Return the access that *env* tells: that of the pod that we run in, each part of which ``GPUFAAS_KUBERNETES_URL``,
    ``_NAMESPACE``, ``_TOKEN_FILE`` and ``_CA_FILE`` replace.

    :raises InvalidSpec: neither tells where the server is
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


class ApiServer:
    """See module. Used on one event loop; `close` ends what is under way."""

    def __init__(self, access: Access) -> None:
        """:raises InvalidSpec: the certificate file cannot be read, or aiohttp is not installed"""
        try:
            import aiohttp
        except ModuleNotFoundError:
            raise InvalidSpec("aiohttp is not installed: pip install 'gpufaas[kubernetes]'") from None
        self._access = access
        try:
            context = ssl.create_default_context(cafile=str(access.ca_file)) if access.ca_file else True
        except (OSError, ssl.SSLError) as exc:
            raise InvalidSpec(f"the CA file of Kubernetes, {access.ca_file}, cannot be used: {exc}") from exc
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=0))
        self._token, self._token_read = "", -_TOKEN_S

    async def close(self) -> None:
        await self._session.close()

    def path(self, kind: str, name: str = "", sub: str = "") -> str:
        """Return the path of a *kind* (``pods``, ``secrets``) in our namespace."""
        return "/".join(filter(None, ("/api/v1/namespaces", self._access.namespace, kind, name, sub)))

    async def ask(
        self, method: str, path: str, body: Any = None, *, params: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """:raises ApiError, ApiLost: see there"""
        with _translated():
            async with asyncio.timeout(_REQUEST_S):
                return await self._ask(method, path, body, params or {})

    async def _ask(self, method: str, path: str, body: Any, params: Mapping[str, str]) -> dict[str, Any]:
        for attempt in (1, 2):
            async with self._send(method, path, body, params, None) as answer:
                if answer.status == 401 and attempt == 1:
                    self._token_read = -_TOKEN_S  # it may have been replaced a moment ago
                    continue
                await _check(answer)
                return json.loads(await answer.read())  # type: ignore[no-any-return]
        raise AssertionError("unreachable")

    async def watch(self, path: str, params: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        """Yield events as they come, until the server ends it; it does so every few minutes."""
        asked = {**params, "watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        async for line in self.lines(path, asked, _SILENT_S):
            yield json.loads(line)

    async def lines(
        self, path: str, params: Mapping[str, str], silent_s: Seconds | None = None
    ) -> AsyncIterator[bytes]:
        """Yield lines of any length without their ends; the last one may have had none."""
        left = b""
        async for piece in self.pieces(path, params, silent_s):
            *lines, left = (left + piece).split(b"\n")
            for line in lines:
                yield line
        if left:
            yield left

    async def pieces(
        self, path: str, params: Mapping[str, str], silent_s: Seconds | None = None
    ) -> AsyncIterator[bytes]:
        """Yield what is at *path* as it comes. The server waits for whoever reads slowly."""
        with _translated():
            async with self._send("GET", path, None, params, silent_s or 0.0) as answer:
                await _check(answer)
                async for piece in answer.content.iter_any():
                    yield piece

    def _send(
        self, method: str, path: str, body: Any, params: Mapping[str, str], silent_s: Seconds | None
    ) -> "aiohttp.client._BaseRequestContextManager[aiohttp.ClientResponse]":
        """:param silent_s: of a stream, after how long without a byte it is given up; 0: never; None: no stream"""
        import aiohttp

        headers = {"Accept": "application/json" if silent_s is None else "*/*", "User-Agent": "gpufaas"}
        if token := self._current_token():
            headers["Authorization"] = f"Bearer {token}"
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = _PATCH if method == "PATCH" else "application/json"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=silent_s or None)
        return self._session.request(
            method, self._access.url + path, params=params, data=data, headers=headers, timeout=timeout
        )

    def _current_token(self) -> str:
        file = self._access.token_file
        if file is not None and time.monotonic() - self._token_read >= _TOKEN_S:
            self._token, self._token_read = file.read_text().strip(), time.monotonic()
        return self._token


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    import aiohttp

    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        raise ApiLost(str(exc) or type(exc).__name__) from exc


async def _check(answer: "aiohttp.ClientResponse") -> None:
    if answer.status < 400:
        return
    text = (await answer.text(errors="replace"))[:2000]
    try:
        message = str(json.loads(text)["message"])
    except (ValueError, LookupError, TypeError):
        message = text.strip()
    raise ApiError(answer.status, message or f"status {answer.status}")
