"""The answer of a function, whole or as it comes; and the headers in which the platform describes the call."""

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import httpx

from gpufaas.errors import BrokeOff, FunctionFailed
from gpufaas_core._types import Seconds

_PHASE: Final = re.compile(r"\s*([\w-]+)\s*;[^,]*?\bdur=([0-9.]+)")
_SHOWN_CHARS: Final = 1000


@dataclass(frozen=True, slots=True)
class Timing:
    """Device and phases of a call. What the answer does not say is None or missing."""

    start: str | None
    """
    ``hit``: its worker was running. Else it was started for this call, and this says where its weights came from:
    ``parked``, ``host`` (the node's memory), ``peer`` (another node), ``disk`` or ``store``.
    """
    device: str | None
    phases: Mapping[str, Seconds]
    """``queue``, ``load`` and ``run``, in this order."""
    parts: Mapping[str, Mapping[str, Seconds]]
    """Parts of phases: ``load`` may consist of ``room``, ``fetch``, ``process``, ``read``, ``transfer``,
    ``init``."""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Self:
        """Read the headers of an answer."""
        every = [(name, float(ms) / 1000) for name, ms in _PHASE.findall(headers.get("Server-Timing") or "")]
        names = {name for name, _ in every}
        phases: dict[str, Seconds] = {}
        parts: dict[str, dict[str, Seconds]] = {}
        for name, seconds in every:
            whole, _, part = name.partition("-")
            if part and whole in names:
                parts.setdefault(whole, {})[part] = seconds
            else:
                phases[name] = seconds
        return cls(headers.get("X-Gpufaas-Start"), headers.get("X-Gpufaas-Device"), phases, parts)


class _Head:
    """Status and headers, which come before the body."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status: int = response.status_code
        self.reason: str = response.reason_phrase
        self.headers: Mapping[str, str] = response.headers
        """Names are found in upper and lower case."""

    @property
    def timing(self) -> Timing:
        return Timing.of(self.headers)

    @property
    def call_id(self) -> str:
        """The id for `explain` and `logs`; empty: the gateway is not gpufaas."""
        return self.headers.get("X-Call-Id", "")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.status} {self.reason}>"


class Answer(_Head):
    """A whole answer of a function."""

    @property
    def content(self) -> bytes:
        return self._response.content

    @property
    def text(self) -> str:
        return self._response.text

    def json(self) -> Any:
        """:raises ValueError: the body is not JSON"""
        return self._response.json()

    def raise_for_status(self) -> Self:
        """:raises FunctionFailed: the status is 400 or more"""
        if self.status >= 400:
            raise FunctionFailed(self.status, " ".join(self.text.split())[:_SHOWN_CHARS])
        return self


class Stream(_Head):
    """An answer whose body is still being sent. Iterate over it once, for the pieces of the body."""

    def __iter__(self) -> Iterator[bytes]:
        """:raises BrokeOff: the answer broke off in the middle"""
        try:
            yield from self._response.iter_bytes() if self._response.is_stream_consumed else self._response.iter_raw()
        except httpx.HTTPError as exc:
            raise BrokeOff(str(exc) or type(exc).__name__) from exc


class AsyncStream(_Head):
    """`Stream`, for ``async for``."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            read = self._response.is_stream_consumed
            async for part in self._response.aiter_bytes() if read else self._response.aiter_raw():
                yield part
        except httpx.HTTPError as exc:
            raise BrokeOff(str(exc) or type(exc).__name__) from exc
