"""
`Profiling`: takes profiles of functions (docs/adr/0072).

A *probe* is the function under another id, which no caller can name, on one device. Each call of it runs one batch of
equal calls, and holds the device while it runs; calls that wait go in between. What ends the request ends the probe.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from math import ceil
from secrets import token_hex
from statistics import fmean, median
from typing import Final

import msgspec
from msgspec.structs import replace

from gpufaas_core.constraints import CORES, DEVICE, DRIVER, KIND, TORCH, Constraint, satisfied
from gpufaas_core.errors import GpufaasError, InvalidSpec, LoadFailed
from gpufaas_core.model import Device, Function, Need, Seconds, Taken, TakenBatch
from gpufaas_core.reservations import reservation
from gpufaas_core.taken import HEADER, PEAK, TRACE, VARIABLE, Measured, profile_of
from gpufaas_gateway.answering import Answer
from gpufaas_gateway.call_headers import Header
from gpufaas_gateway.calls import Calls
from gpufaas_gateway.catalogue import Catalogue, ServedRevision
from gpufaas_gateway.ports import Scheduler, Store, Workers
from gpufaas_gateway.request import Request
from gpufaas_gateway.usage import FunctionStats

log = logging.getLogger(__name__)

WARM_UPS: Final = 3
TIMED: Final = 20
QUICK: Final = 5
"""Batches of each size that are timed; the fewer for a quick look."""
_LARGEST_UNASKED: Final = 16
_TIME_S: Final[Seconds] = 600.0
"""For one batch, with its wait and the first load."""
_LOADED: Final = re.compile(rb"\bload;dur=([\d.]+)")


@dataclass(frozen=True, kw_only=True)
class ProfileAsked:
    batches: Sequence[int] = ()
    """Sizes; none: powers of two, as the function allows."""
    device: str = ""
    """Empty: one that has a copy, or is idle."""
    together: int = 0
    """How many batches run beside each other, after they ran alone; 0: as many as a copy takes."""
    timed: int = TIMED
    body: bytes = b""
    """The input; empty: the sample of the bundle."""
    content_type: bytes = b""


@dataclass(eq=False)
class Profiling:
    """See module. One event loop owns it."""

    store: Store
    workers: Workers
    scheduler: Scheduler
    calls_of: Callable[[Catalogue], Calls]
    """Returns what runs calls of the functions in a catalogue."""
    wsm: Callable[[Measured], float]
    """Returns the mean share of a GPU's multiprocessors that a traced batch asks for, in per cent."""

    async def take(self, deployed: ServedRevision, asked: ProfileAsked) -> dict[str, Taken]:
        """
        Measure a function, keep what was measured, and return it by kind of device; if anything fails, keep nothing.

        :raises InvalidSpec: it cannot be measured so
        :raises LoadFailed: it did not load, or a batch failed
        """
        sizes, at_once = _wanted(deployed, asked)
        device = self._device(deployed, asked.device)
        async with self._probe(deployed, device, at_once) as calls:
            taken = await _Run(deployed, calls, device, asked, self.wsm).take(sizes, at_once)
        await self.keep(deployed, {device.kind: taken})
        return {device.kind: taken}

    async def run_idle(self, catalogue: Catalogue, every_s: Seconds = 10.0) -> None:
        """Without end, take what lacks of the functions in *catalogue*, on devices that are idle; each once."""
        tried = set()
        while True:
            await asyncio.sleep(every_s)
            kinds = {each.device.kind for each in self.scheduler.status().devices}
            for each in catalogue.everywhere():
                if all((each.spec.taken_as, kind) in tried for kind in kinds):
                    continue
                idle = [one for one in self.scheduler.status().devices if not one.busy]
                for device in (one.device for one in idle if one.device.memory - one.used >= each.spec.memory):
                    key = each.spec.taken_as, device.kind
                    if key in tried:
                        continue
                    tried.add(key)
                    try:
                        if device.kind not in await self.known(each):
                            await self.take(each, ProfileAsked(device=device.id))
                    except GpufaasError as exc:
                        log.info("profile.not_taken function=%s reason=%s", each.full_name, exc)

    async def keep(self, deployed: ServedRevision, profiles: Mapping[str, Taken]) -> None:
        """Store profiles by kind of device, and have the engine expect what they say."""
        for kind, taken in profiles.items():
            await asyncio.to_thread(self.store.save_profile, deployed.spec.taken_as, kind, profile_of(taken))
            deployed.profiles[kind] = profile_of(taken, deployed.profiles.get(kind))
            self.scheduler.profiled(deployed.function_id, kind, taken)

    async def known(self, deployed: ServedRevision) -> dict[str, Taken]:
        """Return the profiles that are kept of a function, by kind of device."""
        found = await asyncio.to_thread(self.store.profiles, deployed.spec.taken_as)
        return {kind: each.taken for kind, each in found.items() if each.taken is not None}

    def _device(self, deployed: ServedRevision, asked: str) -> Device:
        labels, mine = deployed.spec.constraints, deployed.function_id
        fit = [each for each in self.scheduler.status().devices if satisfied(labels, each.device.labels)]
        fit = [each for each in fit if asked in ("", each.device.id)]
        if not fit:
            raise InvalidSpec(f"{deployed.name} may run on no device {asked}".rstrip() + ": gpufaas node list has all")
        ranks = [(all(one.function != mine for one in each.resident), each.busy, each.device.id) for each in fit]
        return fit[ranks.index(min(ranks))].device

    @asynccontextmanager
    async def _probe(self, deployed: ServedRevision, device: Device, at_once: int) -> AsyncIterator[Calls]:
        """Have a probe of *deployed* on *device*, which runs so many batches at once."""
        record = replace(deployed.record, name=_probe_of(deployed), revision=token_hex(4))
        there = (*deployed.spec.constraints, Constraint(DEVICE, device.id))
        spec = replace(
            deployed.spec, function=record.function_id, env={**deployed.spec.env, VARIABLE: "1"}, constraints=there,
            need=replace(deployed.spec.need, slots=at_once),
        )  # fmt: skip
        function = Function(
            record.function_id, deployed.function.digest, Need(device.compute, slots=at_once),
            {"*": deployed.function.profiles["*"]},  # what was learnt is measured anew
            constraints=there, floor=deployed.function.floor, elastic=spec.elastic, tenant=deployed.function.tenant,
        )  # fmt: skip
        options = dataclass_replace(deployed.options, timeout_s=_TIME_S, exec_s=_TIME_S, whole_s=_TIME_S, cors=None)
        catalogue = Catalogue()
        catalogue.show(ServedRevision(record, spec, options, function, FunctionStats(record.full_name), {}))
        try:
            await self.workers.define(spec)
            await self.scheduler.probe(function, spec)
            yield self.calls_of(catalogue)
        finally:
            self.scheduler.end_probe(record.function_id)
            await self.workers.forget(record.function_id)


@dataclass(frozen=True)
class _Run:
    """One profile while it is taken."""

    deployed: ServedRevision
    calls: Calls
    device: Device
    asked: ProfileAsked
    wsm: Callable[[Measured], float]

    async def take(self, sizes: Sequence[int], at_once: int) -> Taken:
        _, first = await self._batch(1)
        loaded = _LOADED.search(dict(first.headers)[b"server-timing"])
        alone = {size: await self._batches(size, 1) for size in sizes}
        together = {size: await self._batches(size, at_once) for size in sizes if at_once > 1}
        peak = (await self._batch(1, PEAK))[0].peak
        return Taken(
            self.deployed.record.revision, time.time(), 0.0 if loaded is None else float(loaded[1]) / 1e3,
            min(reservation(peak), self.device.memory), alone, together, at_once,
            self.device.labels.get(TORCH, ""), self.device.labels.get(DRIVER, ""),
        )  # fmt: skip

    async def _batches(self, size: int, at_once: int) -> TakenBatch:
        rounds = [
            await asyncio.gather(*(self._batch(size) for _ in range(at_once)))
            for _ in range(WARM_UPS + ceil(self.asked.timed / at_once))
        ]
        timed = [measured for each in rounds[WARM_UPS:] for measured, _ in each]
        times = sorted(each.wall_s for each in timed)
        uses = await self._uses(size, timed) if at_once == 1 else None
        return TakenBatch(median(times), times[ceil(0.95 * len(times)) - 1], len(times), uses)

    async def _uses(self, size: int, timed: Sequence[Measured]) -> float | None:
        if self.device.labels.get(KIND) == "cuda":
            traced, _ = await self._batch(size, TRACE)
            return self.wsm(traced) if traced.kernels else None  # async handlers are not traced
        if timed[0].uses is not None:
            return fmean(each.uses or 0.0 for each in timed)
        cores = float(self.device.labels.get(CORES, timed[0].cores))
        return min(100.0, 100.0 * sum(each.cpu_s for each in timed) / (sum(each.wall_s for each in timed) * cores))

    async def _batch(self, size: int, more: str = "") -> tuple[Measured, Answer]:
        """:raises GpufaasError: the batch failed: says why"""
        headers: list[Header] = [(HEADER, f"{size} {more}".encode())]
        if self.asked.content_type:
            headers.append((b"content-type", self.asked.content_type))
        name = f"{_probe_of(self.deployed)}.{self.deployed.namespace}"
        answer = await self.calls.run(Request(name, headers=headers, body=self.asked.body))
        body = bytes(answer.body)
        if answer.stream is not None:
            with answer.stream as stream:
                while (piece := await stream.chunk()) is not None:
                    body += piece
        if answer.status == 200:
            return msgspec.json.decode(body, type=Measured), answer
        why = f"no profile of {self.deployed.full_name} was taken on {self.device.id}, and nothing is kept: "
        why += body.decode("utf-8", "replace").strip()
        raise InvalidSpec(why) if answer.status == 400 else LoadFailed(why)


def _probe_of(deployed: ServedRevision) -> str:
    return f"{deployed.name}+profile"  # no function can be called so


def _wanted(deployed: ServedRevision, asked: ProfileAsked) -> tuple[list[int], int]:
    """Return sizes, and how many batches run beside each other. :raises InvalidSpec: *deployed* has no such batches"""
    need, name = deployed.function.need, deployed.name
    if deployed.unavailable is not None:
        raise InvalidSpec(f"{name} cannot be measured: {deployed.unavailable}")
    if deployed.spec.kind != "model" or not need.reserved:
        what = f"holds its share of a device (gpufaas.sharing {need.sharing})" if need.held else "is no model"
        raise InvalidSpec(f"{name} {what}: profiles are of models whose calls take compute of a device while they run")
    powers = [1 << each for each in range(_LARGEST_UNASKED.bit_length()) if 1 << each <= need.batch_max]
    sizes = sorted({1, *(asked.batches or powers)})
    for each in (sizes[0], sizes[-1]):
        if not 1 <= each <= need.batch_max:
            raise InvalidSpec(f"a batch of {each}: {name} runs batches of 1 to {need.batch_max} (gpufaas.batch-max)")
    slots = 1 if need.sharing == "time" else max(1, need.slots)
    if not 0 <= asked.together <= slots:
        raise InvalidSpec(f"{asked.together} batches at once: a copy of {name} runs up to {slots} (gpufaas.slots)")
    return sizes, asked.together or slots
