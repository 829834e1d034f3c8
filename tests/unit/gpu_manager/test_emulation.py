"""The time of calls on an emulated device, by a clock that the test moves: workers are the other ends of sockets."""

import select
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.cost import Cost
from gpufaas_core.model import DeviceId, FunctionId, Need
from gpufaas_core.units import GiB
from gpufaas_functions.emulated import ASK
from gpufaas_gpu_manager import emulation
from gpufaas_gpu_manager.emulation import Emulation

COSTS = {
    "half": {"v100": Cost(GiB, 0.1, 0.4)},
    "loud": {"*": Cost(GiB, 0.1, 0.4, beside={"half": 1.5})},
    "greedy": {"v100": Cost(GiB, 0.1, 0.4, uses=100)},
    "grows": {"v100": Cost(GiB, 0.1, 0.4, uses=((1, 50), (2, 100)), batch=((2, 0.4),), power=2.0)},
    "late": {"v100": Cost(GiB, 0.1, 0.4, start_s=0.1)},
}


SPATIAL = Need(50, "spatial")


class Rig:
    """An emulated device, and the event loop and the clock of its process."""

    def __init__(self) -> None:
        self.now = 0.0
        self.device = Emulation(DeviceId("n/emulated:0"), "v100", COSTS, "costs.json")
        self.workers: dict[str, socket.socket] = {}
        self._readers: dict[socket.socket, Callable[[], None]] = {}
        self._timers: list[SimpleNamespace] = []
        self.add_reader, self.remove_reader = self._readers.__setitem__, self._readers.__delitem__

    def call_at(self, when: float, callback: Callable[..., None], *given: float) -> SimpleNamespace:
        timer = SimpleNamespace(when=when, callback=lambda: callback(*given))
        timer.cancel = lambda: self._timers.remove(timer) if timer in self._timers else None
        self._timers.append(timer)
        return timer

    def begin(self, name: str, need: Need = SPATIAL, calls: int = 1, share: int = 0) -> None:
        """A worker of that function, loaded with that share, begins so many calls together."""
        function = FunctionId(f"{name}.ns@1")
        spec = WorkerSpec(function, name, "ns", name, "model", need)
        self.workers[name] = self.device.clock(spec, 0, share or need.held)
        self.workers[name].send(ASK.pack(self.now, calls))
        self.look()

    def look(self) -> None:
        """Have the device see what its workers did."""
        for each in select.select(list(self._readers), [], [], 0)[0]:
            self._readers[each]()

    def ends(self) -> dict[str, float]:
        """Let time pass until no call runs; return when each has ended."""
        found = {}
        while self._timers:
            timer = min(self._timers, key=lambda each: each.when)
            self._timers.remove(timer)
            self.now = timer.when
            timer.callback()
            for each in select.select(list(self.workers.values()), [], [], 0)[0]:
                if each.recv(1):
                    found[next(name for name, sock in self.workers.items() if sock is each)] = self.now
        return found


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig()
    monkeypatch.setattr(emulation, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(emulation, "asyncio", SimpleNamespace(get_running_loop=lambda: made))
    yield made
    for each in made.workers.values():
        each.close()
    made.look()


def test_a_call_takes_the_time_of_the_profile(rig: Rig) -> None:
    rig.begin("half")
    assert rig.ends() == pytest.approx({"half": 0.4})


def test_a_neighbour_disturbs_for_as_long_as_it_runs(rig: Rig) -> None:
    rig.begin("half")
    rig.begin("loud")
    assert rig.ends() == pytest.approx({"half": 0.4, "loud": 0.4 + (0.4 - 0.4 / 1.5)})


def test_calls_that_use_more_than_there_is_share_it(rig: Rig) -> None:
    """150 % of a device: each at two thirds of its speed."""
    rig.begin("half")
    rig.begin("greedy")
    assert rig.ends() == pytest.approx({"half": 0.6, "greedy": 0.6})


def test_a_share_caps_a_copy_and_may_be_changed_while_a_call_runs(rig: Rig) -> None:
    rig.begin("greedy", Need(50, "share"))
    rig.now = 0.4  # half of it
    rig.device.limit(FunctionId("greedy.ns@1"), 0, 100)
    assert rig.ends() == pytest.approx({"greedy": 0.4 + 0.2})


def test_a_copy_whose_share_is_taken_back_is_not_capped_at_what_it_was_loaded_with(rig: Rig) -> None:
    auto = Need(100, "auto")
    rig.begin("greedy", auto, share=50)
    assert rig.ends() == pytest.approx({"greedy": 0.8})
    rig.device.limit(FunctionId("greedy.ns@1"), 0, 0)
    rig.begin("greedy", auto, share=50)
    assert rig.ends() == pytest.approx({"greedy": 0.8 + 0.4})


def test_a_share_that_is_not_changed_makes_a_call_as_much_longer(rig: Rig) -> None:
    rig.begin("greedy", Need(50, "share"))
    assert rig.ends() == pytest.approx({"greedy": 0.8})


def test_a_worker_that_has_ended_slows_nobody_any_more(rig: Rig) -> None:
    rig.begin("half")
    rig.begin("greedy")
    rig.now = 0.3  # two thirds of the speed: 0.2 of 0.4 are done
    rig.workers.pop("greedy").close()
    rig.look()
    assert rig.ends() == pytest.approx({"half": 0.3 + 0.2})


def test_what_a_batch_uses_slows_its_neighbours_and_a_power_itself(rig: Rig) -> None:
    """150 % of a device: the neighbour at two thirds of its speed, and the batch at four ninths."""
    rig.begin("half")
    rig.begin("grows", calls=2)
    assert rig.ends() == pytest.approx({"half": 0.6, "grows": 0.6 + 0.4 - 0.6 * 4 / 9})


def test_a_call_that_takes_time_to_begin_uses_nothing_until_then(rig: Rig) -> None:
    rig.begin("late")
    rig.begin("greedy")
    # From 0.1 on they use 150 %; the first is done at 0.1 + 0.3 * 1.5
    assert rig.ends() == pytest.approx({"greedy": 0.55, "late": 0.65})


def test_a_worker_that_ends_before_its_call_began_leaves_nothing(rig: Rig) -> None:
    rig.begin("late")
    rig.workers.pop("late").close()
    rig.look()
    rig.begin("greedy")
    assert rig.ends() == pytest.approx({"greedy": 0.4})
