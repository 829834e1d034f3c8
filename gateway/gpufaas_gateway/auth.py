"""
Basic auth as in OpenFaaS. Every request needs the password unless `PUBLIC` lists its route.

`Guard` stands in front of the router, so it also guards routes that do not exist. `CleanPaths` stands in front of the
guard, so that the guard sees one spelling of each path. WebSockets never come here (`fronts.table`).
"""

import base64
import binascii
import hashlib
import hmac
import logging
import os
import posixpath
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gpufaas_core.errors import InvalidSpec, StorageFailed
from gpufaas_core.peers import may_be_worker
from gpufaas_gateway.errors import headers_of

log = logging.getLogger(__name__)

PUBLIC: Final[tuple[tuple[str, str], ...]] = (
    ("*", "/function/*"),  # a password that comes along is the function's (§1 item 7)
    ("HEAD POST PUT PATCH OPTIONS", "/async-function/*"),  # GET and DELETE are about one call, and need the password
    ("GET HEAD", "/healthz"),
    ("GET HEAD", "/readyz"),
    ("GET HEAD", "/metrics"),
    ("GET HEAD", "/"),  # sends browsers to /ui/, which is guarded
)
"""Methods and path. A path that ends in ``*`` is a prefix."""

USER_FILE: Final = "basic-auth-user"
PASSWORD_FILE: Final = "basic-auth-password"
_DEFAULT_USER: Final = "admin"
_PASSWORD_BYTES: Final = 32
_BODY: Final = "invalid credentials"
_NOT_FOR_FUNCTIONS: Final = "functions cannot use this route: it is for people, and for programs that are no function\n"


@dataclass(frozen=True, slots=True)
class Credentials:
    """User and password. There is one pair."""

    user: str
    password: str = field(repr=False)

    def match(self, authorization: bytes) -> bool:
        """
        Return whether the value of an Authorization header has this user and password.

        Compares digests of user and password together, so that the time does not tell how much of a guess was right.
        """
        scheme, _, encoded = authorization.partition(b" ")
        if scheme.lower() != b"basic":
            return False
        try:
            given = base64.b64decode(encoded.strip(), validate=True)
        except binascii.Error:
            return False
        return hmac.compare_digest(_digest(given), _digest(f"{self.user}:{self.password}".encode()))


def read_credentials(directory: Path) -> Credentials:
    """
    Read the two files in *directory*; white space around their text is ignored.

    :raises InvalidSpec: a file is missing, empty or not text; says which
    """
    user, password = (_read(directory / name) for name in (USER_FILE, PASSWORD_FILE))
    if ":" in user:
        raise InvalidSpec(f"{directory / USER_FILE}: the name of a user cannot have a ':', where basic auth ends it")
    return Credentials(user, password)


def make_credentials(directory: Path) -> bool:
    """
    Write a user and a random password into *directory*, unless one of the files exists; return whether it wrote them.

    :raises StorageFailed: they cannot be written
    """
    paths = (directory / PASSWORD_FILE, directory / USER_FILE)
    if any(path.exists() for path in paths):
        return False
    try:
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        for path, text in zip(paths, (secrets.token_urlsafe(_PASSWORD_BYTES), _DEFAULT_USER), strict=True):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
    except OSError as exc:
        raise StorageFailed(
            f"no password could be written to {directory} ({exc.strerror}): make it writable, or name a directory "
            f"that has {USER_FILE} and {PASSWORD_FILE} with --auth-dir"
        ) from exc
    return True


def is_public(method: str, path: str) -> bool:
    """Return whether `PUBLIC` lists the route."""
    for methods, pattern in PUBLIC:
        if methods != "*" and method not in methods.split():
            continue
        if path == pattern or (pattern.endswith("*") and path.startswith(pattern[:-1])):
            return True
    return False


@dataclass(frozen=True, eq=False)
class Guard:
    """Passes to *app* the requests that are public or have the password. Answers 401 to all others."""

    app: ASGIApp
    credentials: Credentials

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if not self._may(scope):
            app = Response(_BODY, 401, {**headers_of(), "WWW-Authenticate": 'Basic realm="Restricted"'})
        await app(scope, receive, send)

    def _may(self, scope: Scope) -> bool:
        if is_public(scope["method"], scope["path"]):
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) == 1 and self.credentials.match(given[0]):
            scope["user"] = self.credentials.user
            return True
        if given and not given[0].lower().startswith(b"bearer"):  # a logged-out client sends an empty one
            peer = scope.get("client") or ("unknown", 0)
            log.warning("auth.refused peer=%s path=%.200r", peer[0], scope["path"])
        return False


@dataclass(eq=False)
class WithoutWorkers:
    """Answers 403 to workers that have a uid for metrics and what is not public, even if they have the password."""

    app: ASGIApp
    _silent_until_s: float = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        closed = scope["path"] == "/metrics" or not is_public(scope["method"], scope["path"])
        app = self.app
        if closed and may_be_worker(scope.get("client"), scope.get("server")):
            app = Response(_NOT_FOR_FUNCTIONS, 403, headers_of())
            if (now_s := time.monotonic()) >= self._silent_until_s:  # it can ask again at once
                self._silent_until_s = now_s + 1
                log.warning("worker.refused peer=%s path=%.200r", scope.get("client"), scope["path"])
        await app(scope, receive, send)


@dataclass(frozen=True, eq=False)
class CleanPaths:
    """
    Redirects (301) a path with ``//``, ``.`` or ``..`` to its clean spelling, and refuses (400) NUL bytes and encoded
    slashes: no name has them, and routers read them in different ways.

    Paths below ``/function/`` and ``/async-function/`` belong to the function and are passed on unchanged.
    """

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, app = scope["path"], self.app
        if not path.startswith(("/function/", "/async-function/")):
            raw: bytes = scope["raw_path"].lower()
            if b"%2f" in raw or b"%5c" in raw or "\0" in path:
                log.warning("path.refused path=%.200r", path)
                app = Response("the path has an encoded slash or a NUL byte: names have none\n", 400, headers_of())
            elif (cleaned := _clean(path)) != path:
                query = scope["query_string"].decode("latin-1")
                location = quote(cleaned, safe="/-._~!$&'()*+,;=:@") + (f"?{query}" if query else "")
                app = Response(status_code=301, headers={"Location": location})
        await app(scope, receive, send)


def _clean(path: str) -> str:
    cleaned = posixpath.normpath("/" + path.lstrip("/"))
    return cleaned + "/" if path.endswith(("/", "/.", "/..")) and cleaned != "/" else cleaned


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise InvalidSpec(f"{path} cannot be read ({reason}): it must hold one line, for basic auth") from exc
    if not text:
        raise InvalidSpec(f"{path} is empty: it must hold one line, for basic auth")
    return text
