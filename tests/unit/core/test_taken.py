"""Profiles that are taken: under which name they are kept, how they join what calls teach, when they are stale."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpufaas_core.bundle import WeightsFile, WorkerSpec
from gpufaas_core.constraints import DRIVER, TORCH
from gpufaas_core.model import Device, DeviceId, FunctionId, Need, Profile, RatioDoc, Taken, TakenBatch
from gpufaas_core.taken import joined, profile_of, why_stale
from gpufaas_core.units import GiB

TAKEN = Taken(
    "r1", 0.0, load_s=2.0, memory=GiB,
    batches={1: TakenBatch(0.1, 0.2, 20, 30.0), 4: TakenBatch(0.2, 0.3, 20, 80.0)},
    together={1: TakenBatch(0.15, 0.2, 20)}, at_once=2, torch="2.10", driver="550",
)  # fmt: skip
SPEC = WorkerSpec(
    FunctionId("f.fn@1"), "f", "fn", "a" * 64, "model", Need(batch_max=4),
    weights=(WeightsFile("function/weights", "b" * 64, 10),),
)  # fmt: skip


@pytest.mark.parametrize(
    ("edit", "same"),
    [
        ({"digest": "c" * 64, "function": FunctionId("f.fn@2")}, True),
        ({"env": {"OPENFAAS_NAME": "f"}}, True),
        ({"env": {"SIZE": "large"}}, False),
        ({"need": Need(batch_max=8)}, False),
        ({"weights": (WeightsFile("function/weights", "d" * 64, 10),)}, False),
    ],
    ids=["of the code", "by the platform", "of the environment", "of the need", "of the weights"],
)
def test_an_edit_that_keeps_weights_and_need_finds_the_profile(edit: dict[str, Any], same: bool) -> None:
    assert (replace(SPEC, **edit).taken_as == SPEC.taken_as) is same


def test_without_weights_it_is_the_profile_of_the_bundle() -> None:
    bare = replace(SPEC, weights=())

    assert replace(bare, digest="c" * 64).taken_as != bare.taken_as


def test_what_was_taken_is_an_estimate_until_calls_teach() -> None:
    found = profile_of(TAKEN)

    assert (found.load_s, found.service_s, found.occupation) == (2.0, 0.1, GiB)
    assert found.estimated == ("load", "call", "memory")
    assert {(each.batch, each.share, each.neighbours): each.ratio for each in found.ratios} == {
        (4, 0, 0): pytest.approx(2.0), (1, 0, 1): pytest.approx(1.5),
    }  # fmt: skip
    assert found.taken == TAKEN


def test_what_calls_have_taught_stays() -> None:
    learnt = Profile(9.0, 0.9, 5, measured=True, ratios=(RatioDoc(4, 0, 0, 3.0, 7),))

    found = joined({"gpu": learnt}, {"gpu": profile_of(TAKEN), "cpu": profile_of(TAKEN)})

    assert (found["gpu"].load_s, found["gpu"].service_s) == (9.0, 0.9)
    assert [each.ratio for each in found["gpu"].ratios] == [3.0, pytest.approx(1.5)]
    assert found["gpu"].taken == found["cpu"].taken == TAKEN
    assert joined({"gpu": replace(learnt, taken=TAKEN)}, {})["gpu"].taken is None, "it was of another need"


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({TORCH: "2.10", DRIVER: "550"}, ""),
        ({}, ""),
        ({TORCH: "2.11", DRIVER: "550"}, "it was taken with torch 2.10, and n/cuda:0 has 2.11"),
        ({TORCH: "2.10", DRIVER: "560"}, "it was taken with the driver 550, and n/cuda:0 has 560"),
    ],
    ids=["the same", "an older node does not say", "another torch", "another driver"],
)
def test_a_profile_of_other_versions_is_stale(labels: dict[str, str], said: str) -> None:
    assert why_stale(TAKEN, [Device(DeviceId("n/cuda:0"), "gpu", GiB, labels)]) == said
