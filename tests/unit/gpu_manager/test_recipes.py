"""What a server is told of where it may listen."""

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

    assert found == recipes(sockets).socket_of(WORKER) == str(sockets / "7" / "s")
    assert list((sockets / "7").iterdir()) == []
    assert (sockets / "7").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("sockets", [None, Path("/dev/null/sockets"), Path("/") / ("long" * 30)])
def test_it_has_only_the_port_where_no_socket_can_be(sockets: Path | None) -> None:
    assert recipes(sockets).socket_of(WORKER) == ""
