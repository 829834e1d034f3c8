"""What a worker has of its own: where a server may listen, directories."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_core.bundle import Manifest, WorkerSpec
from gpufaas_core.model import FunctionId
from gpufaas_gpu_manager.enforcement import Enforcement
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.isolation.walls import Own, Walls
from gpufaas_gpu_manager.launch.recipes import Recipes, _given_to
from gpufaas_gpu_manager.settings import NodeSettings

NO_BUNDLES: Any = None
WORKER: Any = SimpleNamespace(number=7)


def recipes(sockets: Path | None) -> Recipes:
    return Recipes(NO_BUNDLES, NodeSettings(sockets=sockets), Enforcement(), 1, HostCache(HostTier(0)))


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


def own(recipes: Recipes, name: str, *, gpu: bool) -> Own:
    source = SimpleNamespace(nodes=["/dev/nvidia4"] if gpu else [], enforced=not gpu)
    spec = WorkerSpec(FunctionId(f"{name}.ns@1"), name, "ns", "d", "model")
    worker: Any = SimpleNamespace(spec=spec, device=SimpleNamespace(source=source), number=1, memory=1)
    return recipes._own(worker, Path("/bundle"), Manifest(kind="model", template="test"), "", ())


def test_a_function_has_one_uid_wherever_it_runs_and_the_nodes_of_the_device_that_it_is_on() -> None:
    """Its secrets are files of that uid."""
    uids: Any = Numbered()
    settings = NodeSettings(isolation=Walls(root="mount", uids=True), uids=uids)
    recipes = Recipes(NO_BUNDLES, settings, Enforcement(), 1, HostCache(HostTier(0)))

    on_gpu, on_cpu, other = own(recipes, "a", gpu=True), own(recipes, "a", gpu=False), own(recipes, "b", gpu=True)

    assert (on_gpu.devices, on_cpu.devices) == (("/dev/nvidia4",), ())
    assert on_gpu.uid == on_cpu.uid != other.uid


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory to another user")
def test_a_second_worker_of_a_function_leaves_the_directory_that_the_first_is_about_to_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, second, chown = threading.Event(), threading.Event(), os.chown

    def slow(path: str, *owner: int, **how: bool) -> None:
        if begun.is_set():
            second.set()
        else:
            Path(path, "made by the first").touch()
            begun.set()
        second.wait(0.2)  # it does not come that far
        chown(path, *owner, **how)

    monkeypatch.setattr(os, "chown", slow)
    with ThreadPoolExecutor() as threads:
        results = [threads.submit(_given_to, 1_950_000_000, str(tmp_path / "compiled"))]
        begun.wait()
        results.append(threads.submit(_given_to, 1_950_000_000, str(tmp_path / "compiled")))
        assert [each.result() for each in results] == [True, True]

    assert (tmp_path / "compiled" / "made by the first").exists()
    assert (tmp_path / "compiled").stat().st_uid == 1_950_000_000
