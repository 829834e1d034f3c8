"""The GPU manager on real processes: what a node does with grants, memory and workers that misbehave."""

import asyncio
import gc
import os
import signal
import textwrap
import weakref
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import msgspec
import psutil
import pytest
from msgspec.structs import replace
from tests.integration.conftest import lives, stopped
from tests.waiting import LIMIT_S, eventually, until

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_core import messages
from gpufaas_core.bundle import Manifest, WorkerSpec
from gpufaas_core.errors import (
    FetchFailed,
    GpufaasError,
    GrantRefused,
    InvalidSpec,
    LoadFailed,
    OutOfMemory,
    Preempted,
    WorkerCrashed,
)
from gpufaas_core.logs import Printed
from gpufaas_core.messages import (
    Abort,
    CopyFailed,
    CopySilent,
    DeviceLeft,
    Event,
    Finished,
    Grant,
    Loaded,
    Measured,
    NodeRefused,
    Resized,
    StartCall,
    WorkerExited,
)
from gpufaas_core.model import CallId, DeviceId, FunctionId, Need, NodeId, Part, copy_id
from gpufaas_core.units import MiB
from gpufaas_core.wire.heads import CallHead
from gpufaas_gpu_manager import load_watch, measured_memory, proc
from gpufaas_gpu_manager import worker as worker_module
from gpufaas_gpu_manager.call_watch import LOOK_S
from gpufaas_gpu_manager.devices import CpuDevice, open_devices
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.node import Node
from gpufaas_gpu_manager.proc import Progress
from gpufaas_gpu_manager.settings import NodeSettings

DEVICE = DeviceId("n/cpu:0")
BIG = """
    def load(device):
        return bytearray(60 * 1024 * 1024)

    def handle(model, event, context):
        return {"size": len(model), "body": event.text}
"""


class Bundles:
    """Bundles straight from source text: what is under test is the node."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._kinds: dict[str, str] = {}

    def write(self, name: str, source: str, kind: str) -> None:
        (self._root / name / "function").mkdir(parents=True)
        (self._root / name / "function" / "handler.py").write_text(textwrap.dedent(source))
        self._kinds[name] = kind

    def install(self, digest: str) -> Path:
        return self._root / digest

    def compiled(self, digest: str) -> Path:
        return self._root / "compiled" / digest

    def manifest(self, digest: str) -> Manifest:
        return Manifest(kind=self._kinds[digest], template="test")  # type: ignore[arg-type]


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def extend(self, function: str, instance: str, printed: Iterable[Printed]) -> None:  # noqa: ARG002 - the port's
        self.lines.extend(each.text for each in printed)


class Rig:
    """A node with one CPU device of 200 MiB, and a hand that grants grants."""

    def __init__(
        self,
        root: Path,
        memory: str = "200MiB",
        untaken_s: float = LIMIT_S,
        shares_by: str = "none",
        abort_grace_s: float = LIMIT_S,
    ) -> None:
        self.bundles = Bundles(root)
        self.logs = Lines()
        self.facts: list[Event] = []
        self.node = Node(
            open_devices([f"cpu:0={memory}"], NodeId("n"), shares_by=shares_by), self.bundles, self.logs,
            self.facts.append,
            settings=NodeSettings(abort_grace_s=abort_grace_s, untaken_s=untaken_s), host_cache=HostCache(HostTier(0)),
        )  # fmt: skip
        self.number = 0

    async def function(
        self, name: str, source: str, kind: str = "model", slots: int = 1, stall_s: float = 60.0
    ) -> FunctionId:
        self.bundles.write(name, source, kind)
        function = FunctionId(f"{name}.ns@1")
        need = Need(100 if kind == "model" else 0, slots=slots)
        await self.node.functions.define(
            WorkerSpec(function, name, "ns", name, kind, need, stall_s=stall_s)  # type: ignore[arg-type]
        )
        return function

    def grant(
        self,
        function: FunctionId,
        *,
        cold: bool = False,
        memory: int = 120 * MiB,
        victims: tuple[str, ...] = (),
        copy: int = 0,
    ) -> Grant:
        self.number += 1
        return Grant(
            1,
            self.number,
            (CallId(f"c{self.number}"),),
            function,
            function.partition(".")[0],
            (Part(DEVICE, memory),),
            cold,
            victims,
            copy=copy,
        )

    async def call(self, grant: Grant, body: bytes = b"") -> tuple[int, bytes]:
        exchange = self.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), body)
        async with asyncio.timeout(LIMIT_S):
            head, first, whole = await exchange.answer()
            pieces = [first]
            while not whole and (piece := await exchange.chunk()) is not None:
                pieces.append(piece)
        return head.status, b"".join(pieces)

    def facts_of(self, kind: type) -> list[Event]:
        return [each for each in self.facts if isinstance(each, kind)]


@pytest.fixture
async def rig(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    if "own_fork_server" not in request.fixturenames:
        request.getfixturevalue("warm_fork_servers")
    rig = Rig(tmp_path, abort_grace_s=0.5 if "short_grace" in request.fixturenames else LIMIT_S)
    await rig.node.start()
    yield rig
    await rig.node.close()


@pytest.fixture
def short_grace() -> None:
    """What runs on for nobody is soon killed: the test is about it. All others let it end in peace."""


@pytest.fixture
def own_fork_server() -> None:
    """The fork server of this test's `rig` is started as in production: the test is about it."""


async def test_a_miss_loads_and_a_hit_finds_the_worker(rig: Rig) -> None:
    function = await rig.function("big", BIG)

    first = await rig.call(rig.grant(function, cold=True), b"one")
    pid = rig.node.workers()[0].pid
    second = await rig.call(rig.grant(function), b"two")

    assert first == (200, b'{"size":62914560,"body":"one"}')
    assert second == (200, b'{"size":62914560,"body":"two"}')
    assert [worker.pid for worker in rig.node.workers()] == [pid]
    loaded = rig.facts_of(Loaded)[0]
    assert isinstance(loaded, Loaded)
    assert 60 * MiB <= loaded.occupation <= 80 * MiB


@pytest.mark.usefixtures("warm_fork_servers")
async def test_what_a_worker_held_is_free_once_it_has_ended(tmp_path: Path) -> None:
    """Not only once a gateway, whose call has long come, would have been too late with it."""
    rig = Rig(tmp_path, untaken_s=10 * LIMIT_S)
    await rig.node.start()
    function = await rig.function("big", BIG)
    await rig.call(rig.grant(function, cold=True), b"one")
    left = weakref.ref(rig.node.workers()[0])
    rig.node.evict(function, DEVICE)

    def is_free() -> bool:
        gc.collect()
        return left() is None

    await eventually(is_free)
    await rig.node.close()


SLOWLY = """
    import asyncio, os, time
    from gpufaas_functions.memory import CpuMemory

    grown = CpuMemory.grown

    def slowly(self):
        if not self._called:
            %s
        return grown(self)

    CpuMemory.grown = slowly

    def load(device):
        return bytearray(60 * 1024 * 1024)

    %s
"""
ANSWERS = {
    "whole": "def handle(model, event, context): return 'done'",
    "large": "def handle(model, event, context): return 'done' * 100_000",
    "streamed": """def handle(model, event, context):
        yield 'do'
        yield 'ne'""",
    "async": "async def handle(model, event, context): return 'done'",
    "async streamed": """async def handle(model, event, context):
        yield 'done'""",
    "batch": "def handle_batch(model, events, contexts): return ['done'] * len(events)",
}


def waits_for(gate: Path) -> str:
    return f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)"


@pytest.mark.parametrize("kind", ANSWERS)
async def test_the_answer_does_not_wait_until_memory_is_measured(rig: Rig, kind: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    function = await rig.function("big", SLOWLY % (waits_for(gate), ANSWERS[kind]))

    answer = await rig.call(rig.grant(function, cold=True))

    assert answer[0] == 200
    assert answer[1].startswith(b"done")
    assert rig.facts_of(Measured) == []
    gate.touch()
    await eventually(lambda: bool(rig.facts_of(Measured)))
    (measured,) = rig.facts_of(Measured)
    assert isinstance(measured, Measured)
    assert 60 * MiB <= measured.occupation <= 80 * MiB
    assert not measured.out_of_memory
    order = [type(each) for each in rig.facts]
    assert order.index(Finished) < order.index(Measured)
    assert (await rig.call(rig.grant(function)))[0] == 200  # on the same slot, once it has measured
    assert len(rig.facts_of(Finished)) == 2


async def test_a_victim_says_first_what_it_needed_if_nobody_knows(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Called in turn, each is evicted right after its answer: no call would ever have been measured."""
    monkeypatch.setattr(measured_memory, "_KNOWN_S", LIMIT_S)
    gate = tmp_path / "gate"
    function = await rig.function("one", SLOWLY % (waits_for(gate), ANSWERS["whole"]))
    for known in (False, True):
        await rig.call(rig.grant(function, cold=True))
        ends = rig.node.workers()[0]
        assert len(rig.facts_of(Measured)) == known  # as the first one has said it

        rig.node.evict(function, DEVICE)
        gate.touch()
        await eventually(lambda ends=ends: ends not in rig.node.workers())

        (measured,) = rig.facts_of(Measured)
        assert isinstance(measured, Measured)
        assert 60 * MiB <= measured.occupation <= 80 * MiB
        rig.facts.clear()


async def test_a_worker_measures_itself_only_beyond_what_others_had(rig: Rig) -> None:
    """To look at every page of a large worker takes as long as a call; the first one of a function has done it."""
    function = await rig.function(
        "grows",
        """
        from gpufaas_functions.memory import CpuMemory

        peak, looks = CpuMemory.peak, []

        def looking(self):
            looks.append(1)
            return peak(self)

        CpuMemory.peak = looking

        def load(device):
            return []

        def handle(model, event, context):
            model.append(bytearray(int(event.body) << 20))
            return str(len(looks))
        """,
    )
    looks = []
    for call, size in enumerate((b"40", b"10", b"20", b"60", b"1", b"0")):
        if cold := call in (0, 1):
            rig.node.evict(function, DEVICE)
            await eventually(lambda: not rig.node.workers())
        looks.append((await rig.call(rig.grant(function, cold=cold, memory=180 * MiB), size))[1])
        await eventually(lambda: bool(rig.facts_of(Measured)))

    # What a call has measured comes before the answer of the next one.
    assert looks == [b"0", b"0", b"0", b"0", b"1", b"1"], (
        "10 and 20 MiB are below the 40 of the first worker, 90 are not"
    )
    sizes = [each.occupation // MiB for each in rig.facts_of(Measured) if isinstance(each, Measured)]
    assert len(sizes) == 3
    assert 40 <= sizes[0] == sizes[1] <= 60
    assert 90 <= sizes[2] <= 110


async def test_a_victim_that_never_says_what_it_needed_ends_all_the_same(rig: Rig) -> None:
    function = await rig.function("one", SLOWLY % ("time.sleep(60)", ANSWERS["whole"]))
    await rig.call(rig.grant(function, cold=True))
    ends = rig.node.workers()[0]

    rig.node.evict(function, DEVICE)

    await eventually(lambda: ends not in rig.node.workers())
    assert rig.facts_of(Measured) == []


async def test_what_a_device_adds_for_a_share_is_in_the_workers_environment(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU with MPS: the share of the part that the copy was loaded with, else what its function says."""
    says = "import os\ndef load(device): pass\ndef handle(model, event, context): return os.environ['SHARE']"
    function = await rig.function("says", says)
    spec = replace(rig.node.functions.specs[function], need=Need(30, "share"))
    rig.node.functions.expect(spec)
    monkeypatch.setattr(
        CpuDevice,
        "share_env",
        lambda _, need, share, memory: {"SHARE": f"{need.sharing} {share} {memory}"},
        raising=True,
    )

    first = await rig.call(rig.grant(function, cold=True, memory=48 * MiB))
    grant = rig.grant(function, cold=True, memory=48 * MiB, copy=1)
    second = await rig.call(replace(grant, parts=(Part(DEVICE, 48 * MiB, 40),)))

    assert first == (200, f"share 30 {48 * MiB}".encode())
    assert second == (200, f"share 40 {48 * MiB}".encode())


async def test_a_victim_is_gone_before_its_memory_is_promised_again(rig: Rig) -> None:
    """Two functions of 0.6 device each, called in turn: at no moment are both alive."""
    functions = [await rig.function(name, BIG) for name in ("one", "two")]
    await rig.call(rig.grant(functions[0], cold=True))
    most = 0

    for turn in range(1, 5):
        before = rig.node.workers()[0].pid
        assert before is not None
        mine, other = functions[turn % 2], functions[(turn + 1) % 2]
        answer = asyncio.ensure_future(rig.call(rig.grant(mine, cold=True, victims=(copy_id(other, 0),))))
        while not answer.done():
            alive = [each for each in rig.node.workers() if each.pid and psutil.pid_exists(each.pid)]
            most = max(most, len(alive))
            assert rig.node.reserved(DEVICE) <= 200 * MiB
            await asyncio.sleep(0)
        assert answer.result()[0] == 200
        assert not psutil.pid_exists(before)

    assert most == 1


async def test_what_a_worker_uses_is_not_taken_from_it_and_what_it_gives_is_said(rig: Rig, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    function = await rig.function(
        "holder",
        f"""
        import os, time, torch
        def load(device):
            return None
        def handle(model, event, context):
            held = torch.ones(80 * 1024 * 1024 // 4)
            print("held", flush=True)
            {waits_for(gate)}
            return str(len(held))
        """,
    )
    answer = asyncio.ensure_future(rig.call(rig.grant(function, cold=True, memory=180 * MiB)))
    await eventually(lambda: "held" in rig.logs.lines)

    rig.node.resize(function, DEVICE, 40 * MiB)

    (given,) = rig.facts_of(Resized)
    assert isinstance(given, Resized)
    assert 80 * MiB < given.memory < 130 * MiB
    assert rig.node.reserved(DEVICE) == given.memory
    gate.touch()
    assert (await answer)[0] == 200
    rig.node.resize(function, DEVICE, 180 * MiB)
    assert rig.node.reserved(DEVICE) == 180 * MiB
    assert len(rig.facts_of(Resized)) == 1


async def test_the_first_call_of_one_that_declares_nothing_begins_when_its_room_is_known(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler is another process: a call that began at once ran out of memory on an empty device."""
    takes = """
        def load(device):
            return None
        def handle(model, event, context):
            return str(len(bytearray(100 << 20)))
        """
    function = await rig.function("takes", takes)
    spec = rig.node.functions.specs[function]
    rig.node.functions.expect(msgspec.structs.replace(spec, elastic=True))

    with monkeypatch.context() as patch:
        patch.setattr(worker_module, "_TOLD_WITHIN_S", LIMIT_S)
        answer = asyncio.ensure_future(rig.call(rig.grant(function, cold=True, memory=48 * MiB)))
        await eventually(lambda: rig.facts_of(Loaded))
    rig.node.resize(function, DEVICE, 180 * MiB)
    assert (await answer)[0] == 200
    rig.node.evict(function, DEVICE)
    assert (await rig.call(rig.grant(function, cold=True, memory=180 * MiB)))[0] == 200, "nobody leads who could say it"


async def test_what_a_worker_was_to_get_and_has_not_got_yet_is_given_back_too(rig: Rig) -> None:
    """Its room is still held by one that ends. The engine asks once, and waits for the answer."""
    echo = await rig.function("echo", "def handle(event, context):\n    return 'x'", "http")
    other = await rig.function("other", "def handle(event, context):\n    return 'y'", "http")
    await rig.call(rig.grant(echo, cold=True, memory=48 * MiB))
    await rig.call(rig.grant(other, cold=True, memory=100 * MiB))

    rig.node.resize(echo, DEVICE, 180 * MiB)
    rig.node.resize(echo, DEVICE, 48 * MiB)

    (given,) = rig.facts_of(Resized)
    assert given == Resized(echo, DEVICE, 48 * MiB, 0, 48 * MiB)
    rig.node.evict(other, DEVICE)
    await eventually(lambda: len(rig.node.workers()) == 1)
    assert rig.node.reserved(DEVICE) == 48 * MiB


async def test_copies_of_a_function_are_told_apart_by_their_numbers(rig: Rig) -> None:
    """What is said of one, by the engine or by the node, is about no other."""
    tells = "import os\ndef handle(event, context):\n    return str(os.getpid())"
    function = await rig.function("tells", tells, "http")
    pids = [
        (await rig.call(rig.grant(function, cold=True, memory=48 * MiB, copy=copy)))[1].decode() for copy in range(3)
    ]
    assert len(set(pids)) == 3
    assert rig.node.reserved(DEVICE) == 3 * 48 * MiB
    loaded = [each.copy for each in rig.facts if isinstance(each, Loaded)]

    rig.node.resize(function, DEVICE, 40 * MiB, 1)
    os.kill(int(pids[2]), signal.SIGKILL)
    await eventually(lambda: rig.facts_of(WorkerExited))
    rig.node.evict(function, DEVICE, 0)
    await eventually(lambda: len(rig.node.workers()) == 1)

    assert loaded == [0, 1, 2]
    assert [each.copy for each in rig.facts if isinstance(each, WorkerExited)] == [2]
    assert rig.node.reserved(DEVICE) == 40 * MiB
    assert (await rig.call(rig.grant(function, copy=1)))[1].decode() == pids[1]
    other = await rig.function("other", tells, "http")
    await rig.call(rig.grant(other, cold=True, memory=190 * MiB, victims=(copy_id(function, 1),)))
    assert not psutil.pid_exists(int(pids[1]))


async def test_a_load_beyond_its_reservation_fails_cleanly_and_says_that_it_was_memory(rig: Rig) -> None:
    function = await rig.function("greedy", BIG.replace("60 *", "600 *"))

    with pytest.raises(GrantRefused, match="MemoryError"):  # the scheduler knows whether there is more
        await rig.call(rig.grant(function, cold=True))

    await eventually(lambda: rig.facts_of(CopyFailed))
    fact = rig.facts_of(CopyFailed)[0]
    assert isinstance(fact, CopyFailed)
    assert fact.out_of_memory
    assert rig.node.reserved(DEVICE) == 0


@pytest.mark.parametrize("how", ["def", "async def"])
async def test_a_handler_that_takes_too_much_is_told_so_and_its_worker_and_the_neighbour_live(
    rig: Rig, how: str
) -> None:
    greedy = await rig.function(
        "greedy",
        """
        import torch
        def load(device):
            return torch.ones(1000)
        def handle(model, event, context):
            if event.body:
                return {"sum": float(torch.ones(int(event.text)).sum())}
            return "small"
        """.replace("def handle", f"{how} handle"),
    )
    neighbour = await rig.function("neighbour", BIG.replace("60 *", "20 *"))
    assert (await rig.call(rig.grant(neighbour, cold=True, memory=60 * MiB)))[0] == 200
    assert await rig.call(rig.grant(greedy, cold=True)) == (200, b"small")

    with pytest.raises(OutOfMemory, match=r"ran out of memory .*it may use \d+ MiB on n/cpu:0, .* gpufaas\.memory"):
        await rig.call(rig.grant(greedy), str(400 * MiB // 4).encode())

    assert await rig.call(rig.grant(greedy)) == (200, b"small")
    assert (await rig.call(rig.grant(neighbour)))[0] == 200
    assert rig.facts_of(Measured)


async def test_kill_9_of_a_worker_in_mid_call_gives_502_with_its_last_words(rig: Rig) -> None:
    function = await rig.function(
        "slow",
        """
        import sys, time
        def load(device):
            return None
        def handle(model, event, context):
            print("about to sleep", file=sys.stderr, flush=True)
            time.sleep(60)
        """,
    )
    answer = asyncio.ensure_future(rig.call(rig.grant(function, cold=True)))
    await eventually(lambda: "about to sleep" in rig.logs.lines)
    pid = rig.node.workers()[0].pid
    assert pid is not None

    os.kill(pid, signal.SIGKILL)

    with pytest.raises(WorkerCrashed, match=r"SIGKILL[\s\S]*about to sleep"):
        await answer
    assert rig.facts_of(WorkerExited)
    assert rig.node.reserved(DEVICE) == 0


async def test_a_load_that_hangs_is_killed_for_lack_of_progress_and_a_slow_one_is_not(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def progress_of(pid: int) -> Progress:
        """What a busy machine gives a process, it may give late."""
        until(lambda: gate.exists() or proc.progress_of(pid) != seen[-1])
        seen.append(proc.progress_of(pid))
        return seen[-1]

    gate, seen = tmp_path / "gate", [()]
    hanging = "import time\ndef load(device): time.sleep(600)\ndef handle(m, e, c): pass"
    hangs = await rig.function("hangs", hanging, stall_s=0.4)
    slow = await rig.function(
        "slow",
        f"""
        import os
        def load(device):
            while not os.path.exists({str(gate)!r}):
                sum(range(10000))
        def handle(model, event, context):
            return "here"
        """,
        stall_s=0.4,
    )

    with pytest.raises(LoadFailed, match="no progress"):
        await rig.call(rig.grant(hangs, cold=True))

    monkeypatch.setattr(load_watch, "progress_of", progress_of)
    answer = asyncio.ensure_future(rig.call(rig.grant(slow, cold=True)))
    await eventually(lambda: len(seen) > 2 * load_watch.LOOKS)
    gate.touch()
    assert await answer == (200, b"here")


async def test_a_handler_that_raises_answers_500_with_its_own_words_and_its_worker_lives(rig: Rig) -> None:
    function = await rig.function(
        "raises", "def load(device): return 1\ndef handle(model, event, context): raise ValueError('no such breed')"
    )

    first = await rig.call(rig.grant(function, cold=True))
    pid = rig.node.workers()[0].pid
    second = await rig.call(rig.grant(function))

    assert first == second == (500, b"ValueError: no such breed")
    assert rig.node.workers()[0].pid == pid
    await eventually(lambda: any("Traceback" in line for line in rig.logs.lines))


async def test_an_answer_that_never_ends_stops_when_its_caller_is_gone(rig: Rig) -> None:
    function = await rig.function("endless", ENDLESS)
    grant = rig.grant(function, cold=True)
    exchange = rig.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), b"x")
    await exchange.answer()
    await exchange.chunk()

    rig.node.grants.abort(grant.call, DEVICE)

    await eventually(lambda: rig.facts_of(Finished))
    assert rig.facts_of(Finished) == [Finished(grant.call, DEVICE, rig.facts_of(Finished)[0].service_s, ok=False)]  # type: ignore[union-attr]
    assert await rig.call(rig.grant(function)) == (200, b"short")


ENDLESS = """
    import itertools
    def load(device): return 1
    def handle(model, event, context):
        return (f"{n}\\n" for n in itertools.count()) if event.body else "short"
"""

# --- grants of several calls ---

MEET = """
    import pathlib, time
    def handle(event, context):
        mine, other = event.body.decode().split()
        pathlib.Path(mine).write_text("here")
        while not pathlib.Path(other).exists():
            time.sleep(0.01)
        return mine
"""


@pytest.mark.parametrize("by_command", [True, False])
async def test_the_calls_of_one_grant_load_one_copy_and_run_on_it_at_once(
    rig: Rig, tmp_path: Path, by_command: bool
) -> None:
    function = await rig.function("meet", MEET, kind="http", slots=2)
    grant = rig.grant(function, cold=True)
    grant = replace(grant, calls=(CallId("a"), CallId("b")))
    mine, other = str(tmp_path / "a"), str(tmp_path / "b")
    if by_command:
        rig.node.execute(StartCall(grant))

    answers = await asyncio.gather(
        rig.call(grant.of(CallId("b")), f"{other} {mine}".encode()), rig.call(grant, f"{mine} {other}".encode())
    )

    assert answers == [(200, other.encode()), (200, mine.encode())]
    assert len(rig.node.workers()) == len(rig.facts_of(Loaded)) == 1
    ended = [fact.call for fact in rig.facts_of(Finished) if isinstance(fact, Finished) and fact.ok]
    assert sorted(ended) == ["a", "b"]
    assert rig.node.snapshot().devices[0].running == ()


async def test_a_call_of_a_grant_is_aborted_alone(rig: Rig, tmp_path: Path) -> None:
    function = await rig.function("meet", MEET, kind="http", slots=2)
    grant = replace(rig.grant(function, cold=True), calls=(CallId("a"), CallId("b")))
    rig.node.execute(StartCall(grant))

    rig.node.execute(Abort(CallId("b"), DEVICE))

    assert rig.facts_of(Finished) == [Finished(CallId("b"), DEVICE, 0.0, ok=False)]
    with pytest.raises(GrantRefused):
        await rig.call(grant.of(CallId("b")))
    assert [each.call for each in rig.facts_of(NodeRefused)] == ["b"]  # type: ignore[union-attr]
    here = str(tmp_path / "a").encode()
    assert await rig.call(grant, here + b" " + here) == (200, here)


async def test_what_loads_for_several_calls_and_fails_is_not_loaded_by_each_of_them(rig: Rig) -> None:
    function = await rig.function("broken", "def load(d): raise ValueError('no such file')\ndef handle(m, e, c): pass")
    grant = replace(rig.grant(function, cold=True), calls=(CallId("a"), CallId("b")))
    rig.node.execute(StartCall(grant))
    await eventually(lambda: rig.facts_of(CopyFailed))

    for call in grant.calls:
        with pytest.raises(LoadFailed, match="no such file"):
            await rig.call(grant.of(call))

    assert len(rig.facts_of(CopyFailed)) == 1
    assert rig.facts_of(NodeRefused) == []


async def test_each_call_of_a_grant_that_the_node_refuses_is_reported(rig: Rig) -> None:
    grant = replace(rig.grant(FunctionId("nobody.ns@1"), cold=True), calls=(CallId("a"), CallId("b")))

    rig.node.execute(StartCall(grant))

    assert [each.call for each in rig.facts_of(NodeRefused)] == ["a", "b"]  # type: ignore[union-attr]


@pytest.mark.usefixtures("warm_fork_servers")
async def test_a_call_of_a_grant_that_does_not_come_expires_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, untaken_s=0.2)
    await rig.node.start()
    here = str(tmp_path / "here").encode()
    function = await rig.function("meet", MEET, kind="http", slots=2)
    await rig.call(rig.grant(function, cold=True), here + b" " + here)
    grant = replace(rig.grant(function), calls=(CallId("a"), CallId("b")))

    assert (await rig.call(grant, here + b" " + here))[0] == 200
    await eventually(lambda: rig.node.snapshot().devices[0].running == ())

    ends = {each.call: each for each in rig.facts if isinstance(each, Finished)}
    assert ends["a"].ok
    assert ends["b"] == Finished(CallId("b"), DEVICE, 0.0, ok=False)
    await rig.node.close()


# --- calls that the policy stops ---

WAITS = """
    import pathlib, time
    def load(device): return None
    def handle(model, event, context):
        pathlib.Path(event.body.decode()).touch()
        time.sleep(600)
"""
WHY = "the policy stopped the call"


def stop(grant: Grant, *, requeue: bool = True) -> Abort:
    return Abort(grant.call, DEVICE, requeue, WHY, grant.number)


async def running(rig: Rig, function: FunctionId, began: Path) -> tuple[Grant, asyncio.Task[tuple[int, bytes]]]:
    """Begin a call, and return when its handler runs."""
    grant = rig.grant(function, cold=True)
    call = asyncio.create_task(rig.call(grant, str(began).encode()))
    await eventually(began.exists)
    return grant, call


@pytest.mark.usefixtures("short_grace")
async def test_a_stopped_call_is_refused_once_its_worker_has_let_go_of_it(rig: Rig, tmp_path: Path) -> None:
    grant, call = await running(rig, await rig.function("waits", WAITS), tmp_path / "began")

    rig.node.execute(stop(grant))
    rig.node.execute(stop(grant))
    assert rig.facts_of(NodeRefused) == []

    with pytest.raises(GrantRefused, match="could not give"):
        await call
    told = [fact for fact in rig.facts if isinstance(fact, WorkerExited | NodeRefused | Finished)]
    assert [type(fact) for fact in told] == [WorkerExited, NodeRefused]  # it did not end by itself in time
    assert [fact.call for fact in told if isinstance(fact, NodeRefused)] == [grant.call]


async def test_a_stopped_call_whose_caller_goes_does_not_run_again(rig: Rig, tmp_path: Path) -> None:
    function = await rig.function("meet", MEET, kind="http", slots=2)
    first, second = tmp_path / "first", tmp_path / "second"
    grant = rig.grant(function, cold=True)
    call = asyncio.create_task(rig.call(grant, f"{first} {second}".encode()))
    await eventually(first.exists)

    rig.node.execute(stop(grant))
    rig.node.execute(Abort(grant.call, DEVICE))
    second.touch()

    await eventually(lambda: rig.facts_of(Finished))
    assert rig.facts_of(NodeRefused) == []
    assert [fact.ok for fact in rig.facts if isinstance(fact, Finished)] == [False]
    call.cancel()


async def test_a_stopped_call_that_no_slot_has_is_refused_at_once(rig: Rig) -> None:
    function = await rig.function("loads", "def load(device): pass\ndef handle(m, e, c): return 'ok'")
    grant = rig.grant(function, cold=True)
    exchange = rig.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), b"")

    rig.node.execute(stop(grant))

    assert rig.facts == [NodeRefused.of(grant, WHY, blameless=True)]
    with pytest.raises(GrantRefused):
        await exchange.answer()
    again = replace(rig.grant(function), calls=grant.calls)
    assert await rig.call(again) == (200, b"ok")
    assert len(rig.facts_of(Loaded)) == 1


@pytest.mark.parametrize("opened", [True, False])
async def test_a_call_that_was_stopped_before_it_came_is_refused_when_it_comes(rig: Rig, opened: bool) -> None:
    function = await rig.function("echo", "def handle(event, context): return event.body", kind="http", slots=2)
    await rig.call(rig.grant(function, cold=True))
    grant = rig.grant(function)
    if opened:
        rig.node.grants.open(grant)

    rig.node.execute(stop(grant))
    rig.node.execute(stop(replace(grant, number=grant.number - 1)))  # of an older grant: it says nothing of this one

    with pytest.raises(GrantRefused):
        await rig.call(grant)
    assert rig.facts_of(NodeRefused)[0].call == grant.call  # type: ignore[union-attr]
    assert len(rig.facts_of(NodeRefused)) == 1
    assert await rig.call(replace(rig.grant(function), calls=grant.calls), b"again") == (200, b"again")


@pytest.mark.parametrize("requeue", [True, False])
async def test_a_stopped_call_that_has_answered_in_part_ends_with_an_error(rig: Rig, requeue: bool) -> None:
    function = await rig.function("endless", ENDLESS)
    grant = rig.grant(function, cold=True)
    exchange = rig.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), b"x")
    await exchange.answer()

    rig.node.execute(stop(grant, requeue=requeue))

    async def read_on() -> None:
        while await exchange.chunk() is not None:
            pass

    with pytest.raises(Preempted, match="the policy stopped the call: call again"):
        await read_on()
    await eventually(lambda: rig.facts_of(Finished))
    assert [fact.ok for fact in rig.facts if isinstance(fact, Finished)] == [False]
    assert rig.facts_of(NodeRefused) == []


async def test_aborting_a_grant_whose_call_never_came_frees_it(rig: Rig) -> None:
    """The caller hung up between the grant of the grant and its arrival at the node: the engine waits for Finished."""
    rig.node.grants.abort(CallId("never"), DEVICE)

    assert rig.facts == [Finished(CallId("never"), DEVICE, 0.0, ok=False)]


async def test_a_call_that_comes_after_it_was_aborted_takes_nothing(rig: Rig) -> None:
    """The engine knows that the call is over: it would not know a worker that its grant starts now."""
    function = await rig.function("late", BIG)
    grant = rig.grant(function, cold=True)
    rig.node.grants.abort(grant.call, DEVICE)

    with pytest.raises(GrantRefused):
        await rig.call(grant)

    assert rig.node.workers() == []
    assert [each.call for each in rig.facts_of(NodeRefused)] == [grant.call]  # type: ignore[union-attr]


async def test_what_the_scheduler_doubts_is_over_if_it_is_not_there_and_goes_on_if_it_is(rig: Rig) -> None:
    function = await rig.function("there", BIG)
    grant = rig.grant(function, cold=True)
    rig.node.grants.open(grant)

    rig.node.grants.settle(grant.call, DEVICE)
    rig.node.grants.settle(CallId("lost"), DEVICE)

    assert rig.facts_of(Finished) == [Finished(CallId("lost"), DEVICE, 0.0, ok=False)]
    assert (await rig.call(grant))[0] == 200


async def test_a_worker_that_dies_while_the_body_of_a_call_comes_has_taken_nothing_of_it(rig: Rig) -> None:
    function = await rig.function("big", BIG)
    await rig.call(rig.grant(function, cold=True))
    grant = rig.grant(function)
    assert rig.node.grants.open_for_body(grant)
    assert [each.call for each in rig.node.snapshot().devices[0].running] == [grant.call]
    pid = rig.node.workers()[0].pid
    assert pid is not None

    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: rig.facts_of(WorkerExited))

    with pytest.raises(GrantRefused):
        await rig.call(grant)
    assert [each.call for each in rig.facts_of(NodeRefused)] == [grant.call]  # type: ignore[union-attr]


@pytest.mark.usefixtures("warm_fork_servers")
async def test_a_grant_whose_call_does_not_come_expires_and_its_worker_stays(tmp_path: Path) -> None:
    rig = Rig(tmp_path, untaken_s=0.2)
    await rig.node.start()
    try:
        function = await rig.function("big", BIG)
        grant = rig.grant(function, cold=True)
        rig.node.grants.open(grant)

        await eventually(lambda: rig.facts_of(Finished))

        assert rig.facts_of(Finished) == [Finished(grant.call, DEVICE, 0.0, ok=False)]
        await eventually(lambda: rig.facts_of(Loaded))
        assert (await rig.call(rig.grant(function)))[0] == 200
    finally:
        await rig.node.close()


async def test_a_newer_grant_of_a_call_whose_first_load_failed_loads_again(rig: Rig, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    source = f"""
        import os, pathlib
        def load(device):
            if not pathlib.Path({str(flag)!r}).exists():
                os._exit(3)
        def handle(model, event, context):
            return "ok"
    """
    function = await rig.function("second", source)
    first = rig.grant(function, cold=True)
    rig.node.grants.open(first)
    await eventually(lambda: rig.facts_of(CopyFailed))
    flag.touch()

    again = replace(rig.grant(function, cold=True), calls=first.calls)

    assert await rig.call(again) == (200, b"ok")


async def test_a_slow_reader_does_not_hold_the_device(rig: Rig) -> None:
    """The worker of a model function is done before its 4 MB were read."""
    function = await rig.function(
        "wordy", "def load(device): return 1\ndef handle(m, e, c): return (b'x' * 65536 for _ in range(64))"
    )
    grant = rig.grant(function, cold=True)
    exchange = rig.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), b"")
    await exchange.answer()

    await eventually(lambda: rig.facts_of(Finished))

    size = 0
    while (piece := await exchange.chunk()) is not None:
        size += len(piece)
    assert size == 64 * 65536


@pytest.mark.usefixtures("short_grace")
async def test_a_call_that_runs_on_for_nobody_is_killed_after_its_grace(rig: Rig, tmp_path: Path) -> None:
    grant, call = await running(rig, await rig.function("waits", WAITS), tmp_path / "began")

    rig.node.grants.abort(grant.call, DEVICE)

    await eventually(lambda: rig.facts_of(WorkerExited))
    assert rig.node.workers() == []
    call.cancel()


BLOCKS = """
    import asyncio, os, time
    def load(device): return {"begun": []}
    async def handle(model, event, context):
        model["begun"].append(context.call_id)
        match event.text:
            case "wait":
                await asyncio.sleep(60)
            case "block":
                while len(model["begun"]) < 2:
                    await asyncio.sleep(0.01)
                print("it blocks", flush=True)
                time.sleep(60)
            case "endless":
                while True:
                    try:
                        await asyncio.sleep(60)
                    except asyncio.CancelledError:
                        print("it goes on", flush=True)
        return str(os.getpid())
"""


HOLDS_GIL = """
    import ctypes, os, time

    def load(device):
        return []

    def handle(model, event, context):
        model.append(context.call_id)
        if event.text == "wait":
            time.sleep(60)
        elif event.text == "block":
            while len(model) < 2:
                time.sleep(0.01)
            # One call of C says so and holds the GIL: between two of them, another thread could read the next call.
            ctypes.PyDLL(None).system(b"echo it blocks; exec sleep 60")
        return str(os.getpid())
"""


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("source", [BLOCKS, HOLDS_GIL], ids=["loop", "gil"])
async def test_a_worker_that_stands_still_is_ended_and_calls_that_it_had_not_begun_are_placed_again(
    rig: Rig, source: str
) -> None:
    function = await rig.function("blocks", source, slots=4)
    grants = [rig.grant(function, cold=True), *(rig.grant(function) for _ in range(3))]
    bodies = (b"wait", b"block", b"one", b"two")
    begun = [
        rig.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), body)
        for grant, body in zip(grants[:2], bodies, strict=False)
    ]
    await eventually(lambda: "it blocks" in rig.logs.lines)
    unread = [
        rig.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), body)
        for grant, body in zip(grants[2:], bodies[2:], strict=True)
    ]

    rig.node.grants.abort(grants[1].call, DEVICE)  # the caller of the call that blocks

    with pytest.raises(WorkerCrashed, match=r"it stood still for 0\.5 s, while a call ran that nobody w"):
        await begun[0].answer()
    for each in unread:
        with pytest.raises(GrantRefused):
            await each.answer()
    assert {each.call for each in rig.facts_of(NodeRefused)} == {each.call for each in grants[2:]}
    assert len(rig.facts_of(WorkerExited)) == 1
    assert rig.node.workers() == []


@pytest.mark.usefixtures("short_grace")
async def test_a_stopped_worker_gives_back_its_calls_and_is_ended_if_it_stays_stopped(rig: Rig) -> None:
    """Else the only device of a function would be lost to it: its calls are with nobody whose time could be over."""
    function = await rig.function("waits", HOLDS_GIL, slots=4)
    await rig.call(rig.grant(function, cold=True))
    (worker,) = rig.node.workers()
    assert worker.pid is not None
    with stopped(worker.pid):
        with pytest.raises(GrantRefused, match="no sign of life"):
            await rig.call(rig.grant(function))
        await eventually(lambda: rig.facts_of(WorkerExited))

    assert rig.facts_of(CopySilent) == [CopySilent(function, DEVICE)]
    assert "gave no sign of life" in str(rig.facts_of(WorkerExited))


async def test_a_call_that_goes_on_for_nobody_on_a_loop_that_lives_costs_nothing(rig: Rig) -> None:
    function = await rig.function("blocks", BLOCKS, slots=4)
    endless, waits = rig.grant(function, cold=True), rig.grant(function)
    for grant, body in ((endless, b"endless"), (waits, b"wait")):
        rig.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), body)
    first = await rig.call(rig.grant(function))

    rig.node.grants.abort(endless.call, DEVICE)
    await eventually(lambda: "it goes on" in rig.logs.lines)
    (worker,) = rig.node.workers()
    watch = worker.calls.watch
    for _ in range(int(2 * LIMIT_S / LOOK_S)):  # twice the grace
        await eventually(lambda: not worker.calls.back.pinged)
        watch._look()

    assert await rig.call(rig.grant(function)) == first, "in the same process"
    rig.node.grants.abort(waits.call, DEVICE)
    watch._look()
    await eventually(lambda: rig.facts_of(WorkerExited))  # from now on nobody waits for any of its calls


async def test_a_crash_shows_no_lines_of_other_callers_calls(rig: Rig) -> None:
    function = await rig.function(
        "dies",
        """
        import os, threading
        both = threading.Barrier(2)
        def handle(event, context):
            print("printed for", event.text)
            os.write(1, b"written for " + event.body + b"\\n")
            if event.text != "first":
                both.wait(60)
                if event.text == "third":
                    os._exit(3)
                threading.Event().wait(60)
        """,
        kind="http",
        slots=2,
    )
    await rig.call(rig.grant(function, cold=True), b"first")
    exchanges = {}
    for body in (b"second", b"third"):
        grant = rig.grant(function)
        exchanges[body] = rig.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), body)

    for body, exchange in exchanges.items():
        with pytest.raises(WorkerCrashed) as crashed:
            await exchange.answer()
        text = str(crashed.value)
        assert "it ended with exit status 3" in text
        assert text.splitlines()[2:] == [f"printed for {body.decode()}"]


async def test_a_crash_of_the_only_call_shows_what_was_written_without_a_mark(rig: Rig) -> None:
    source = "import os\ndef handle(event, context):\n    os.write(2, b'written')\n    os._exit(3)"
    function = await rig.function("dies", source, kind="http", slots=2)

    with pytest.raises(WorkerCrashed, match=r"(?s)exit status 3.*\nwritten$"):
        await rig.call(rig.grant(function, cold=True))


async def test_cpu_functions_run_as_many_calls_at_once_as_they_have_slots(rig: Rig) -> None:
    function = await rig.function(
        "meet",
        """
        import threading
        barrier = threading.Barrier(4, timeout=60)
        def handle(event, context):
            barrier.wait()
            return event.text
        """,
        kind="http",
        slots=4,
    )
    first = rig.grant(function, cold=True)

    answers = await asyncio.gather(*(rig.call(first if n == 0 else rig.grant(function), b"%d" % n) for n in range(4)))

    assert answers == [(200, b"%d" % n) for n in range(4)]


@pytest.mark.parametrize("how", ["threads", "loop"])
async def test_of_a_worker_that_is_killed_the_calls_that_it_had_not_begun_are_placed_again(
    rig: Rig, tmp_path: Path, how: str
) -> None:
    wait = "await asyncio.sleep(60)" if how == "loop" else "time.sleep(60)"
    source = f"""
        import asyncio, pathlib, time
        {"async " if how == "loop" else ""}def handle(event, context):
            if event.body:
                with open(event.text, "a") as file:
                    file.write("x")
                {wait}
        """
    function = await rig.function("waits", source, kind="http", slots=6)
    await rig.call(rig.grant(function, cold=True))
    ran = tmp_path / "ran"

    def begin(count: int) -> list[Exchange]:
        grants = [rig.grant(function) for _ in range(count)]
        body = str(ran).encode()
        return [rig.node.grants.call(each, CallHead(each.call, "POST", "/", b"", []), body) for each in grants]

    begun = begin(2)
    await eventually(lambda: ran.exists() and len(ran.read_text()) == 2)
    (worker,) = rig.node.workers()
    os.kill(worker.pid, signal.SIGSTOP)  # type: ignore[arg-type]
    threads = [Path(f"/proc/{worker.pid}/task/{each}/stat") for each in os.listdir(f"/proc/{worker.pid}/task")]
    await eventually(lambda: all(each.read_text().rpartition(") ")[2][0] == "T" for each in threads))
    waiting = begin(3)
    await asyncio.sleep(0)  # they are sent
    os.kill(worker.pid, signal.SIGKILL)  # type: ignore[arg-type]

    for each in begun:
        with pytest.raises(WorkerCrashed):
            await each.answer()
    for each in waiting:
        with pytest.raises(GrantRefused):
            await each.answer()
    assert {each.call for each in rig.facts_of(NodeRefused)} == {each.grant.call for each in waiting}
    assert ran.read_text() == "xx"


async def test_a_worker_costs_its_node_two_sockets_and_two_pipes_whatever_its_slots_are(rig: Rig) -> None:
    before = set(os.listdir("/proc/self/fd"))
    function = await rig.function("many", "def handle(event, context): return event.body", kind="http", slots=100)

    assert await rig.call(rig.grant(function, cold=True), b"x") == (200, b"x")

    opened = [Path(f"/proc/self/fd/{each}") for each in set(os.listdir("/proc/self/fd")) - before]
    kinds = sorted(os.readlink(each).partition(":")[0] for each in opened if each.is_symlink())
    assert kinds == ["pipe", "pipe", "socket", "socket"], "calls go over one socket, open files over the other"


async def test_a_body_streams_down_while_the_answer_streams_up(rig: Rig) -> None:
    function = await rig.function(
        "upper", "def handle(event, context): return (piece.upper() for piece in event.stream())", kind="http", slots=2
    )
    grant = rig.grant(function, cold=True)
    exchange = rig.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", [], body_mode=1), b"")

    async with asyncio.timeout(LIMIT_S):
        await exchange.send_body(b"abc")
        head, _, _ = await exchange.answer()
        first = await exchange.chunk()
        await exchange.send_body(b"def")
        second = await exchange.chunk()
        await exchange.end_body()
        third = await exchange.chunk()

    assert (head.status, first, second, third) == (200, b"ABC", b"DEF", None)


async def test_a_grant_that_cannot_be_opened_is_refused_and_nothing_is_taken(rig: Rig) -> None:
    function = await rig.function("absent", BIG)
    grant = rig.grant(function)

    with pytest.raises(GrantRefused):
        rig.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), b"")

    assert isinstance(rig.facts[0], NodeRefused)


async def test_whichever_of_command_and_call_comes_first_opens_the_grant(rig: Rig) -> None:
    function = await rig.function("big", BIG)
    grant = rig.grant(function, cold=True)

    rig.node.grants.open(grant)
    rig.node.grants.open(grant)
    answer = await rig.call(grant)

    assert answer[0] == 200
    assert len(rig.facts_of(Loaded)) == 1


async def test_a_check_says_the_last_line_of_the_traceback_and_the_log_has_it_all(rig: Rig) -> None:
    await rig.function("broken", "import nothing_of_that_name\ndef handle(event, context): pass", kind="http")
    spec = WorkerSpec(FunctionId("broken.ns@1"), "broken", "ns", "broken", "http")

    with pytest.raises(InvalidSpec, match="ModuleNotFoundError: No module named 'nothing_of_that_name'"):
        await rig.node.functions.check(spec)

    await eventually(lambda: any("Traceback" in line for line in rig.logs.lines))
    await eventually(lambda: rig.node.workers() == [])


async def test_a_check_misses_load(rig: Rig) -> None:
    await rig.function("half", "def handle(model, event, context): pass")

    with pytest.raises(InvalidSpec, match=r"no function load\(\)"):
        await rig.node.functions.check(WorkerSpec(FunctionId("half.ns@1"), "half", "ns", "half", "model", Need()))


@pytest.mark.usefixtures("own_fork_server")
async def test_when_the_fork_server_dies_its_workers_die_and_the_next_load_works(rig: Rig) -> None:
    function = await rig.function("big", BIG)
    await rig.call(rig.grant(function, cold=True))
    worker, fork_server = psutil.Process(rig.node.workers()[0].pid), rig.node.host.fork_server.pid
    assert fork_server is not None

    os.kill(fork_server, signal.SIGKILL)

    await eventually(lambda: rig.facts_of(WorkerExited))
    await eventually(lambda: not lives(worker))
    assert (await rig.call(rig.grant(function, cold=True)))[0] == 200


@pytest.mark.usefixtures("own_fork_server")
async def test_the_fork_server_is_single_threaded_and_has_torch(rig: Rig) -> None:
    assert rig.node.fault.startswith("the fork server starts: ")

    hello = await rig.node.host.fork_server.ready()

    assert rig.node.fault == "", "now functions can be loaded"
    assert hello.threads == 1
    assert hello.missing == []


@pytest.mark.usefixtures("own_fork_server")
async def test_closing_the_node_leaves_no_process(rig: Rig) -> None:
    function = await rig.function("big", BIG)
    await rig.call(rig.grant(function, cold=True))
    processes = [psutil.Process(pid) for pid in (rig.node.workers()[0].pid, rig.node.host.fork_server.pid)]

    await rig.node.close()

    await eventually(lambda: not any(map(lives, processes)))


async def test_a_crash_before_the_call_comes_is_told_to_the_call_and_does_not_load_again(rig: Rig) -> None:
    function = await rig.function("dies", "import os\ndef load(device): os._exit(3)\ndef handle(m, e, c): pass")
    grant = rig.grant(function, cold=True)
    rig.node.grants.open(grant)
    await eventually(lambda: rig.facts_of(CopyFailed))

    with pytest.raises(GpufaasError, match="exit status 3"):
        await rig.call(grant)

    assert len(rig.facts_of(CopyFailed)) == 1


async def test_a_snapshot_says_what_is_in_memory_and_what_runs(rig: Rig, tmp_path: Path) -> None:
    """Least recently used first, whatever was loaded first; of a call whether its worker has it."""
    waits = f"""
        import os
        def handle(event, context):
            with open({str(tmp_path / "began")!r}, "w") as file:
                file.write("x")
            os.open({str(tmp_path / "go")!r}, os.O_RDONLY)
            return "over"
    """
    os.mkfifo(tmp_path / "go")
    first = await rig.function("first", "def handle(event, context): return 'x'", "http")
    second = await rig.function("second", "def handle(event, context): return 'x'", "http")
    third = await rig.function("third", waits, "http")
    for function in (second, first, second):
        cold = function not in {each.spec.function for each in rig.node.workers()}
        await rig.call(rig.grant(function, cold=cold, memory=48 * MiB))
    grant = rig.grant(third, cold=True, memory=50 * MiB)
    answer = asyncio.ensure_future(rig.call(grant))
    await asyncio.sleep(0)
    (loading,) = rig.node.snapshot().devices
    await eventually((tmp_path / "began").exists)
    (device,) = rig.node.snapshot().devices
    go = os.open(tmp_path / "go", os.O_WRONLY)
    await answer
    os.close(go)
    (after,) = rig.node.snapshot().devices

    assert [(each.function, each.loading) for each in loading.residents] == [
        (first, False), (second, False), (third, True),
    ]  # fmt: skip
    assert [(each.call, each.begun, each.cold) for each in loading.running] == [(grant.call, False, True)]
    assert [(each.function, each.loading) for each in device.residents] == [
        (first, False), (second, False), (third, False),
    ]  # fmt: skip
    assert [each.memory for each in device.residents] == [48 * MiB, 48 * MiB, 50 * MiB]
    assert [each.digest for each in device.residents] == ["first", "second", "third"]
    assert device.residents[0].idle_s > device.residents[1].idle_s > 0.0
    assert [(each.call, each.function, each.begun) for each in device.running] == [(grant.call, third, True)]
    assert after.running == ()


async def test_what_an_older_scheduler_granted_is_refused_once_a_newer_one_has_spoken(rig: Rig) -> None:
    function = await rig.function("f", "def handle(event, context): return 'x'", "http")
    await rig.call(rig.grant(function, cold=True))

    rig.node.obey(7)
    rig.node.obey(3)

    assert rig.node.snapshot().epoch == 7
    with pytest.raises(GrantRefused):
        await rig.call(rig.grant(function))
    assert [each.call for each in rig.facts if isinstance(each, NodeRefused)] == [CallId("c2")]


# --- what is not here is fetched ---


class Fetch:
    """Brings nothing, but takes until it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.given_up = 0
        self.result: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __call__(self, spec: WorkerSpec) -> str:
        self.asked.append(spec.name)
        try:
            return await asyncio.shield(self.result)
        except asyncio.CancelledError:
            self.given_up += 1
            raise


async def expected(rig: Rig, name: str, source: str = BIG, stall_s: float = LIMIT_S) -> FunctionId:
    """A function that the node knows, but was never asked to define."""
    rig.bundles.write(name, source, "model")
    function = FunctionId(f"{name}.ns@1")
    rig.node.functions.expect(WorkerSpec(function, name, "ns", name, "model", Need(), stall_s=stall_s))
    return function


async def test_a_load_fetches_first_and_says_how_long_that_took(rig: Rig) -> None:
    """Longer than a load may stall: who fetches watches its own progress."""
    rig.node.host.fetch = fetch = Fetch()
    function = await expected(rig, "big", stall_s=0.02)

    grant = rig.grant(function, cold=True)
    exchange = rig.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), b"hello")
    await eventually(lambda: fetch.asked == ["big"])
    await asyncio.sleep(0.2)
    (worker,) = rig.node.workers()
    worker.spec = replace(worker.spec, stall_s=LIMIT_S)  # of the load that follows
    fetch.result.set_result("peer")
    async with asyncio.timeout(LIMIT_S):
        head, _, _ = await exchange.answer()

    assert head.status == 200
    phases = dict(exchange.phases)
    assert list(phases) == ["room", "fetch", "process", "read", "init"]
    assert phases["fetch"] >= 0.2
    assert phases["process"] >= 0
    assert exchange.tier == "peer"
    assert [each.tier for each in rig.facts if isinstance(each, Loaded)] == ["peer"]


async def test_what_a_policy_has_fetched_ahead_is_fetched_once_and_its_failure_is_left_to_the_load(rig: Rig) -> None:
    rig.node.host.fetch = fetch = Fetch()
    function = await expected(rig, "echo", "def load(device): pass\ndef handle(m, event, c): return event.body")
    ahead = messages.FetchBundle(function, NodeId("n"))

    for command in (ahead, ahead, messages.FetchBundle(FunctionId("nobody.ns@1"), NodeId("n"))):
        rig.node.execute(command)
    await eventually(lambda: fetch.asked == ["echo"])
    fetch.result.set_exception(FetchFailed("nobody has it"))
    await eventually(lambda: not rig.node.functions._fetches)

    assert rig.facts == []
    fetch.result = asyncio.get_running_loop().create_future()
    fetch.result.set_result("")
    assert await rig.call(rig.grant(function, cold=True), b"here") == (200, b"here")
    assert fetch.asked == ["echo", "echo"]


async def test_what_is_fetched_ahead_is_given_up_when_the_node_stops(rig: Rig) -> None:
    rig.node.host.fetch = fetch = Fetch()
    rig.node.execute(messages.FetchBundle(await expected(rig, "echo"), NodeId("n")))
    await eventually(lambda: fetch.asked == ["echo"])

    await rig.node.close()

    await eventually(lambda: fetch.given_up == 1)


async def test_a_fetch_that_fails_fails_the_load_with_its_reason(rig: Rig) -> None:
    rig.node.host.fetch = fetch = Fetch()
    function = await expected(rig, "big")
    fetch.result.set_exception(FetchFailed("artifact abc could not be fetched: http://b: Connection refused"))

    with pytest.raises(LoadFailed, match=r"big\.ns did not load on n/cpu:0: artifact abc could not be fetched"):
        await rig.call(rig.grant(function, cold=True))

    assert len(rig.facts_of(CopyFailed)) == 1
    assert rig.node.reserved(DEVICE) == 0
    assert rig.node.workers() == []


async def test_a_worker_evicted_while_it_fetches_gives_up_and_its_memory_is_free(rig: Rig) -> None:
    rig.node.host.fetch = fetch = Fetch()
    first, second = await expected(rig, "first"), await expected(rig, "second")
    grant = rig.grant(first, cold=True)
    rig.node.grants.open(grant)
    await eventually(lambda: fetch.asked)
    rig.node.grants.abort(grant.call, DEVICE)

    grant = rig.grant(second, cold=True, victims=(copy_id(first, 0),))
    exchange = rig.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), b"")
    await eventually(lambda: "second" in fetch.asked)
    assert fetch.given_up == 1
    fetch.result.set_result("")
    async with asyncio.timeout(LIMIT_S):
        head, _, _ = await exchange.answer()

    assert head.status == 200
    assert not rig.facts_of(CopyFailed)
    assert rig.node.reserved(DEVICE) == grant.memory


async def test_a_node_that_closes_gives_up_what_it_fetches(rig: Rig) -> None:
    rig.node.host.fetch = fetch = Fetch()
    rig.node.grants.open(rig.grant(await expected(rig, "big"), cold=True))
    await eventually(lambda: fetch.asked)

    await rig.node.close()
    await eventually(lambda: fetch.given_up)
    fetch.result.cancel()


async def test_defining_and_checking_fetch_too(rig: Rig) -> None:
    rig.node.host.fetch = fetch = Fetch()
    fetch.result.set_result("")

    await rig.function("big", BIG)

    assert fetch.asked == ["big"]


async def test_a_device_that_falls_off_the_bus_is_given_up_with_what_ran_there(rig: Rig, tmp_path: Path) -> None:
    waits = f"""
        import os
        def handle(event, context):
            open({str(tmp_path / "began")!r}, "w").close()
            os.open({str(tmp_path / "go")!r}, os.O_RDONLY)
    """
    os.mkfifo(tmp_path / "go")
    function = await rig.function("f", waits, "http")
    answer = asyncio.ensure_future(rig.call(rig.grant(function, cold=True)))
    await eventually((tmp_path / "began").exists)

    def fault() -> str:
        looks.append(len(rig.node.devices()))
        return "".join(faults)

    faults: list[str] = []
    lost: list[str] = []
    looks: list[int] = []
    (source,) = (each.source for each in rig.node._devices.values())
    source.fault = fault  # type: ignore[method-assign]
    watch = asyncio.ensure_future(rig.node.watch_devices(lost.append, 0.01))

    await eventually(lambda: looks[:3] == [1, 1, 1])
    faults.append("NVML says GPU is lost")
    with pytest.raises(WorkerCrashed, match="GPU is lost"):
        await answer
    await eventually(lambda: lost)
    watch.cancel()

    assert rig.node.devices() == []
    assert [each.device for each in rig.facts_of(DeviceLeft)] == [DEVICE]
    assert lost == [f"device {DEVICE} is gone: NVML says GPU is lost; restart the node when it is back"]
    with pytest.raises(GrantRefused):
        await rig.call(rig.grant(function, cold=True))
