"""
Sends a workload to a running platform over HTTP, in an open loop: each call at its own time, whether or not earlier
calls were answered. Latency counts from the time at which a call was due, so that a slow sender shows.

Answers do not say which devices hold a model. The replay reads ``/system/status`` four times a second for that; the
copies of the hottest model and the false misses are therefore estimates.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import quote

import httpx
import msgspec

from gpufaas_core.model import DeviceId, Seconds
from gpufaas_simulator.nodes import SimulatedDeviceState
from gpufaas_simulator.record import COMPLETED, FAILED, FALSE_MISS, HIT, MISS, REJECTED, Record
from gpufaas_simulator.report import Report, report
from gpufaas_simulator.workload import SimulatedDevice, Workload

START_HEADER: Final = "X-Gpufaas-Start"
DEVICE_HEADER: Final = "X-Gpufaas-Device"
CALL_HEADER: Final = "X-Call-Id"
_PHASE: Final = re.compile(r"(queue|load|run);dur=([0-9.]+)")
_LOOK_EVERY_S: Final = 0.25
_REJECTED: Final = (429, 503, 504)
"""Status codes of calls that the platform rejected."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    gateway: str
    body: bytes = b""
    content_type: str = "application/json"
    authorization: str | None = None
    """For ``/system/status``. Calls are sent without it."""
    verify: bool = True
    timeout_s: Seconds = 120.0


@dataclass(slots=True)
class Replayed:
    record: Record
    report: Report
    call_ids: list[str]
    """By index in the workload; empty without an answer."""
    late_s: Seconds
    """The longest delay of the sender after the time at which a call was due."""
    errors: dict[str, int] = field(default_factory=dict)
    """How often each error was the answer."""


def named(workload: Workload, names: Sequence[str]) -> Workload:
    """Return *workload* with *names* for its functions, in turn. Functions of one name become one."""
    if not names:
        return workload
    place = {name: index for index, name in enumerate(dict.fromkeys(names))}
    to = [place[names[index % len(names)]] for index in range(len(workload.functions))]
    first = {target: workload.functions[index] for index, target in reversed(list(enumerate(to)))}
    functions = [replace(first[index], name=name) for name, index in place.items() if index in first]
    return replace(workload, functions=functions, calls=array("i", [to[call] for call in workload.calls]))


def at_rate(workload: Workload, factor: float) -> Workload:
    """Return *workload* at *factor* times its rate."""
    if factor == 1.0:
        return workload
    return replace(workload, times=array("d", [at / factor for at in workload.times]))


async def replay(workload: Workload, endpoint: Endpoint, progress: Callable[[int], object] | None = None) -> Replayed:
    """
    Send all calls of *workload*, and wait for the answers.

    :raises httpx.HTTPError: the gateway does not answer, or refuses its status
    """
    verify = ssl.create_default_context() if endpoint.gateway.startswith("https://") and endpoint.verify else False
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(endpoint.timeout_s, connect=10.0, pool=None)
    async with httpx.AsyncClient(
        base_url=endpoint.gateway, limits=limits, timeout=timeout, verify=verify, trust_env=False
    ) as http:
        return await _Replay(workload, endpoint, http, progress, Record(workload), [""] * len(workload)).run()


@dataclass(slots=True)
class _Replay:
    workload: Workload
    endpoint: Endpoint
    http: httpx.AsyncClient
    progress: Callable[[int], object] | None
    record: Record
    call_ids: list[str]
    errors: Counter[str] = field(default_factory=Counter)
    device_index: dict[str, int] = field(default_factory=dict)
    looks: list[tuple[Seconds, frozenset[tuple[str, str]]]] = field(default_factory=list)
    """Times, and (function, device) of the residents then."""
    misses: list[tuple[int, Seconds, str]] = field(default_factory=list)
    """Call, time of its start, device."""
    began: Seconds = 0.0
    late_s: Seconds = 0.0
    ended: int = 0
    now: Callable[[], Seconds] = time.monotonic

    async def run(self) -> Replayed:
        before = await self.status()
        for index, each in enumerate(before["devices"]):
            of = each["device"]
            device = SimulatedDevice(DeviceId(of["id"]), of["memory"], of["kind"], of["id"].rpartition("/")[0])
            self.record.devices.append((device, SimulatedDeviceState(device, index, None, 0.0)))
            self.device_index[of["id"]] = index
        self.began = self.now() + 0.05  # so that the first call is not late
        looking = asyncio.create_task(self.look())
        try:
            async with asyncio.TaskGroup() as calls:
                for index, at in enumerate(self.workload.times):
                    wait_s = self.began + at - self.now()
                    if wait_s > 0:
                        await asyncio.sleep(wait_s)
                    self.late_s = max(self.late_s, self.now() - self.began - at)
                    calls.create_task(self.call(index, at))
        finally:
            looking.cancel()
        end_s = self.now() - self.began
        after = await self.status()
        self.close(before, after, end_s)
        # The status does not distinguish loads without a call.
        found = msgspec.structs.replace(report(self.record, str(after["policy"])), prefetches=None)
        return Replayed(self.record, found, self.call_ids, self.late_s, self.errors)

    async def call(self, index: int, at: Seconds) -> None:
        record, function = self.record, self.workload.functions[self.workload.calls[index]].name
        path, headers = f"/function/{quote(function, safe='')}", {"Content-Type": self.endpoint.content_type}
        try:
            answer = await self.http.post(path, content=self.endpoint.body, headers=headers)
        except httpx.HTTPError as exc:
            self.end(index, FAILED, type(exc).__name__)
            return
        now = self.now() - self.began
        said = answer.headers
        self.call_ids[index] = said.get(CALL_HEADER, "")
        phases = {name: float(ms) / 1000 for name, ms in _PHASE.findall(said.get("Server-Timing", ""))}
        start, device = said.get(START_HEADER), said.get(DEVICE_HEADER)
        if start is not None and device in self.device_index:
            started = at + phases.get("queue", 0.0)
            record.started[index] = started
            record.device[index] = self.device_index[device]
            record.start[index] = HIT if start == "hit" else MISS
            if start != "hit":
                self.misses.append((index, started, device))
        if answer.status_code >= 300:
            what = f"{answer.status_code} {answer.reason_phrase}"
            self.end(index, REJECTED if answer.status_code in _REJECTED else FAILED, what)
            return
        record.ended[index] = now
        record.service_s[index] = phases.get("run", 0.0)
        self.end(index, COMPLETED)

    def end(self, index: int, outcome: int, error: str = "") -> None:
        self.record.outcome[index] = outcome
        if error:
            self.errors[error] += 1
        self.ended += 1
        if self.progress is not None:
            self.progress(self.ended)

    async def status(self) -> Any:
        headers = {"Authorization": self.endpoint.authorization} if self.endpoint.authorization else {}
        answer = await self.http.get("/system/status", headers=headers)
        answer.raise_for_status()
        return answer.json()

    async def look(self) -> None:
        while True:
            status = await self.status()
            held = frozenset(
                (_name(resident), each["device"]["id"])
                for each in status["devices"]
                for resident in each["resident"]
            )  # fmt: skip
            self.looks.append((self.now() - self.began, held))
            await asyncio.sleep(_LOOK_EVERY_S)  # a monitor beside the calls

    def close(self, before: Mapping[str, Any], after: Mapping[str, Any], end_s: Seconds) -> None:
        """Compute the figures that are known only at the end."""
        record = self.record
        record.end_s = end_s
        record.starts.extend(sorted(
            (index for index, start in enumerate(record.start) if start), key=lambda index: record.started[index]
        ))  # fmt: skip
        earlier = {each["device"]["id"]: each for each in before["devices"]}
        for each in after["devices"]:
            index = self.device_index.get(each["device"]["id"])
            if index is not None:
                was = earlier[each["device"]["id"]]
                record.evictions += each["evictions"] - was["evictions"]
                record.devices[index][1].busy_s = each["busy_s"] - was["busy_s"]
        names = [each.name for each in self.workload.functions]
        times = [at for at, _ in self.looks]
        for call, started, device in self.misses:
            last = bisect_right(times, started) - 1
            if last >= 0 and any(
                on != device and _is(name, names[self.workload.calls[call]]) for name, on in self.looks[last][1]
            ):
                record.start[call] = FALSE_MISS
        hottest = self.workload.hottest
        if hottest is not None:
            for (at, held), until in zip(self.looks, [*times[1:], end_s], strict=True):
                copies = sum(_is(name, names[hottest]) for name, _ in held)
                record.hottest_copy_s += copies * max(0.0, until - max(0.0, at))


def _name(resident: Mapping[str, Any]) -> str:
    return str(resident.get("name") or resident["function"].partition("@")[0])


def _is(resident: str, name: str) -> bool:
    """A function is called NAME or NAME.NAMESPACE."""
    return name in (resident, resident.partition(".")[0])
