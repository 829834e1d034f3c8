"""A worker on a GPU is parked and woken. Stand-ins: a worker that notes what it is told, and a program."""

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.waiting import eventually

from gpufaas_core.units import MiB
from gpufaas_core.wire.heads import ParkedHead, ReadyHead, WakeHead, WokenHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_gpu_manager.launch.processes import ForkedProcess
from gpufaas_gpu_manager.parking import ProcessParking
from gpufaas_gpu_manager.timers import Timers
from gpufaas_gpu_manager.worker_load import Phases, WorkerLoad
from gpufaas_gpu_manager.worker_state import BEGIN, WorkerState

CONTEXT = 300 * MiB


class Run(ForkedProcess):
    def __init__(self) -> None:
        self.told: list[object] = []

    def ask(self, kind: int, head: msgspec.Struct | None = None) -> None:
        self.told.append((kind, head))

    def signal(self, number: signal.Signals) -> None:
        self.told.append(number)


class Worker:
    """On `cuda:0`, with a driver that counts *by_driver* bytes for it; None: it keeps no account."""

    def __init__(self, *, checkpoint: str = "", parks: bool = True, by_driver: int | None = CONTEXT) -> None:
        self.state = WorkerState.READY
        self.pid = 4711
        self.memory = 2048 * MiB
        self.standby = self.replaced = False
        self.run, self.timers = Run(), Timers()
        self.ready_head = ReadyHead(0, [], parks=parks)
        self.calls = SimpleNamespace(exchanges={}, memory=SimpleNamespace(uncounted=0))
        self.load = WorkerLoad()
        self.parked: list[int] = []
        self.not_parked: list[str] = []
        self.instead: list[str] = []
        self.awake: list[Phases] = []
        self.killed: list[str] = []
        source = SimpleNamespace(
            torch_device="cuda:0", enforced=False, emulation=None, used_bytes=lambda _pids: by_driver
        )
        self.device = SimpleNamespace(
            source=source, on_parked=lambda _, held: self.parked.append(held),
            not_parked=lambda _, reason: self.not_parked.append(reason),
        )  # fmt: skip
        self.host = SimpleNamespace(load_instead=lambda _, reason: self.instead.append(reason) or True)
        self.parking = ProcessParking(self, checkpoint)  # type: ignore[arg-type]

    def limit_to(self, memory: int) -> None:
        self.run.told.append(memory)

    def kill(self, reason: str) -> None:
        self.killed.append(reason)

    def on_loaded(self, phases: Phases, _: int) -> None:
        self.awake.append(phases)

    def wake(self) -> None:
        self.state = BEGIN[self.state]
        self.parking.wake()


async def test_a_model_moves_and_the_context_stays_charged() -> None:
    worker = Worker()
    worker.parking.park()
    worker.parking.on_parked(ParkedHead(20 * MiB))
    assert worker.run.told == [(Kind.PARK, None), signal.SIGSTOP]
    assert (worker.state, worker.parked) == (WorkerState.PARKED, [CONTEXT])

    worker.wake()
    worker.parking.on_woken(WokenHead("", [("transfer", 0.1)]))
    assert worker.run.told[2:] == [signal.SIGCONT, worker.memory, (Kind.WAKE, WakeHead())]
    assert [name for name, _ in worker.awake[0]] == ["room", "wake", "transfer"]


@pytest.mark.parametrize(("uncounted", "held", "charged"), [(100, 20, 120), (0, 0, 512)])
async def test_without_an_account_of_the_driver_the_worker_s_own_counts(
    uncounted: int, held: int, charged: int
) -> None:
    worker = Worker(by_driver=None)
    worker.calls.memory.uncounted = uncounted * MiB
    worker.parking.park()
    worker.parking.on_parked(ParkedHead(held * MiB))
    assert worker.parked == [charged * MiB]


def program(tmp_path: Path, status: int = 0) -> str:
    path = tmp_path / "cuda-checkpoint"
    path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told\necho no such process >&2\nexit {status}\n')
    path.chmod(0o755)
    return str(path)


async def test_the_driver_takes_everything_off_where_it_can(tmp_path: Path) -> None:
    worker = Worker(checkpoint=program(tmp_path), parks=False)
    assert worker.parking.why_not() == ""
    worker.parking.park()
    await eventually(lambda: worker.parked == [0])
    assert worker.run.told == [signal.SIGSTOP], "the worker is not asked"

    worker.wake()
    await eventually(lambda: (Kind.WAKE, WakeHead(moves=False)) in worker.run.told)
    assert (tmp_path / "told").read_text() == "--toggle --pid 4711\n" * 2
    worker.parking.close()


async def test_a_driver_that_cannot_leaves_the_worker_evicted(tmp_path: Path) -> None:
    worker = Worker(checkpoint=program(tmp_path, status=3))
    worker.parking.park()
    await eventually(lambda: bool(worker.not_parked))
    assert worker.not_parked == ["cuda-checkpoint ended with status 3: no such process"]
    assert worker.parked == []


async def test_a_check_that_fails_loads_another_worker_instead() -> None:
    worker = Worker()
    worker.parking.park()
    worker.parking.on_parked(ParkedHead(0))
    worker.wake()
    worker.parking.on_woken(WokenHead("its self-check gave another answer", []))
    assert worker.instead == ["its self-check gave another answer"]
    assert worker.killed == ["its self-check gave another answer: it is loaded anew"]
    assert not worker.awake


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"state": WorkerState.STARTING}, "it is in use"),
        ({"standby": True}, "it is in use"),
        ({"calls": SimpleNamespace(exchanges={"c": 1})}, "it is in use"),
        ({"run": object()}, "only models of handlers can be parked"),
        ({"ready_head": ReadyHead(0, [])}, "its model is no torch module, and its handler has no park and wake"),
    ],
)
async def test_what_is_not_parked(change: dict[str, Any], why: str) -> None:
    worker = Worker()
    for name, value in change.items():
        setattr(worker, name, value)
    assert worker.parking.why_not() == why


async def test_late_words_change_nothing() -> None:
    worker = Worker()
    worker.parking.on_parked(ParkedHead(0))
    worker.parking.on_woken(WokenHead("", []))
    await asyncio.sleep(0)
    assert (worker.state, worker.run.told, worker.awake) == (WorkerState.READY, [], [])
