"""When a pool of standbys is filled, and what becomes of one that fails. The fork server is a stand-in."""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest
from tests.waiting import eventually

from gpufaas_functions.runner import WorkerStart
from gpufaas_gpu_manager import standbys as module
from gpufaas_gpu_manager.cgroup_group import Group
from gpufaas_gpu_manager.confine import Confine
from gpufaas_gpu_manager.forked import TAKEN, Prepare, Spawn
from gpufaas_gpu_manager.isolation.walls import Walls
from gpufaas_gpu_manager.standbys import ANYWHERE, Home, Standbys

START = WorkerStart("f.ns", "bundle", "handler", "model", "cpu", 1, 1, 0, {})
CORES = Home("cpu-0", 0.5)


class Forks:
    """Keeps the standbys' ends of the sockets, and says that they were forked: at once, or when `born` is set."""

    def __init__(self) -> None:
        self.asked: list[Prepare] = []
        self.doors: dict[int, socket.socket] = {}
        self.adopted: list[tuple[int, int]] = []
        self.on_forked = lambda _: None
        self.born: asyncio.Future[int] | None = None

    async def fork(self, worker: Prepare, fds: Sequence[int]) -> int:
        self.asked.append(worker)
        self.doors[worker.worker] = socket.fromfd(fds[0], socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.on_forked(worker.worker)
        return await self.born if self.born else 1_000_000_000 + worker.worker

    def adopt(self, standby: int, worker: int) -> bool:
        self.adopted.append((standby, worker))
        return True


class Groups:
    def __init__(self) -> None:
        self.made: list[tuple[str, str, float]] = []
        self.spare: Sequence[int] = ()
        self.fails = False

    def group(self, name: str, device: str = "", cores: float = 0.0) -> Group | None:
        if self.fails:
            raise OSError("no space left on device")
        self.made.append((name, device, cores))
        return None

    def remove(self, group: Group | None) -> None: ...

    def stand_by(self, _: object, pids: Sequence[int]) -> None:
        self.spare = pids


class Rig:
    def __init__(self, size: int) -> None:
        self.forks, self.groups, self.loads, self.number = Forks(), Groups(), False, 100
        self.pool = Standbys(self.forks, self.groups, size, self._next, lambda: self.loads, Walls())

    def _next(self) -> int:
        self.number += 1
        return self.number

    async def ready(self, count: int) -> None:
        await eventually(lambda: len(self.pool.pids) == count)

    def answer(self, number: int, said: bytes = TAKEN) -> Spawn:
        door = self.forks.doors[number]
        data, fds, _, _ = socket.recv_fds(door, 1 << 20, 16)
        door.send(said)
        for fd in fds:
            socket.close(fd)
        return msgspec.msgpack.decode(data, type=Spawn)


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(module, "_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "_FAILED_S", 0.02)
    rig = Rig(2)
    yield rig
    rig.pool.close()
    for each in rig.forks.doors.values():
        each.close()


async def test_each_home_has_as_many_as_were_asked_for_and_is_refilled(rig: Rig) -> None:
    rig.pool.begin([ANYWHERE, CORES, ANYWHERE])
    await rig.ready(4)

    assert sorted(home[1:] for home in rig.groups.made) == [("", 0.0)] * 2 + [("cpu-0", 0.5)] * 2
    assert rig.groups.spare == rig.pool.pids
    found = await rig.pool.take(7, CORES)
    assert found is not None
    assert found.home == CORES
    becomes = asyncio.ensure_future(rig.pool.become(found, Spawn(7, START, Confine(cpus=(0,))), [1, 2]))
    await asyncio.sleep(0)
    assert rig.answer(found.number).worker == 7
    assert await becomes
    assert rig.forks.adopted == [(found.number, 7)]
    await rig.ready(4)
    rig.pool._fill()
    assert len(rig.forks.asked) == 5
    assert rig.pool.status() == {"ready": 4, "memory": 0, "taken": 1, "missed": 0}


async def test_two_workers_never_get_the_same_one(rig: Rig) -> None:
    rig.pool.begin([ANYWHERE])
    await rig.ready(2)

    found = await asyncio.gather(*(rig.pool.take(worker, ANYWHERE) for worker in range(3)))

    assert found[2] is None
    assert len({each.number for each in found if each is not None}) == 2
    assert rig.pool.missed == 1


async def test_one_is_forked_for_a_worker_that_waits_for_memory(rig: Rig) -> None:
    rig.pool._small = True
    rig.pool.begin([ANYWHERE])
    await rig.ready(2)
    rig.loads = True
    for worker in (1, 2, 3):
        rig.pool.await_one(worker, ANYWHERE)
    await rig.ready(3)

    rig.pool.forget(3)
    assert await rig.pool.take(1, ANYWHERE)
    assert await rig.pool.take(2, ANYWHERE)
    assert len(rig.forks.asked) == 3, "nothing is forked beside a load"
    rig.loads = False
    await rig.ready(2)


async def test_a_start_waits_for_one_that_is_being_forked(rig: Rig) -> None:
    rig.forks.born = asyncio.get_running_loop().create_future()
    rig.pool.begin([ANYWHERE])
    await eventually(lambda: rig.forks.doors)
    taking = asyncio.ensure_future(rig.pool.take(1, ANYWHERE))
    gone = asyncio.ensure_future(rig.pool.take(2, CORES))
    assert await gone is None
    assert not taking.done()

    rig.forks.born.set_result(5)

    found = await taking
    assert found is not None
    assert found.pid.result() == 5


async def test_a_start_does_not_wait_for_one_that_cannot_be_forked(rig: Rig) -> None:
    rig.forks.born = asyncio.get_running_loop().create_future()
    rig.pool.begin([ANYWHERE])
    await eventually(lambda: rig.forks.doors)
    taking = asyncio.ensure_future(rig.pool.take(1, ANYWHERE))
    await asyncio.sleep(0)

    rig.pool.on_exited(101)

    assert await taking is None


async def test_standbys_that_end_by_themselves_are_replaced_ever_more_slowly(rig: Rig) -> None:
    loop = asyncio.get_running_loop()
    times: list[float] = []

    def dies(number: int) -> None:
        times.append(loop.time())
        loop.call_soon(rig.pool.on_exited, number)

    rig.forks.on_forked = dies
    rig.pool.begin([ANYWHERE])
    await eventually(lambda: len(times) >= 5)

    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps[3] > 4 * 0.02
    asked = len(rig.forks.asked)
    rig.pool.await_one(1, ANYWHERE)
    assert len(rig.forks.asked) == asked, "nor for a worker that waits"


async def test_no_control_group_is_no_loop(rig: Rig) -> None:
    rig.groups.fails = True
    rig.pool.begin([ANYWHERE])
    await eventually(lambda: rig.pool._failures > 1)
    assert rig.forks.asked == []

    rig.groups.fails = False

    await rig.ready(2)


@pytest.mark.parametrize("fault", ["closed", "silent", "says something else"])
async def test_one_that_does_not_become_the_worker_costs_a_fork(
    rig: Rig, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TAKEN_S", 0.05)
    rig.pool.begin([ANYWHERE])
    await rig.ready(2)
    found = await rig.pool.take(1, ANYWHERE)
    assert found is not None
    door = rig.forks.doors[found.number]
    if fault == "closed":
        door.close()
    elif fault == "says something else":
        door.send(b"what?")

    assert not await rig.pool.become(found, Spawn(1, START), [])

    assert found.door.fileno() == -1
    assert (rig.pool.taken, rig.pool.missed) == (0, 1)
    assert rig.forks.adopted == []


async def test_a_pool_of_none_is_never_asked_for_anything() -> None:
    rig = Rig(0)
    rig.pool.begin([ANYWHERE])
    rig.pool.await_one(1, ANYWHERE)

    assert await rig.pool.take(1, ANYWHERE) is None
    rig.pool._fill()
    assert rig.forks.asked == []
    assert rig.pool.status() == {"ready": 0, "memory": 0, "taken": 0, "missed": 0}
    rig.pool.close()
