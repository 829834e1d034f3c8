"""
The protocol with a gateway, without IO: requests, when they are repeated, and the meaning of answers.

An operation is a generator. It yields each `ApiRequest` to send, receives its answer (or the error, thrown), and
returns the result; `Client` and `AsyncClient` send. Operations of several requests, such as a deployment or waiting
for a call, are therefore written once, and tested without a socket. httpx's auth flows are written in this way.
"""

import json
import math
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, TypeVar

import httpx

from gpufaas.errors import BrokeOff, GatewayUnreachable, NotAuthorised, QuotaExceeded, Refused
from gpufaas_core._types import Seconds

_T = TypeVar("_T")

ENDLESS: Final[Seconds] = math.inf
STARTING_S: Final[Seconds] = 30.0  # a gateway that starts with a few thousand functions has read them by then
_LONGEST_PAUSE_S: Final[Seconds] = 5.0
_SHOWN_CHARS: Final = 1000  # of an error message of the gateway
_INTERNAL: Final = "X-OpenFaaS-Internal"

Content: TypeAlias = bytes | Iterator[bytes] | AsyncIterator[bytes]


@dataclass(frozen=True, slots=True)
class ApiRequest:
    method: str
    path: str
    params: Mapping[str, str] | Sequence[tuple[str, str]] | None = None
    headers: Sequence[tuple[str, str]] = ()
    json: object = None
    content: Content | None = None
    timeout_s: Seconds | None = None
    """For each step of it; None: the client's own limit."""
    of_function: bool = False
    """A function answers it: the login is not sent."""
    streams: bool = False
    """The caller reads the body of the answer; the body of a refusal is read here."""
    after_s: Seconds = 0.0
    """How long to wait before sending it."""


Steps: TypeAlias = Generator[ApiRequest, httpx.Response, _T]


@dataclass(frozen=True, slots=True)
class Hints:
    """What messages of errors advise."""

    name: str = "give the URL of yours, or set OPENFAAS_URL"
    login: str = "give auth=(user, password) or token=TOKEN"


@dataclass(frozen=True, slots=True)
class Gateway:
    shown: str
    """The URL without a password."""
    deploy_s: Seconds
    hints: Hints

    def ask(
        self, request: ApiRequest, missing: type[Refused] | None = None, waits: bool = True
    ) -> Steps[httpx.Response]:
        """
        Send *request*, again while the gateway starts, and return the answer.

        :param missing: the error of a 404; None: then this is no gateway, since its routes always exist
        :param waits: send it again while the gateway starts: it read nothing of the request, and says when to try again
        :raises GatewayUnreachable, NotAuthorised, Refused: as of `check`
        """
        waited_s = 0.0
        while True:
            answer = yield request
            after = answer.headers.get("Retry-After", "")
            # A streamed body cannot be sent again.
            if answer.status_code != 503 or not waits or not after.isdecimal() or request.content is not None:
                break
            request = replace(request, after_s=min(float(after), _LONGEST_PAUSE_S))
            waited_s += request.after_s
            if waited_s > STARTING_S:
                break
        self.check(answer, missing, request.path)
        return answer

    def object(self, path: str, missing: type[Refused] | None = None, **params: str | None) -> Steps[Any]:
        """Get the JSON object at *path*. Empty *params* are left out."""
        found = yield from self.json(ApiRequest("GET", path, params=given(**params)), missing)
        if not isinstance(found, dict):
            raise self.is_none(path)
        return found

    def objects(
        self, path: str, missing: type[Refused] | None = None, each: type = dict, **params: str | None
    ) -> Steps[list[Any]]:
        found = yield from self.json(ApiRequest("GET", path, params=given(**params)), missing)
        if found is None:  # Go's empty list
            return []
        if not isinstance(found, list) or not all(isinstance(one, each) for one in found):
            raise self.is_none(path)
        return found

    def json(self, request: ApiRequest, missing: type[Refused] | None = None) -> Steps[Any]:
        answer = yield from self.ask(request, missing)
        try:
            return answer.json()
        except ValueError as exc:
            raise self.is_none(request.path) from exc

    # --- what answers and failures mean ---

    def log_line(self, line: str) -> Any:
        """:raises GatewayUnreachable: *line* is no line of a log"""
        try:
            entry = json.loads(line)
            if isinstance(entry["timestamp"], str) and isinstance(entry["text"], str):
                return entry
        except (ValueError, TypeError, KeyError):
            pass
        raise GatewayUnreachable(f"{self.shown} sends logs that are none: {line[:80]!r}")

    def is_refusal(self, answer: httpx.Response, of_function: bool) -> bool:
        """Return whether the gateway refuses, and not a function."""
        return not answer.is_success and (not of_function or _INTERNAL in answer.headers)

    def check(self, answer: httpx.Response, missing: type[Refused] | None, path: str) -> None:
        """:raises GatewayUnreachable, NotAuthorised, Refused: *answer* is no success"""
        status = answer.status_code
        if answer.is_success:
            return
        if answer.is_redirect:
            location = answer.headers.get("location", "nowhere")
            raise GatewayUnreachable(f"{self.shown} sends us on to {location}: {self.hints.name}")
        kind = Refused
        if status == 404:
            if missing is None and _INTERNAL not in answer.headers:
                raise self.is_none(path)
            kind = missing or Refused
        if answer.headers.get("X-Gpufaas-Error") == "quota-exceeded":
            kind = QuotaExceeded
        elif status in (401, 403):
            login = self.hints.login.format(gateway=self.shown)
            raise NotAuthorised(f"the gateway at {self.shown} does not let us in ({status}): {login}")
        text, details = answer.text, {}
        if _INTERNAL in answer.headers and answer.headers.get("content-type") == "application/json":
            details = answer.json()
            text = details.pop("error", text)
        if text.strip() == "404 page not found":  # gateways say so of routes that they do not have
            text = f"the gateway at {self.shown} has no {path}: it is of another release than this client"
        raise kind(status, " ".join(text.split())[:_SHOWN_CHARS], answer.headers, details)

    def is_none(self, path: str) -> GatewayUnreachable:
        return GatewayUnreachable(f"what answers at {self.shown}{path} is no gpufaas gateway: {self.hints.name}")

    @contextmanager
    def translated(self, of_function: bool = False) -> Iterator[None]:
        """Raise httpx's errors as ours. :param of_function: the answer of a function has begun"""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
            if "SSL" in str(exc):
                what = f"no encrypted connection to the gateway at {self.shown}: {exc}"
                raise GatewayUnreachable(f"{what}: correct the URL, or the certificate") from exc
            raise GatewayUnreachable(
                f"no gateway answers at {self.shown}: start one with 'gpufaas serve', or {self.hints.name}"
            ) from exc
        except httpx.TimeoutException as exc:
            raise GatewayUnreachable(f"the gateway at {self.shown} did not answer in time: try again") from exc
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            what = str(exc) or type(exc).__name__
            if of_function:
                raise BrokeOff(what) from exc
            raise GatewayUnreachable(f"the connection to the gateway at {self.shown} broke off: {what}") from exc


def given(**params: str | None) -> dict[str, str]:
    """Return the parameters that are neither None nor empty."""
    return {name: value for name, value in params.items() if value}
