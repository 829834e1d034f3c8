"""
One view of the metrics of several processes, in Prometheus' text format.

Series are labelled and not summed: when a process starts anew its counters begin at 0, which Prometheus understands of
a series, and would take a sum for a reset of all.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import aiohttp
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gpufaas_core.units import Seconds
from gpufaas_gateway.errors import NotReady, headers_of, status_of
from gpufaas_gateway.metrics import CONTENT_TYPE

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{)?", re.MULTILINE)


def with_label(text: str, name: str, value: str) -> str:
    """Return *text* with one more label on every sample."""
    return _SAMPLE.sub(lambda found: f'{found[1]}{{{name}="{value}"{"," if found[2] else "}"}', text)


def joined(texts: Iterable[str]) -> str:
    """Return all *texts* as one: each family once, with the samples of all."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for text in texts:
        for family, lines in families_of(text):
            heads, samples = families.setdefault(family, ([], []))
            if not heads:
                heads += [line for line in lines if line.startswith("#")]
            samples += [line for line in lines if not line.startswith("#")]
    return "".join(f"{line}\n" for heads, samples in families.values() for line in (*heads, *samples))


def families_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each family of *text* by its name, with its lines."""
    family, lines = "", list[str]()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            if lines:
                yield family, lines
            family, lines = line.split(" ", 3)[2], []
        lines.append(line)
    if lines:
        yield family, lines


async def asked(url: str, timeout_s: Seconds = 2.0) -> str:
    """Return what is answered at *url*; empty: nothing is."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(timeout_s)) as session,
            session.get(url) as response,
        ):
            return await response.text()
    except (aiohttp.ClientError, TimeoutError):
        return ""


@dataclass(slots=True, eq=False)
class MetricsOfAll:
    """Answers ``/metrics`` for all processes of a gateway, whichever of them is asked; `_app` answers the rest."""

    _app: ASGIApp
    _url: str
    """The metrics of all processes are there."""
    _render: Callable[[], bytes]
    """Returns those of this process, with what is the same in all of them (devices, queues) among them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/metrics" or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        text = await asked(self._url)
        if not text:
            error = NotReady(f"nothing answers at {self._url}: the metrics of all processes are there")
            answer = Response(f"{error}\n", status_of(error), headers_of(error))
        else:
            of_each = {family for family, _ in families_of(text)}
            shared = (lines for family, lines in families_of(self._render().decode()) if family not in of_each)
            more = "".join(f"{line}\n" for lines in shared for line in lines)
            answer = Response(text + more, headers={"Content-Type": CONTENT_TYPE})
        await answer(scope, receive, send)
