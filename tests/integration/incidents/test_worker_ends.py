"""
A worker was killed when it was evicted: what its author had left for its end (`atexit`, finalizers, a generator with a
``finally``) never happened, so that what was to be written was lost.
"""

import asyncio
from collections.abc import Callable

import msgspec
from tests.integration.conftest import HTTP, Platform
from tests.integration.test_layers import LayerRig
from tests.waiting import LIMIT_S, eventually, until

from gpufaas_core.model import FunctionId, Need, copy_id
from gpufaas_core.units import MiB

LEAVES = """
    import atexit, os, sys, threading, time, weakref
    from concurrent.futures import ThreadPoolExecutor

    print("begins")

    def note(what):
        print("ends:", what, flush=True)

    class Held:
        def __init__(self, what):
            self.what = what
        def __del__(self):
            note(self.what)

    def opened():
        try:
            yield
        finally:
            note("generator")

    held, generator = Held("__del__"), opened()
    next(generator)
    weakref.finalize(note, note, "finalizer")
    atexit.register(note, "atexit")
    threading._register_atexit(note, "threads")
    ThreadPoolExecutor(1).submit(time.sleep, 0)
    threading.Thread(target=time.sleep, args=(600,)).start()

    def load(device):
        return Held("model")

    %s
"""
ENDS = ["threads", "atexit", "finalizer", "model", "generator", "__del__"]
ANSWERS = "def handle(model, event, context): return 'done'"
"""In a thread, of one slot or of several."""
AWAITS = """async def handle(model, event, context):
        import asyncio
        async def ticks():
            try:
                await asyncio.sleep(600)
            finally:
                note("task")
        globals()["task"] = asyncio.create_task(ticks())
        await asyncio.sleep(0)
        return 'done'"""
HANGS = """
    import atexit, time

    atexit.register(time.sleep, 600)

    def load(device):
        return bytearray(%d)

    def handle(model, event, context):
        return "done"
"""
NEVER_CANCELLED = """
    import asyncio

    def load(device):
        return None

    async def handle(model, event, context):
        async def goes_on():
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    pass
        globals()["task"] = asyncio.create_task(goes_on())
        await asyncio.sleep(0)
        return "done"
"""
FORKS = """
    import atexit, os

    atexit.register(print, "ends: of", os.getpid())

    class Piece:
        def __del__(self):
            print("ends: a piece of the model")

    def load(device):
        return [Piece()]

    def handle(model, event, context):
        if not os.fork():
            os.setsid()
            return "I am a fork"
        os.wait()
        return "done"
"""


def ends(rig: LayerRig) -> list[str]:
    return [each.partition("ends: ")[2] for each in rig.logs.lines if "ends: " in each]


async def first_call(rig: LayerRig, function: FunctionId, victims: tuple[str, ...] = (), memory: int = 0) -> None:
    grant = rig.grant(function, cold=True, victims=victims, memory=memory or 120 * MiB)
    assert (await rig.call(grant))[0] == 200


async def test_what_the_author_left_for_the_end_happens_once_when_a_worker_is_evicted(rig: LayerRig) -> None:
    own = {"PYTHONHASHSEED": "0"}
    kinds: list[tuple[str, str, int, dict[str, str]]] = [
        ("one", ANSWERS, 1, {}), ("several", ANSWERS, 2, {}), ("loop", AWAITS, 2, {}), ("own", ANSWERS, 1, own),
    ]  # fmt: skip
    for name, handle, slots, env in kinds:
        rig.logs.lines.clear()
        function = await rig.preloading(name, (), LEAVES % handle, env)
        specs = rig.node.functions.specs
        specs[function] = msgspec.structs.replace(specs[function], need=Need(100, slots=slots))
        expected = [*(["task"] if handle == AWAITS else []), *ENDS]
        await first_call(rig, function, memory=300 * MiB)

        await rig.end(function)

        await eventually(lambda expected=expected: len(ends(rig)) >= len(expected))
        assert ends(rig) == expected, name


async def test_one_that_is_only_checked_ends_so_too_and_a_fork_and_pieces_of_a_model_do_not(rig: LayerRig) -> None:
    function = await rig.function("forks", FORKS)
    await rig.check(function)
    await eventually(lambda: len(ends(rig)) == 1)

    await first_call(rig, function)
    (worker,) = (each for each in rig.node.workers() if not each.checks)
    await rig.end(function)

    await eventually(lambda: len(ends(rig)) == 2)
    assert ends(rig)[1] == f"of {worker.pid}"


async def test_the_memory_of_one_that_hangs_in_its_end_is_given_on_when_it_has_ended_and_soon(rig: LayerRig) -> None:
    hangs = await rig.function("hangs", HANGS % (200 * MiB))
    other = await rig.function("other", NEVER_CANCELLED)
    await first_call(rig, hangs, memory=300 * MiB)
    (worker,) = rig.node.workers()
    gone: list[bool] = []
    begin = rig.node.host.fork_server.fork

    async def fork(*arguments: object) -> int | None:
        gone.append(worker.reaped)
        return await begin(*arguments)  # type: ignore[arg-type]

    rig.node.host.fork_server.fork = fork  # type: ignore[method-assign]
    rig.node.host.standbys.close()  # from now on workers are forked

    async with asyncio.timeout(LIMIT_S):
        await first_call(rig, other, (copy_id(hangs, 0),), 300 * MiB)

    assert gone == [True]
    assert any("Timeout" in each for each in rig.logs.lines), "its log says where it was"
    rig.logs.lines.clear()
    await rig.end(other)
    await eventually(lambda: any("Timeout" in each for each in rig.logs.lines), "that of one with tasks, too")


def test_workers_end_so_when_the_platform_stops(make_platform: Callable[..., Platform]) -> None:
    platform = make_platform("--device", "cpu:0=400MiB")
    platform.start()
    path = platform.deploy("leaves", LEAVES % "def handle(event, context): return 'done'", HTTP)
    until(lambda: "ends: generator" in platform.log("leaves"), "its check has ended")
    assert platform.call(path).text == "done"

    assert platform.stop() == 0

    logged = (platform.data / "logs" / "leaves.openfaas-fn.jsonl").read_text()
    assert logged.count("ends: atexit") == 2
