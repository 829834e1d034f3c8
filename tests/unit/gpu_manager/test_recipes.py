"""What a worker is told: where a server may listen, and which environment counts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufaas_gpu_manager.enforcement import Enforcement
from gpufaas_gpu_manager.host_cache import HostCache
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

    assert found == recipes(sockets).socket_of(WORKER) == str(sockets / "7")
    assert list(sockets.iterdir()) == []
    assert sockets.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("sockets", [None, Path("/dev/null/sockets"), Path("/") / ("long" * 30)])
def test_it_has_only_the_port_where_no_socket_can_be(sockets: Path | None) -> None:
    assert recipes(sockets).socket_of(WORKER) == ""


def test_an_author_chooses_the_allocator_but_not_the_gpu(tmp_path: Path) -> None:
    bundles: Any = SimpleNamespace(compiled=lambda _: tmp_path)
    env = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "CUDA_VISIBLE_DEVICES": "0"}
    spec = SimpleNamespace(digest="d", name="a", namespace="b", env=env, secrets=())
    of_device = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_VISIBLE_DEVICES": "GPU-1"}
    source = SimpleNamespace(compiles_for="x", env=of_device)
    worker: Any = SimpleNamespace(
        number=7, spec=spec, device=SimpleNamespace(source=source), scratch=True, output=SimpleNamespace(secret="s")
    )

    found = Recipes(bundles, NodeSettings(), Enforcement(), 1, HostCache(None))._environment(worker)

    assert (found["PYTORCH_ALLOC_CONF"], found["CUDA_VISIBLE_DEVICES"]) == ("max_split_size_mb:64", "GPU-1")
