"""Layers on real processes: what functions preload is imported once, and nothing that befalls a layer fails others."""

import os
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from tests.integration.test_node import DEVICE, Rig
from tests.waiting import eventually

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.messages import WorkerExited
from gpufaas_core.model import FunctionId, NodeId
from gpufaas_gpu_manager import layers
from gpufaas_gpu_manager.devices import open_devices
from gpufaas_gpu_manager.enforcement import Enforcement
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.node import Node
from gpufaas_gpu_manager.settings import NodeSettings

HANDLER = """
    import os, sys
    before = set(sys.modules)
    def load(device):
        return None
    def handle(model, event, context):
        import wave
        return {"pid": os.getpid(), "server": os.getppid(), "wave": "wave" in before, "from": wave.__file__}
"""
WAVE, XMLRPC = ("wave",), ("xmlrpc.client",)


class Said(list[str]):
    def __contains__(self, part: object) -> bool:
        return any(str(part) in each for each in self)


class LayerRig(Rig):
    """`Rig` with a pool of *size*, on a node that says things."""

    def __init__(self, root: Path, mode: Any, size: int) -> None:
        super().__init__(root)
        self.said = Said()
        self.node = Node(
            open_devices(["cpu:0=400MiB"], NodeId("n")), self.bundles, self.logs, self.facts.append, self.said.append,
            settings=NodeSettings(standby=size), enforcement=Enforcement(mode),
            host_cache=HostCache(HostTier(0)),
        )  # fmt: skip

    @property
    def layers(self) -> list[int]:
        return [each.worker.pid or 0 for each in self.node.host.layers.all()]

    async def preloading(
        self, name: str, preload: tuple[str, ...], source: str = HANDLER, env: Mapping[str, str] | None = None
    ) -> FunctionId:
        function = await self.function(name, source)
        self.node.functions.specs[function] = msgspec.structs.replace(
            self.node.functions.specs[function], preload=preload, env=dict(env or {})
        )
        return function

    async def check(self, function: FunctionId) -> None:
        await self.node.functions.check(self.node.functions.specs[function])

    async def first(self, function: FunctionId) -> dict[str, Any]:
        """Start a worker; return what it says."""
        status, body = await self.call(self.grant(function, cold=True))
        assert status == 200, body
        found: dict[str, Any] = msgspec.json.decode(body)
        return found

    async def end(self, function: FunctionId) -> None:
        self.node.evict(function, DEVICE)
        await eventually(lambda: all(each.checks or each.spec.function != function for each in self.node.workers()))


@pytest.fixture(params=[("auto", 1), ("watcher", 0)], ids=["standby", "watcher"])
async def rig(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    warm_fork_servers: object,  # noqa: ARG001
) -> AsyncIterator[LayerRig]:
    rig = LayerRig(tmp_path, *request.param)
    await rig.node.start()
    yield rig
    await rig.node.close()
    assert not any(map(psutil.pid_exists, rig.layers))


async def test_each_function_that_preloads_has_a_layer_of_its_own_and_others_have_none(rig: LayerRig) -> None:
    one, two = await rig.preloading("one", WAVE), await rig.preloading("two", WAVE)
    plain = await rig.preloading("plain", ())

    first, second, third = [await rig.first(each) for each in (one, two, plain)]
    await rig.end(one)
    again = await rig.first(one)

    assert first["wave"]
    assert second["wave"]
    assert not third["wave"]
    assert [first["server"], second["server"]] == rig.layers
    assert again["server"] == first["server"]
    assert third["server"] == rig.node.host.fork_server.pid
    assert rig.node.host.blank()["layers"] == 2
    assert 0 < rig.node.host.blank()["layerMemory"] < 16 << 20, "of a small module"
    watch = rig.node.enforcement.watch
    assert watch is None or set(rig.layers) <= watch.spare, "the memory watcher takes none for an orphan"
    assert rig.said == []


async def test_what_requirements_bring_is_preloaded_also_in_place_of_a_module_of_the_platform(
    rig: LayerRig, tmp_path: Path
) -> None:
    source = """
        import sys
        before = {"brought", "tqdm"} <= set(sys.modules)
        def load(device):
            return None
        def handle(model, event, context):
            import os, brought, tqdm
            return {"server": os.getppid(), "before": before, "ran": brought.ran, "tqdm": tqdm.__file__}
    """
    function = await rig.preloading("brings", ("brought", "tqdm"), source)
    site = tmp_path / "brings" / "site"
    site.mkdir()
    (site / "brought.py").write_text("import os; ran = os.getpid()")
    (site / "tqdm.py").touch()
    await rig.check(function)

    said = await rig.first(function)

    assert [said["server"]] == [said["ran"]] == rig.layers
    assert said["before"]
    assert said["tqdm"] == str(site / "tqdm.py")


async def test_what_cannot_be_imported_is_refused_at_deploy_and_a_start_goes_on_without_it(rig: LayerRig) -> None:
    function = await rig.preloading("wrong", ("wave", "no_such_module"))

    with pytest.raises(InvalidSpec, match=r"annotation gpufaas.preload of wrong: no_such_module: .*No module named"):
        await rig.check(function)

    said = await rig.first(function)
    assert said["server"] == rig.node.host.fork_server.pid
    assert "a worker of wrong.ns imports wave, no_such_module itself: no_such_module" in rig.said
    assert rig.layers == []


async def test_a_function_that_brings_a_module_along_gets_its_own(rig: LayerRig, tmp_path: Path) -> None:
    function = await rig.preloading("own", WAVE)
    (tmp_path / "own" / "function" / "wave.py").touch()

    with pytest.raises(InvalidSpec, match="the function has its own wave"):
        await rig.check(function)

    assert (await rig.first(function))["from"] == str(tmp_path / "own" / "function" / "wave.py")


async def test_the_layer_that_is_worth_least_makes_room_unless_it_has_workers(
    rig: LayerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "MOST", 1)
    one, two = await rig.preloading("one", WAVE), await rig.preloading("two", XMLRPC)
    first = await rig.first(one)
    (layer,) = rig.node.host.layers.all()
    assert layer.said is not None

    def takes(seconds: float) -> None:
        layer.said = msgspec.structs.replace(layer.said, seconds=seconds)

    takes(60.0)
    assert (await rig.first(two))["server"] == rig.node.host.fork_server.pid
    assert "this node has no room for it" in rig.said
    assert psutil.pid_exists(first["pid"])

    await rig.end(one)
    await rig.end(two)
    for known in rig.node.host.layers._known.values():
        known.until = 0.0  # it is tried again after a while
    takes(0.0)
    second = await rig.first(two)
    assert second["server"] == rig.layers[0]
    await eventually(lambda: not psutil.pid_exists(first["server"]))


async def test_the_layer_of_functions_that_are_deleted_ends_with_their_workers(rig: LayerRig) -> None:
    function = await rig.preloading("one", WAVE)
    first = await rig.first(function)

    await rig.node.functions.forget(function)
    assert psutil.pid_exists(first["pid"])
    await rig.end(function)

    await eventually(lambda: not psutil.pid_exists(first["server"]))
    await eventually(lambda: rig.layers == [] and not rig.node.workers())
    assert not any("broke off" in each for each in rig.logs.lines), "nothing happened that its author should look at"


@pytest.mark.parametrize("layer", [True, False])
async def test_a_layer_that_is_killed_or_whose_fork_server_is_has_a_successor(rig: LayerRig, layer: bool) -> None:
    function = await rig.preloading("one", WAVE)
    first = await rig.first(function)
    plain = await rig.first(await rig.preloading("plain", ()))

    os.kill(first["server"] if layer else plain["server"], signal.SIGKILL)
    gone = [first["pid"], first["server"], *(() if layer else (plain["pid"],))]
    await eventually(lambda: not any(map(psutil.pid_exists, gone)))
    await eventually(lambda: any(each.function == function for each in rig.facts_of(WorkerExited)))  # type: ignore[attr-defined]

    assert psutil.pid_exists(plain["pid"]) == layer
    second = await rig.first(function)
    assert second["wave"]
    assert second["server"] == rig.layers[0] != first["server"]


async def test_workers_of_a_layer_live_on_when_the_fork_server_is_stuck(rig: LayerRig) -> None:
    function = await rig.preloading("one", WAVE)
    first = await rig.first(function)
    stuck = rig.node.host.fork_server.pid
    assert stuck is not None

    os.kill(stuck, signal.SIGSTOP)
    await eventually(lambda: rig.node.host.fork_server.pid != stuck)
    other = await rig.first(await rig.preloading("two", WAVE))

    assert other["server"] != first["server"]
    status, body = await rig.call(rig.grant(function))
    assert (status, msgspec.json.decode(body)["pid"]) == (200, first["pid"])
    await rig.end(function)
    await eventually(lambda: not psutil.pid_exists(first["server"]) and not psutil.pid_exists(stuck))


async def test_modules_that_take_too_long_are_given_up(rig: LayerRig) -> None:
    rig.node.host.recipes.settings = replace(rig.node.host.recipes.settings, check_timeout_s=0.0)
    function = await rig.preloading("slow", WAVE)

    said = await rig.first(function)

    assert said["server"] == rig.node.host.fork_server.pid
    assert "they were not imported within 0 s" in rig.said
    assert rig.layers == []


async def test_threads_and_exits_of_modules_are_told_and_each_is_imported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fork server of its own, which finds our modules."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "counted.py").write_text(f"open({str(tmp_path / 'log')!r}, 'a').write('x')")
    (tmp_path / "path" / "large.py").write_text("held = bytearray(b'x') * (50 << 20)")
    (tmp_path / "path" / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    (tmp_path / "path" / "ends.py").write_text("raise SystemExit(3)")
    (tmp_path / "path" / "dies.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    rig = LayerRig(tmp_path, "rlimit", 0)
    await rig.node.start()
    try:
        one, two = await rig.preloading("one", ("counted",)), await rig.preloading("two", ("counted",))
        await rig.check(one)
        await rig.first(one)
        await rig.first(two)
        await rig.end(two)
        assert (tmp_path / "log").read_text() == "xx", "once for each function"
        await rig.first(await rig.preloading("large", ("large",)))
        assert 50 << 20 <= rig.node.host.blank()["layerMemory"] < 70 << 20, "its workers share that"
        for module, why in (
            ("threaded", "importing them starts threads"), ("ends", "ends: SystemExit: 3"),
            ("dies", "it ended with exit status 3"),
        ):  # fmt: skip
            wrong = await rig.preloading(module, (module,))
            with pytest.raises(InvalidSpec, match=why):
                await rig.check(wrong)
            assert (await rig.first(wrong))["server"] == rig.node.host.fork_server.pid
            await rig.end(wrong)
    finally:
        await rig.node.close()
