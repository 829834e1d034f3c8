"""After ten calls, a function that declares far too much memory, or hardly enough, is told what to declare."""

import pytest
from tests.unit.gateway.fakes import Platform

from gpufaas_core.model import Device, DeviceId, Profile
from gpufaas_core.reservations import peak_of, reservation
from gpufaas_core.units import GiB, MiB
from gpufaas_gateway.catalogue import ServedRevision
from gpufaas_gateway.function_state import memory_advice

CPU = Device(DeviceId("n1/cpu:0"), "cpu", 64 * GiB)
GPU = Device(DeviceId("n1/cuda:0"), "Test GPU", 64 * GiB, {"gpu": "true"})


async def called(
    annotations: dict[str, str] | None = None,
    peak: int = 312 * MiB,
    calls: int = 10,
    kind: str = "cpu",
    **fields: object,
) -> ServedRevision:
    function = await Platform(CPU, GPU).deploy(annotations=annotations or {}, **fields)
    function.stats.finished = calls
    function.profiles[kind] = Profile(1.0, 0.1, reservation(peak), measured=True)
    return function


@pytest.mark.parametrize("kind", ["cpu", "Test GPU"])
async def test_a_function_that_declares_far_too_much_is_told_what_would_do_and_what_that_frees(kind: str) -> None:
    function = await called({"gpufaas.memory": "2GiB"}, kind=kind)

    assert memory_advice(function) == (
        "Uses at most 312 MiB of the 2.0 GiB that it declares: gpufaas.memory: 400MiB frees 1.6 GiB."
    )


async def test_a_function_that_uses_nearly_all_that_it_declares_is_told_of_more() -> None:
    assert memory_advice(await called({"gpufaas.memory": "512MiB"}, peak=480 * MiB)) == (
        "Uses up to 480 MiB and declares 512 MiB, so that it may run out of memory: gpufaas.memory: 550MiB leaves room."
    )


async def test_the_advice_names_what_the_function_declared() -> None:
    advice = memory_advice(await called(limits={"memory": "8Gi"}, peak=3 * GiB))

    assert advice is not None
    assert "limits.memory: 3584Mi frees 4.5 GiB" in advice


@pytest.mark.parametrize("peak", [1, 30, 50, 312, 900, 5000, 40_000])
async def test_who_follows_the_advice_is_told_nothing_more(peak: int) -> None:
    for declared in ("60GiB", "1MiB"):
        advice = memory_advice(await called({"gpufaas.memory": declared}, peak=peak * MiB))
        assert advice is not None
        better = advice.split("gpufaas.memory: ")[1].split()[0]
        assert memory_advice(await called({"gpufaas.memory": better}, peak=peak * MiB)) is None


async def test_there_is_no_advice_where_nothing_is_declared_or_not_enough_is_known() -> None:
    much = {"gpufaas.memory": "2GiB"}
    loaded = await called(much)
    loaded.profiles["cpu"] = Profile(1.0, 0.1, 300 * MiB, measured=True, estimated=("memory",))
    guessed = await called(much)
    guessed.profiles["cpu"] = Profile(1.0, 0.1, 300 * MiB)

    assert memory_advice(await called()) is None
    assert memory_advice(await called(much, calls=9)) is None
    assert (memory_advice(loaded), memory_advice(guessed)) == (None, None)
    assert memory_advice(await called(much, image=True)) is None  # its use is not measured


async def test_what_a_process_of_its_own_needs_on_top_is_not_part_of_what_it_should_declare() -> None:
    function = await called({"gpufaas.memory": "2GiB"}, peak=504 * MiB, env_vars={"MALLOC_ARENA_MAX": "2"})

    advice = memory_advice(function)

    assert function.spec.memory == 2 * GiB + 192 * MiB
    assert advice is not None
    assert "gpufaas.memory: 400MiB frees 1.6 GiB." in advice


@pytest.mark.parametrize("peak", [0, 1, 312 * MiB, 77_777_777_777])
def test_a_peak_is_known_from_its_reservation(peak: int) -> None:
    assert abs(peak_of(reservation(peak)) - peak) <= 1
