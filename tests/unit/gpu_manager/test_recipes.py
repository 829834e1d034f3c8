"""What a server is told of where it may listen."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufaas_core.bundle import Manifest, WorkerSpec
from gpufaas_core.model import FunctionId, Need
from gpufaas_gpu_manager.enforcement import Enforcement
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.isolation.levels import Own, Walls
from gpufaas_gpu_manager.launch.recipes import Recipes
from gpufaas_gpu_manager.settings import NodeSettings

NO_BUNDLES: Any = None
WORKER: Any = SimpleNamespace(number=7)


def recipes(sockets: Path | None) -> Recipes:
    return Recipes(NO_BUNDLES, NodeSettings(sockets=sockets), Enforcement(), 1, HostCache(None))


def test_a_server_has_a_socket_of_its_own_where_nothing_is(tmp_path: Path) -> None:
    sockets = tmp_path / "s"
    found = recipes(sockets).socket_of(WORKER)
    Path(found).write_text("of a worker of a process that was killed")

    assert found == recipes(sockets).socket_of(WORKER) == str(sockets / "7" / "s")
    assert list((sockets / "7").iterdir()) == []
    assert (sockets / "7").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("sockets", [None, Path("/dev/null/sockets"), Path("/") / ("long" * 30)])
def test_it_has_only_the_port_where_no_socket_can_be(sockets: Path | None) -> None:
    assert recipes(sockets).socket_of(WORKER) == ""


class Numbered:
    """Uids in the order in which they are asked for."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def of(self, name: str) -> int:
        if name not in self._names:
            self._names.append(name)
        return 1000 + self._names.index(name)


def own(recipes: Recipes, name: str, sharing: str, *, gpu: bool) -> Own:
    source = SimpleNamespace(
        nodes=["/dev/nvidia4"] if gpu else [], mps="/tmp/mps" if gpu and recipes.mps else "", enforced=not gpu
    )
    spec = WorkerSpec(FunctionId(f"{name}.ns@1"), name, "ns", "d", "model", Need(50, sharing))
    worker: Any = SimpleNamespace(spec=spec, device=SimpleNamespace(source=source), number=1, memory=1)
    return recipes._own(worker, Path("/bundle"), Manifest(kind="model", template="test"), "", ())


@pytest.mark.parametrize("mps", [True, False])
def test_functions_that_share_a_gpu_by_mps_have_one_uid_and_see_its_daemon_and_others_do_not(mps: bool) -> None:
    """A daemon serves one uid at a time. A function has one uid wherever it runs: its secrets are files of that."""
    uids: Any = Numbered()
    settings = NodeSettings(isolation=Walls(root="mount", uids=True), uids=uids)
    recipes = Recipes(NO_BUNDLES, settings, Enforcement(), 1, HostCache(None))
    recipes.mps = mps

    alone = own(recipes, "alone", "exclusive", gpu=True)
    sharers = [own(recipes, name, sharing, gpu=True) for name, sharing in (("a", "share"), ("b", "spatial"))]
    on_cpu = own(recipes, "a", "share", gpu=False)

    assert alone.devices == sharers[0].devices == ("/dev/nvidia4",)
    assert on_cpu.devices == ()
    assert alone.write == on_cpu.write == ()
    assert [each.write for each in sharers] == [("/tmp/mps",) if mps else ()] * 2
    assert len({each.uid for each in (alone, *sharers)}) == (2 if mps else 3)
    assert on_cpu.uid == sharers[0].uid
