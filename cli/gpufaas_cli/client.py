"""The gateway's API as the commands use it, and what can go wrong on the way as errors with an exit code each."""

import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from gpufaas_cli import output
from gpufaas_cli.stack import DEFAULT_GATEWAY
from gpufaas_core.errors import GpufaasError
from gpufaas_core.units import Seconds

if TYPE_CHECKING:
    from gpufaas_core.environment import Environment

_T = TypeVar("_T")

DEFAULT_NAMESPACE: Final = "openfaas-fn"
_SHOWN_CHARS: Final = 1000  # of an error that the gateway tells
_CHUNK: Final = 1 << 20
_CONNECT_S: Final = 5.0
_ANSWER_S: Final = 60.0
_STARTING_S: Final = 30.0  # a gateway that starts with a few thousand functions has read them by then
_DEPLOY_S: Final = 600.0  # a deploy checks the import of the handler, and digests weights of many GB
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_MAY_LACK: Final = ("/system/function/", "/system/namespace/", "/async/", "/system/explain/", "/system/nodes/")
"""Routes below which a 404 is about what was asked for, and not a sign that something else answers there."""


class GatewayUnreachable(GpufaasError):
    """Nobody answers there, or not as a gateway would."""


class NotAuthorised(GpufaasError):
    """The gateway wants to know who we are, or does not let us."""


class BrokeOff(GpufaasError):
    """The gateway had begun to send a function's answer, and the answer has no end."""


class Refused(GpufaasError):
    """The gateway answered, and said no."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text or f"the gateway answered {status} without saying why")
        self.status = status


class Client:
    """
    Blocking, one connection pool. A gateway that is starting (503) is asked again for a while; nothing else is
    asked twice. Every call raises `GatewayUnreachable`, `NotAuthorised` or `Refused`.

    A user and password in the URL are sent as basic auth, and go before the *authorization*.
    """

    def __init__(
        self,
        gateway: str,
        authorization: str | None = None,
        verify: bool = True,
        timeout_s: Seconds = _ANSWER_S,
        deploy_s: Seconds | None = None,
    ) -> None:
        """
        :param authorization: value of that header for the management routes; functions do not get it
        :param verify: whether the certificate of an https:// gateway must be good
        :param deploy_s: how long a deployment may take, if not the usual time
        """
        self.gateway = gateway
        parts = urlsplit(gateway)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise GatewayUnreachable(f"{gateway} is not the URL of a gateway: write for example {DEFAULT_GATEWAY}")
        self.shown = gateway.replace(f"{parts.netloc.rpartition('@')[0]}@", "") if "@" in parts.netloc else gateway
        """The gateway without its password, for people."""
        self.authorization = authorization if "@" not in parts.netloc else None
        self._deploy_s = deploy_s or _DEPLOY_S
        shows = os.environ.get("FAAS_DEBUG") == "1" or os.environ.get("OPENFAAS_DUMP_HTTP") == "true"
        self._http = httpx.Client(
            event_hooks={"request": [_show_request], "response": [_show_response]} if shows else None,
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S)),
            # Reading the certificates takes 20 ms and more, and http:// has no use for them.
            verify=ssl.create_default_context() if parts.scheme == "https" and verify else False,
            # A proxy that serves the world does not reach our own loopback.
            trust_env=parts.hostname not in LOOPBACK,
            headers={"User-Agent": "gpufaas-cli"},
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    # --- management ---

    def info(self) -> dict[str, Any]:
        return self._object("/system/info")

    def functions(self, namespace: str | None = None) -> list[dict[str, Any]]:
        return self._objects("/system/functions", _in(namespace))

    def function(self, name: str, namespace: str | None = None, *, usage: bool = True) -> dict[str, Any]:
        asked = {"usage": "1"} if usage else {}
        return self._object(f"/system/function/{quote(name, safe='')}", {**_in(namespace), **asked})

    def deploy(self, body: Mapping[str, object], update: bool = True, replace: bool = False) -> tuple[int, str]:
        """
        Update the function, or create it when it is not there; return the status and its reason.

        :param update: False: only create it, which is refused when it is there
        :param replace: remove it first, then create it
        """
        if replace:
            self.remove(str(body["service"]), str(body.get("namespace") or "") or None)
        for method in ("PUT", "POST") if update and not replace else ("POST",):
            answer = self._send(method, "/system/functions", json=body, timeout=self._deploy_s)
            if method == "PUT" and answer.status_code == 404:
                continue
            self._check(answer)
            break
        return answer.status_code, answer.reason_phrase

    def remove(self, name: str, namespace: str | None = None) -> bool:
        """Return False when it was not there."""
        body = {"functionName": name, **_in(namespace)}
        answer = self._send("DELETE", "/system/functions", json=body)
        if answer.status_code == 404:
            return False
        self._check(answer)
        return True

    def status(self) -> dict[str, Any]:
        return self._object("/system/status")

    def explain(self, call: str) -> dict[str, Any]:
        return self._object(f"/system/explain/{quote(call, safe='')}")

    def nodes(self) -> list[dict[str, Any]]:
        return self._objects("/system/nodes")

    def node(self, name: str) -> dict[str, Any]:
        return self._object(f"/system/nodes/{quote(name, safe='')}")

    def environments(self, deployment: Mapping[str, object] | None = None) -> "list[Environment] | None":
        """
        Return what the nodes provide on which *deployment* may run, or all nodes; None: the gateway has no such route.

        :raises Refused: there is no device for what it asks
        """
        from gpufaas_core.environment import Environment

        path = "/system/environments"
        answer = self._send("GET", path) if deployment is None else self._send("POST", path, json=deployment)
        if answer.status_code in (404, 405):
            return None
        self._check(answer)
        try:
            return msgspec.json.decode(answer.content, type=list[Environment])
        except msgspec.DecodeError as exc:
            raise self._no_gateway(path) from exc

    def drain_node(self, name: str, drain: bool) -> None:
        self._check(self._send("POST" if drain else "DELETE", f"/system/nodes/{quote(name, safe='')}/drain"))

    def is_ready(self) -> bool:
        """Whether the gateway and what is behind it say that they are well; False as well when nobody is there."""
        try:
            return self._send("GET", "/healthz", waits=False).is_success
        except GatewayUnreachable:
            return False

    # --- secrets and namespaces ---

    def secrets(self, namespace: str | None = None) -> list[dict[str, Any]]:
        return self._objects("/system/secrets", _in(namespace))

    def put_secret(self, body: Mapping[str, object], update: bool) -> tuple[int, str]:
        answer = self._send("PUT" if update else "POST", "/system/secrets", json=body)
        self._check(answer)
        return answer.status_code, answer.reason_phrase

    def remove_secret(self, name: str, namespace: str | None = None) -> None:
        self._check(self._send("DELETE", "/system/secrets", json={"name": name, **_in(namespace)}))

    def namespaces(self) -> list[str]:
        found = self._json("/system/namespaces")
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self._no_gateway("/system/namespaces")
        return found

    def namespace(self, name: str) -> dict[str, Any]:
        return self._object(f"/system/namespace/{quote(name, safe='')}")

    def put_namespace(self, body: Mapping[str, object], update: bool) -> None:
        path = f"/system/namespace/{quote(str(body['name']), safe='')}" if update else "/system/namespace/"
        self._check(self._send("PUT" if update else "POST", path, json=body))

    def remove_namespace(self, name: str) -> None:
        path = f"/system/namespace/{quote(name, safe='')}"
        self._check(self._send("DELETE", path, json={"name": name, "labels": {"openfaas": "1"}}))

    def quota(self, namespace: str) -> dict[str, Any]:
        return self._object(_quota_path(namespace))

    def put_quota(self, namespace: str, limits: Mapping[str, object]) -> None:
        self._check(self._send("PUT", _quota_path(namespace), json=limits))

    def remove_quota(self, namespace: str) -> None:
        self._check(self._send("DELETE", _quota_path(namespace)))

    # --- asynchronous calls ---

    def call(self, call_id: str) -> dict[str, Any]:
        return self._object(f"/async/{quote(call_id, safe='')}")

    def dead_calls(self) -> list[dict[str, Any]]:
        return self._objects("/system/async/dead")

    def retry_call(self, call_id: str) -> None:
        self._check(self._send("POST", f"/system/async/dead/{quote(call_id, safe='')}/retry"))

    def cancel_call(self, call_id: str) -> None:
        self._check(self._send("DELETE", f"/async-function/{quote(call_id, safe='')}"))

    # --- artifacts ---

    def has_artifact(self, sha256: str) -> bool:
        answer = self._send("HEAD", f"/system/artifacts/{sha256}")
        if answer.status_code == 404:
            return False
        self._check(answer)
        return True

    def put_artifact(self, sha256: str, path: Path, progress: Callable[[int], object]) -> None:
        """Upload the file *path*, whose digest is *sha256*; *progress* is told the bytes of each step."""
        try:
            size = path.stat().st_size
        except OSError as exc:
            raise GpufaasError(f"{path}: {exc.strerror}: build the function again") from exc
        headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        answer = self._send(
            "PUT",
            f"/system/artifacts/{sha256}",
            content=_chunks(path, progress),
            headers=headers,
            timeout=_DEPLOY_S,  # of each step, not of the whole
        )
        if answer.status_code in (404, 405):
            raise Refused(
                answer.status_code,
                f"the gateway at {self.shown} takes no bundles: is it gpufaas, and of this version or later?",
            )
        self._check(answer)

    # --- streams ---

    @contextmanager
    def logs(self, params: Mapping[str, str], follow: bool) -> Iterator[Iterator[str]]:
        """Give the lines of JSON as they come."""
        # Without an end when followed: a function may be silent for days, and Ctrl-C ends it.
        timeout = httpx.Timeout(None if follow else _ANSWER_S, connect=_CONNECT_S)
        headers = self._identity()
        with self._stream("GET", "/system/logs", params=dict(params), headers=headers, timeout=timeout) as answer:
            if answer.status_code != 200:
                answer.read()
            self._check(answer)
            yield self._translated(answer.iter_lines())

    @contextmanager
    def invoke(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]],
        headers: list[tuple[str, str]],
        content: bytes | Iterator[bytes] | None,
    ) -> "Iterator[Answer]":
        # No deadline of ours: the function's own timeout holds at the gateway, and Ctrl-C gives the place up.
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        with self._stream(
            method, path, params=query or None, headers=headers, content=content, timeout=timeout
        ) as answer:
            yield Answer(answer.status_code, answer.reason_phrase, answer.headers, _to_its_end(answer))

    # --- how ---

    def _identity(self) -> dict[str, str]:
        return {"Authorization": self.authorization} if self.authorization else {}

    def _json(self, path: str, params: Mapping[str, str] | None = None) -> object:
        answer = self._send("GET", path, params=params)
        ours = "x-openfaas-internal" in answer.headers  # our gateway's own 404 says what is missing
        if answer.status_code == 404 and not ours and not path.startswith(_MAY_LACK):
            raise self._no_gateway(path)
        self._check(answer)
        try:
            return answer.json()
        except ValueError as exc:
            raise self._no_gateway(path) from exc

    def _object(self, path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        found = self._json(path, params)
        if not isinstance(found, dict):
            raise self._no_gateway(path)
        return found

    def _objects(self, path: str, params: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        found = self._json(path, params)
        if found is None:
            return []
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise self._no_gateway(path)
        return found

    def _send(
        self, method: str, path: str, timeout: Seconds | None = None, waits: bool = True, **more: Any
    ) -> httpx.Response:
        """:param waits: for a gateway that is starting"""
        if timeout is not None:
            more["timeout"] = httpx.Timeout(timeout, connect=_CONNECT_S)
        more["headers"] = {**self._identity(), **(more.get("headers") or {})}
        deadline = time.monotonic() + _STARTING_S
        while True:
            with self._errors():
                answer = self._http.request(method, self.gateway + path, **more)
            retry_s = _retry_after(answer)
            # It took nothing of the request, and says when to come back; a body that was streamed cannot be sent again.
            if not waits or retry_s is None or "content" in more or time.monotonic() + retry_s > deadline:
                return answer
            time.sleep(retry_s)

    @contextmanager
    def _stream(self, method: str, path: str, **more: Any) -> Iterator[httpx.Response]:
        with self._errors():
            answer = self._http.send(self._http.build_request(method, self.gateway + path, **more), stream=True)
        try:
            yield answer
        finally:
            answer.close()

    def _translated(self, parts: Iterator[_T]) -> Iterator[_T]:
        with self._errors():
            yield from parts

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
            raise GatewayUnreachable(
                f"no gateway answers at {self.shown}: start one with 'gpufaas serve', or name yours with -g URL"
            ) from exc
        except httpx.TimeoutException as exc:
            raise GatewayUnreachable(f"the gateway at {self.shown} did not answer in time: try again") from exc
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise GatewayUnreachable(
                f"the connection to the gateway at {self.shown} broke off: {exc or type(exc).__name__}"
            ) from exc

    def _check(self, answer: httpx.Response) -> None:
        if answer.is_success:
            return
        over_quota = answer.headers.get("x-gpufaas-error") == "quota-exceeded"
        if answer.status_code in (401, 403) and not over_quota:
            raise NotAuthorised(
                f"the gateway at {self.shown} does not let us in ({answer.status_code}): "
                f"log in with 'gpufaas login -g {self.shown} --password-stdin'"
            )
        if answer.is_redirect:
            raise GatewayUnreachable(
                f"{self.shown} sends us on to {answer.headers.get('location', 'nowhere')}: name that with -g URL"
            )
        raise Refused(answer.status_code, " ".join(answer.text.split())[:_SHOWN_CHARS])

    def _no_gateway(self, path: str) -> GatewayUnreachable:
        return GatewayUnreachable(f"what answers at {self.shown}{path} is no gpufaas gateway: name yours with -g URL")


class Answer:
    """A function's answer, still coming."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str], parts: Iterator[bytes]) -> None:
        self.status = status
        self.reason = reason
        self.headers = headers
        self.parts = parts


def _to_its_end(answer: httpx.Response) -> Iterator[bytes]:
    try:
        yield from answer.iter_raw()
    except httpx.HTTPError as exc:
        raise BrokeOff(str(exc) or type(exc).__name__) from exc


def function_path(name: str, namespace: str | None = None, asynchronous: bool = False) -> str:
    """
    Return the route of *name*, which may have a path of its own: ``NAME``, ``NAME.NS``, ``NAME/path``.
    """
    name, slash, rest = name.partition("/")
    if namespace and not name.endswith(f".{namespace}"):
        name = f"{name}.{namespace}"
    prefix = "async-function" if asynchronous else "function"
    return f"/{prefix}/{quote(name, safe='')}{slash}{quote(rest, safe='/%:@!$&+,;=~*()')}"


def _retry_after(answer: httpx.Response) -> Seconds | None:
    """Return the seconds after which the gateway wants to be asked again, at most 5; None when it does not."""
    after = answer.headers.get("Retry-After", "")
    return min(float(after), 5.0) if answer.status_code == 503 and after.isdecimal() else None


def _quota_path(namespace: str) -> str:
    return f"/system/namespace/{quote(namespace, safe='')}/quota"


def _in(namespace: str | None) -> dict[str, str]:
    return {"namespace": namespace} if namespace else {}


def _chunks(path: Path, progress: Callable[[int], object]) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk
            progress(len(chunk))


def _show_request(request: httpx.Request) -> None:
    """On stderr, without who we are, and without bodies: they may be secrets."""
    output.note(f"> {request.method} {request.url.copy_with(userinfo=b'')!s}")
    for name, value in request.headers.items():
        output.note(f"> {name}: {'<redacted>' if name == 'authorization' else value}")


def _show_response(answer: httpx.Response) -> None:
    output.note(f"< {answer.status_code} {answer.reason_phrase}")
    for name, value in answer.headers.items():
        output.note(f"< {name}: {value}")
