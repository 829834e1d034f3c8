"""
A platform, or a cluster, under everything at once, and what must hold nevertheless: each accepted call is answered
once, with its own answer or an honest error of a fault that was injected; no asynchronous call is lost; when the load
ends no device is stuck; the workers' memory stays within the devices, and the platform's memory and descriptors stay
flat; in a cluster, scheduler and nodes agree all the time.
"""

import contextlib
import math
import os
import random
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
from tests.files import open_file
from tests.integration.conftest import LIMIT_S, TORCH, private_bytes, until
from tests.soak.functions import FUNCTIONS
from tests.soak.judge import LOADS_S, Fault, Verdict, judge
from tests.soak.load import Load, is_open
from tests.soak.place import (
    DEVICE_MIB,
    DEVICES,
    ManyProcesses,
    OneMachine,
    Place,
    fork_servers,
    is_parked_or_gone,
    workers,
)

MiB: Final = 1024 * 1024
RATE: Final = 12.0
"""Calls per second: about half of what the devices could take."""
DRAIN_S: Final = 120.0
_FAULT_EVERY_S: Final = 12.0
_UPDATE_EVERY_S: Final = 7.0
_MORE_FILES: Final = 24
"""Descriptors that may be open once all functions are removed beyond those before any was there: kept connections."""
_MORE_MIB: Final = 40.0
"""How much the platform's memory may grow, whatever the time."""
_MIB_PER_MINUTE: Final = 1.0
"""And on top of that for each minute: what ended calls leave is bounded, but the bounds are not reached in minutes."""
_SLACK: Final = 1.05
_SETTLED_CALLS: Final = 5000
"""From then on a process that serves should stay as large as it is."""
_REST_S: Final = 30.0
_GROWN: Final = 1.5
"""So many times as large may it be after that much rest."""
_UPDATED: Final = ("updated", "slots", "batch")
_RETRY: Final = {f"com.openfaas.retry.{key}": text for key, text in
                 {"min_wait": "50ms", "max_wait": "500ms", "attempts": "1000"}.items()}  # fmt: skip


@dataclass(slots=True)
class Sample:
    at_s: float
    platform_mib: float
    """Of the serving processes alone, their own."""
    files: int
    workers_mib: float
    """Of the workers that have a device: a parked one has memory of its node's host cache."""
    workers: int


@dataclass(slots=True)
class Memory:
    """Of one serving process, in MiB."""

    when: str
    pid: int
    rss: float
    pss: float
    private: float
    """What would become free if it ended."""
    heap: float
    """The part of it that the heap of malloc has, of its main arena."""


@dataclass(slots=True)
class Report:
    seconds: float
    calls: int = 0
    verdict: Verdict = field(default_factory=Verdict)
    faults: list[Fault] = field(default_factory=list)
    updates: int = 0
    samples: list[Sample] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    idle_s: float = math.inf
    """After the last answer, until nothing ran."""
    violations: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds, "calls": self.calls, "answered": dict(self.verdict.answered),
            "failed": dict(self.verdict.failed), "failed_by_faults": self.verdict.excused,
            "given_up": self.verdict.given_up, "executed_again": self.verdict.again, "updates": self.updates,
            "faults": dict(Counter(each.what for each in self.faults)), "idle_s": self.idle_s,
            "samples": [[each.at_s, each.platform_mib, each.files, each.workers_mib] for each in self.samples],
            "memory": [asdict(each) for each in self.memory], "violations": self.violations,
        }  # fmt: skip


class Soak:
    """One run. `run` returns the report; `progress` is called about twice a second with what there is to say."""

    def __init__(self, home: Path, seconds: float, *, rate: float = RATE, seed: int = 1, cluster: bool = False) -> None:
        """:param cluster: of a cluster; else of one platform"""
        self.seconds = seconds
        self.report = Report(seconds)
        self._random = random.Random(seed)
        self._record = open_file("record")
        self.place: Place = (ManyProcesses if cluster else OneMachine)(home / "platform")
        self._versions = {each.name: (0, 0) for each in FUNCTIONS}
        self.load = Load(self.place.ports, rate, self._versions.__getitem__, seed)
        self._stop = threading.Event()
        self._began = 0.0

    def run(self, progress: Callable[[float, str], None] = lambda *_: None) -> Report:
        report, place = self.report, self.place
        place.start()
        try:
            fresh = self._open_files()
            self._deploy()
            with self._quiet_readers():
                self.load.start()
                self._began = time.monotonic()
                threads = [
                    threading.Thread(target=self._repeat, args=(work, every_s), name=work.__name__)
                    for work, every_s in (
                        (self._break_something, min(_FAULT_EVERY_S, self.seconds / 7)),
                        (self._update, _UPDATE_EVERY_S),
                        (self._sample, min(1.0, self.seconds / 40)),
                    )
                ]
                for each in threads:
                    each.start()
                while (at_s := time.monotonic() - self._began) < self.seconds:
                    progress(at_s, self._said())
                    time.sleep(0.5)
                self._stop.set()
                for each in threads:
                    each.join()
                self.load.stop(DRAIN_S)
            self._look_after()
            report.calls = len(self.load.calls)
            report.verdict = judge(self.load, Counter(self._record.read_text().split()), report.faults)
            report.violations += report.verdict.wrong
            self._look_at_samples()
            self._look_at_memory()
            self._look_at_files(fresh)
            report.violations += place.finish()
        finally:
            self._stop.set()
            place.close()
        return report

    def _said(self) -> str:
        calls = self.load.calls
        return f"{len(calls)} calls, {sum(map(is_open, calls[-500:]))} open, {len(self.report.faults)} faults"

    # --- what happens to it ---

    def _deploy(self) -> None:
        for each in FUNCTIONS:
            self._deploy_one(each.name)
        for each in FUNCTIONS:
            self._probe(each.name, "warm-up")

    def _deploy_one(self, name: str) -> None:
        each = next(function for function in FUNCTIONS if function.name == name)
        retry = _RETRY if each.kind == "async" else {}
        env = {"record": str(self._record), "version": str(self._versions[name][1])}
        memory = {"memory": "64Mi"} if each.lang == TORCH else {}
        self.place.deploy(name, each.source, each.lang, env=env, **memory, **retry, **each.annotations)

    def _probe(self, name: str, what: str) -> None:
        pieces = "1" if name == "large" else "-"
        id_ = f"{what}-{name}"
        headers = {"X-Id": id_, "X-Seconds": "0"}
        answer = self.place.call(f"/function/{name}", f"{id_} 0 {pieces}".encode(), timeout=60, headers=headers)
        if answer.status_code != 200 or id_ not in answer.text:
            self.report.violations.append(f"{what} of {name}: {answer.status_code} {answer.text[:300]}")

    @contextlib.contextmanager
    def _quiet_readers(self) -> Iterator[None]:
        """Callers who ask for much and read nothing, twice as many as there are slots: until they are cut off."""
        with contextlib.ExitStack() as stack:
            for number in range(16):
                sock = stack.enter_context(socket.socket())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.connect(("127.0.0.1", self.place.ports[number % len(self.place.ports)]))
                body = f"quiet-{number} 0 160"
                sock.sendall(
                    f"POST /function/large HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
                )
            yield

    def _repeat(self, work: Callable[[], None], every_s: float) -> None:
        while not self._stop.wait(every_s):
            try:
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended while it was looked at: next time
                    work()
            except (psutil.Error, httpx.TransportError, OSError) as exc:
                self.report.violations.append(f"{work.__name__}: {exc!r}")

    def _break_something(self) -> None:
        left_s = self.seconds - (time.monotonic() - self._began)
        if left_s < 4:
            return  # the last calls run to their end
        kinds = ("worker", "fork server stopped", "worker", "fork server killed", "worker")
        what = kinds[len(self.report.faults) % len(kinds)]
        servers = fork_servers(self.place)
        if not servers:
            return  # it is being replaced
        server = servers[-1] if len(self.place.ports) == 1 else self._random.choice(servers)
        if what == "worker":
            workers = [
                each for each in server.children() if time.time() - each.create_time() > 2 and each.name() != "standby"
            ]
            if not workers:
                return
            called = {each.function for each in self.load.calls[-60:] if is_open(each)}
            busy = [each for each in workers if each.name().partition(" ")[2].partition(".")[0] in called]
            victim = self._random.choice(busy or workers)
            self._note(what, excuses=True)
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        elif what == "fork server killed":
            self._note(what, excuses=True)
            server.kill()
        else:
            self._note(what, excuses=False)
            server.suspend()

    def _note(self, what: str, *, excuses: bool) -> None:
        self.report.faults.append(Fault(time.monotonic(), what, excuses))

    def _update(self) -> None:
        name = _UPDATED[self.report.updates % len(_UPDATED)]
        before, version = self._versions[name][0], self._versions[name][1] + 1
        began = time.monotonic()
        self._versions[name] = before, version
        self._deploy_one(name)
        while "before" in self.place.function(name)["gpufaas"] and not self._stop.wait(0.1):
            pass  # it takes the calls, and gives them back if it does not load
        serves = int(self.place.function(name)["envVars"]["version"])
        self._versions[name] = serves, version
        self.report.updates += 1
        if serves != version and not any(each.excuses and each.at > began - LOADS_S for each in self.report.faults):
            self.report.violations.append(f"update {version} of {name} failed, and version {serves} serves")

    # --- what is looked at ---

    def _sample(self) -> None:
        sizes = {each: private_bytes(each.pid) or 0 for each in workers(self.place)}
        # One by one, and each takes a while: what ended or was parked since then was not there together with the last.
        held = [size for each, size in sizes.items() if not is_parked_or_gone(each)]
        self.report.samples.append(
            Sample(
                time.monotonic() - self._began,
                sum(private_bytes(pid) or 0 for pid in self.place.serving()) / MiB,
                self._open_files(),
                sum(held) / MiB,
                len(held),
            )
        )
        if not self.report.memory and len(self.load.calls) >= _SETTLED_CALLS:
            self._note_memory("settled")

    def _look_after(self) -> None:
        """The load has ended: nothing is stuck, and every function answers."""
        ended = time.monotonic()
        try:
            until(self.place.is_idle, "it is idle", timeout_s=LIMIT_S)
            self.report.idle_s = time.monotonic() - ended
        except AssertionError:
            status = self.place.status()
            self.report.violations.append(f"{LIMIT_S:g} s after the last call something runs yet: {str(status)[:2000]}")
        for each in FUNCTIONS:
            try:
                self._probe(each.name, "afterwards")
            except httpx.HTTPError as exc:
                self.report.violations.append(f"afterwards, {each.name} gives no answer: {exc!r}")
        self.report.violations += [f"afterwards, {each}" for each in self.place.unready()]
        self._sample()
        self._note_memory("at the end")
        if len(self.load.calls) > 2 * _SETTLED_CALLS:
            time.sleep(_REST_S)
            self._note_memory("rested")

    def _look_at_samples(self) -> None:
        samples, violations = self.report.samples, self.report.violations
        budget = DEVICES * DEVICE_MIB * _SLACK
        if over := [each for each in samples if each.workers_mib > budget]:
            most = max(over, key=lambda each: each.workers_mib)
            violations.append(
                f"in {len(over)} of {len(samples)} samples the workers held more than their devices have: up to "
                f"{most.workers_mib:.0f} MiB of {DEVICES * DEVICE_MIB}, by {most.workers} workers, {most.at_s:.0f} s in"
            )
        early = [each for each in samples if self.seconds * 0.1 <= each.at_s <= self.seconds * 0.3]
        late = [each for each in samples if self.seconds * 0.8 <= each.at_s <= self.seconds]
        if not early or not late:
            violations.append(f"there are only {len(samples)} samples")
            return
        memory = [statistics.median(each.platform_mib for each in part) for part in (early, late)]
        allowed = _MORE_MIB + _MIB_PER_MINUTE * self.seconds / 60
        if memory[1] - memory[0] > allowed:
            violations.append(f"the platform grew by {memory[1] - memory[0]:.1f} MiB, of {allowed:.1f} MiB that it may")

    def _open_files(self) -> int:
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.place.serving())

    def _look_at_files(self, fresh: int) -> None:
        """Each call and each worker has some: so those count that are left when there is neither."""
        self.place.remove_all()
        try:
            until(lambda: self._open_files() <= fresh + _MORE_FILES, "what was open is closed", timeout_s=LIMIT_S)
        except AssertionError:
            self.report.violations.append(
                f"{fresh} descriptors were open before any function was there, and {self._open_files()} after all"
            )

    def _note_memory(self, when: str) -> None:
        for pid in self.place.serving():
            maps = psutil.Process(pid).memory_maps()  # those of one name together
            rss, pss, private, heap = (
                sum(size(each) for each in maps) / MiB
                for size in (
                    lambda each: each.rss,
                    lambda each: each.pss,
                    lambda each: each.private_clean + each.private_dirty,
                    lambda each: each.rss if each.path == "[heap]" else 0,
                )
            )
            self.report.memory.append(Memory(when, pid, rss, pss, private, heap))

    def _look_at_memory(self) -> None:
        settled, rested = (
            {each.pid: each.private for each in self.report.memory if each.when == when}
            for when in ("settled", "rested")
        )
        for pid in settled.keys() & rested.keys():
            if rested[pid] > _GROWN * settled[pid]:
                self.report.violations.append(
                    f"process {pid} holds {rested[pid]:.0f} MiB after a rest, and held {settled[pid]:.0f} after "
                    f"{_SETTLED_CALLS} calls"
                )
