"""How large the host tier is: as asked, but within the memory of the machine or container."""

import pytest

from gpufaas_apps import machine
from gpufaas_apps.machine import host_budget
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import GiB, MiB


def test_it_is_an_eighth_of_the_memory_or_as_asked_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "total_memory", lambda: GiB)

    assert host_budget(None) == 128 * MiB
    assert host_budget(0) == 0
    assert host_budget(GiB) == GiB
    with pytest.raises(InvalidSpec, match=r"--host-cache 2\.0 GiB: there are 1\.0 GiB of memory here"):
        host_budget(2 * GiB)
