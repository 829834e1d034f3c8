"""
Which models share which devices: the golden placements of the co-location thesis and of iGniter's public measurements,
invariants of every policy, and problems that are wrong or have no solution.
"""

import json
import random
from collections.abc import Sequence

import msgspec
import pytest

from gpufaas_scheduler.plans.placement import compute, igniter, problem, profiles, programmes, size, usher
from gpufaas_scheduler.plans.placement.igniter import Workload, least_share, predict
from gpufaas_scheduler.plans.placement.problem import (
    Device,
    Kind,
    Model,
    Problem,
    Result,
)
from gpufaas_scheduler.plans.problem import BadProblem, read

LANGUAGE = ("resnet50", "mobilenet_v2", "bert", "gpt2")
G1 = ("alexnet", "gpt2", "resnet50", "t5")
G2 = ("vgg19", "mobilenet_v2", "resnet50", "gpt2", "bert")
G4 = ("alexnet", "resnet50", "mobilenet_v2", "bert")


def ask(names: Sequence[str], rps: float, slo_ms: float, devices: int) -> Problem:
    return Problem(
        devices=tuple(Device(id=f"g{i}", kind="v100") for i in range(devices)),
        models={name: Model(rps=rps, slo_ms=slo_ms, profile=profiles.profile(name)) for name in names},
    )


def total(answer: Result) -> float:
    return round(sum(answer.expected.values()), 2)


def batches(answer: Result) -> list[tuple[str, int]]:
    return sorted((each.model, each.batch) for each in answer.replicas)


class TestUsher:
    @pytest.mark.parametrize(
        ("names", "rps", "slo_ms", "devices", "served"),
        [
            (G1, 400, 200, 4, 800), (G2, 400, 300, 4, 793.57), (G4, 500, 200, 4, 1500),
            *((profiles.VISION, 500, 200, n + 1, s) for n, s in enumerate((500, 1000, 1344.1, 1500, 2000, 2500))),
            *(
                (LANGUAGE, 300, 300, n + 1, s)
                for n, s in enumerate((300, 600, 731.19, 862.38, 900, 1031.19, 1162.38, 1200))
            ),
        ],
    )  # fmt: skip
    def test_the_golden_placements(
        self, names: Sequence[str], rps: float, slo_ms: float, devices: int, served: float
    ) -> None:
        assert total(usher.solve(ask(names, rps, slo_ms, devices), "ao")) == served

    def test_the_order_of_the_groups_decides(self) -> None:
        groups = [["vgg19", "mobilenet_v2"], ["bert", "resnet50", "gpt2"]]

        assert total(usher.solve(ask(G2, 400, 300, 4), "ao", groups)) == 1331.19

    def test_a_model_that_needs_more_replicas_than_devices_is_not_served(self) -> None:
        answer = usher.solve(ask(G4, 500, 200, 4), "ao")

        assert answer.unserved == {"bert": "it needs more replicas than there are devices"}
        assert len({each.device for each in answer.replicas}) == 3

    def test_a_group_of_which_no_model_can_be_served_leaves_the_others(self) -> None:
        answer = usher.solve(ask(("bert", "resnet50"), 500, 200, 2), "ao", [["bert"], ["resnet50"]])

        assert answer.expected == {"bert": 0, "resnet50": 500}

    def test_the_smallest_batches_that_serve_as_much(self) -> None:
        assert batches(usher.solve(ask(profiles.VISION, 500, 200, 6), "ao"))[2:5] == [
            ("efficientnet_b7", 8), ("efficientnet_b7", 8), ("resnet50", 4),
        ]  # fmt: skip

    def test_by_mean_occupancy_models_share_that_cannot(self) -> None:
        vision, language = (
            usher.solve(ask(profiles.VISION, 500, 200, 4), "wao"),
            usher.solve(ask(LANGUAGE, 300, 300, 8), "wao"),
        )

        assert (total(vision), len({each.device for each in vision.replicas})) == (2500, 3)
        on = {device: batches(Result(tuple(r for r in language.replicas if r.device == device), {}, {})) for device in
              {each.device for each in language.replicas}}  # fmt: skip
        assert len(on) == 3
        assert all({("bert", 4), ("gpt2", 4)} <= set(there) for there in on.values())

    def test_the_share_is_the_compute_of_the_batch(self) -> None:
        assert [each.share for each in usher.solve(ask(("resnet50",), 500, 200, 1), "ao").replicas] == [87.39]


class TestProgrammes:
    @pytest.mark.parametrize(
        ("metric", "names", "rps", "slo_ms", "devices", "served"),
        [
            ("ao", G1, 400, 200, 4, 1092.04), ("ao", G2, 400, 300, 4, 1331.19), ("ao", G4, 500, 200, 4, 1624.88),
            *(("ao", profiles.VISION, 500, 200, n + 1, s) for n, s in enumerate((500, 1000, 1500, 2000, 2397.7, 2500))),
            *(
                ("ao", profiles.VISION, 200 * (n + 1), 250, 4, s)
                for n, s in enumerate((800, 1600, 2400, 3041.97, 3641.97))
            ),
            *(("ao", profiles.VISION, 200 * (n + 4), 150, 4, s) for n, s in enumerate((3027.01, 3627.01))),
            *(("wsm", profiles.VISION, 500, 200, n, s) for n, s in ((1, 1260.13), (4, 2500), (6, 2500))),
            *(
                ("wsm", LANGUAGE, 300, 300, n + 1, s)
                for n, s in enumerate((600, 731.19, 862.38, 979.59, 1096.8, 1162.38, 1200, 1200))
            ),
        ],
    )  # fmt: skip
    def test_the_golden_placements(
        self, metric: str, names: Sequence[str], rps: float, slo_ms: float, devices: int, served: float
    ) -> None:
        answer = compute.solve(ask(names, rps, slo_ms, devices), f"{metric}-milp")

        assert total(answer) == pytest.approx(served, abs=0.01)
        assert answer.gap == 0

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("rps", "slo_ms", "devices", "served"),
        [
            (500, 200, 2, 1844.1), (500, 200, 3, 2344.1), (600, 250, 4, 2989.78), (800, 250, 4, 3612.17),
            (1000, 250, 4, 4043.76), (600, 150, 4, 2989.78), (800, 150, 4, 3597.21), (1000, 150, 4, 4028.8),
        ],
    )  # fmt: skip
    def test_the_golden_placements_that_take_seconds(
        self, rps: float, slo_ms: float, devices: int, served: float
    ) -> None:
        assert total(compute.solve(ask(profiles.VISION, rps, slo_ms, devices), "wsm-milp")) == pytest.approx(
            served, abs=0.01
        )

    def test_with_queues_in_mind_small_batches_are_taken(self) -> None:
        assert batches(compute.solve(ask(profiles.VISION, 500, 200, 6), "qa-milp")) == [
            ("alexnet", 4), ("densenet121", 16), ("efficientnet_b7", 8), ("efficientnet_b7", 8), ("resnet50", 4),
            ("vgg19", 16),
        ]  # fmt: skip

    def test_a_batch_that_would_miss_its_goal_by_filling_is_left_out(self) -> None:
        answer = compute.solve(ask(("efficientnet_b7",), 10, 100, 1), "qa-milp")

        assert batches(answer) == []
        assert answer.unserved["efficientnet_b7"].startswith("no batch is in time")

    def test_when_time_is_over_the_answer_says_so(self) -> None:
        answer = programmes.solve(ask(profiles.models(), 400, 300, 8), "wsm", time_limit=0.5)

        assert answer.gap is not None
        assert answer.gap > 0
        assert any("not proven" in note for note in answer.notes)

    def test_kinds_differ(self) -> None:
        """A model runs where its profile says that it may."""
        fast = {"4": {"latency_s": 0.01, "goodput": 400, "memory_pct": 10, "ao": 90, "wao": 50, "wsm": 90}}
        slow = {"4": {"latency_s": 0.09, "goodput": 40, "memory_pct": 10, "ao": 90, "wao": 50, "wsm": 90}}
        asked = Problem(
            devices=(Device(id="a", kind="old"), Device(id="b", kind="new")),
            models={
                "x": Model(rps=100, slo_ms=50, profile={"old": slow, "new": fast}),
                "y": Model(rps=30, slo_ms=100, profile={"old": slow, "new": fast}),
            },
        )

        for policy in ("usher", "ao-milp", "wsm-milp"):
            answer = compute.solve(asked, policy)
            assert {each.model: each.device for each in answer.replicas} == {"x": "b", "y": "a"}, policy


D, C = profiles.IGNITER_V100, profiles.IGNITER_MODELS


def ask_igniter(slos: Sequence[float], rates: Sequence[float], devices: int = 4) -> Problem:
    return Problem(
        devices=tuple(Device(id=f"g{i}", kind="v100") for i in range(devices)),
        kinds={"v100": Kind(igniter=D)},
        models={
            name: Model(rps=rate, slo_ms=slo, igniter={"v100": C[name]})
            for name, slo, rate in zip(C, slos, rates, strict=True)
        },
    )


class TestIgniter:
    @pytest.mark.parametrize(
        ("slos", "rates", "placed"),
        [
            ((15, 40, 60), (500, 400, 200), "g0 alexnet 4 10, g0 resnet50 8 30, g0 vgg19 6 37.5"),
            ((15, 40, 60), (500, 400, 400), "g0 vgg19 12 70, g1 alexnet 4 10, g1 resnet50 8 27.5"),
            ((10, 30, 60), (1000, 600, 250), "g0 resnet50 9 45, g0 vgg19 8 50, g1 alexnet 5 17.5"),
        ],
    )  # fmt: skip
    def test_the_golden_placements(self, slos: Sequence[float], rates: Sequence[float], placed: str) -> None:
        answer = compute.solve(ask_igniter(slos, rates), "igniter")

        found = [f"{each.device} {each.model} {each.batch} {each.share:g}" for each in answer.replicas]
        assert ", ".join(found) == placed

    def test_the_predicted_latencies(self) -> None:
        there = [
            Workload(name, C[name], 0, batch, share)
            for name, batch, share in (("alexnet", 4, 10), ("resnet50", 8, 30), ("vgg19", 6, 37.5))
        ]

        assert [round(each.latency, 2) for each in predict(D, there)] == [6.92, 18.91, 28.73]

    def test_the_least_shares(self) -> None:
        assert [least_share(D, C[name], slo / 2, batch) for name, slo, batch in (
            ("alexnet", 15, 4), ("resnet50", 40, 8), ("vgg19", 60, 6))] == [10, 27.5, 35]  # fmt: skip

    def test_what_the_devices_do_not_hold_is_unserved(self) -> None:
        answer = compute.solve(ask_igniter((15, 40, 60), (500, 400, 400), devices=1), "igniter")

        assert set(answer.unserved) == {"alexnet", "resnet50"}
        assert answer.expected["vgg19"] == 400

    def test_a_model_too_large_for_a_device_is_split(self) -> None:
        made = igniter.workloads_of("vgg19", D, C["vgg19"], 3000, 60)

        assert len(made) > 1
        assert all(each.share <= 100 for each in made)

    def test_a_rate_that_no_number_of_devices_serves_ends_the_search(self) -> None:
        assert set(compute.solve(ask_igniter((15, 40, 60), (1e12, 400, 200)), "igniter").unserved) == {"alexnet"}

    def test_coefficients_that_give_no_time_are_refused(self) -> None:
        of = msgspec.structs.replace(C["vgg19"], k=(0, 0, 0, 0, 0))

        with pytest.raises(BadProblem, match="`k` of 'vgg19' give no time above 0"):
            predict(D, [Workload("vgg19", of, 30, 4, 10)])

    def test_without_any_frequency_left_a_batch_never_ends(self) -> None:
        weak = msgspec.structs.replace(D, P=60, alpha_f=-100)

        assert predict(weak, [Workload("vgg19", C["vgg19"], 30, 16, 100)])[0].latency == float("inf")

    def test_a_kind_without_coefficients_is_named(self) -> None:
        with pytest.raises(BadProblem, match="kind 'v100' has no `igniter` coefficients"):
            compute.solve(ask(G1, 1, 200, 1), "igniter")


@pytest.mark.parametrize("policy", [each for each in compute.POLICIES if each != "igniter"])
def test_no_policy_overfills_a_device(policy: str) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        names = rng.sample(profiles.models(), 4)
        asked = Problem(
            devices=tuple(Device(id=f"g{i}", kind="v100") for i in range(rng.randint(1, 3))),
            models={
                name: Model(
                    rps=rng.uniform(10, 600), slo_ms=rng.choice([100, 200, 300]), profile=profiles.profile(name),
                    max_replicas=rng.choice([None, 1, 2]),
                )
                for name in names
            },
        )  # fmt: skip

        answer = compute.solve(asked, policy, time_limit=5)

        metric = {"usher": "ao", "wao-usher": "wao", "ao-milp": "ao"}.get(policy, "memory_pct")
        for device in asked.devices:
            there = [each for each in answer.replicas if each.device == device.id]
            measured = [asked.models[each.model].measured("v100")[each.batch] for each in there]
            assert sum(each.memory_pct or 0 for each in measured) <= problem.FULL
            assert sum(getattr(each, metric) or 0 for each in measured) <= problem.FULL
            assert len({each.model for each in there}) == len(there)
        for name, model in asked.models.items():
            replicas = [each for each in answer.replicas if each.model == name]
            assert len(replicas) <= (model.max_replicas or len(asked.devices))
            assert len({each.batch for each in replicas}) <= 1
            assert answer.expected[name] <= model.rps + 1e-6
            assert bool(replicas) != (name in answer.unserved)
            for each in replicas:
                assert (model.measured("v100")[each.batch].latency_s or 0) * 1000 <= model.slo_ms


class TestSize:
    @pytest.mark.parametrize(("policy", "count"), [("usher", 6), ("ao-milp", 6)])
    def test_the_fewest_devices(self, policy: str, count: int) -> None:
        models = ask(profiles.VISION, 500, 200, 1).models
        answer = size.solve(size.Problem(kinds={"v100": Kind()}, models=models), policy)

        assert isinstance(answer, size.Result)
        assert answer.devices == {"v100": count}

    def test_the_cheapest_kinds(self) -> None:
        fast = {"4": {"latency_s": 0.01, "goodput": 400, "memory_pct": 10, "ao": 90}}
        slow = {"4": {"latency_s": 0.02, "goodput": 200, "memory_pct": 10, "ao": 90}}
        models = {"m": Model(rps=600, slo_ms=100, profile={"big": fast, "small": slow})}

        for price, devices in (
            (3.0, {"big": 0, "small": 3}),
            (1.5, {"big": 1, "small": 1}),
            (1.0, {"big": 2, "small": 0}),
        ):
            asked = size.Problem(kinds={"big": Kind(price=price), "small": Kind(price=1)}, models=models)
            answer = size.solve(asked, "ao-milp")
            assert isinstance(answer, size.Result)
            assert answer.devices == devices

    @pytest.mark.parametrize(
        ("rps", "slo_ms", "said"),
        [
            (10, 1, "its quickest batch, 4, takes 34.1 ms of 1 ms"),
            (1e6, 300, "64 replicas serve at most 8396.16 of 1e+06"),
        ],
    )
    def test_what_no_number_of_devices_serves_is_known_at_once(self, rps: float, slo_ms: float, said: str) -> None:
        """Not after a placement on each of 1 to 64 devices."""
        asked = size.Problem(kinds={"v100": Kind()}, models=ask(profiles.models(), rps, slo_ms, 1).models)
        answer = size.solve(asked, "wsm-milp")

        assert isinstance(answer, size.Infeasible)
        assert said in answer.infeasible

    def test_what_no_cluster_serves(self) -> None:
        asked = size.Problem(kinds={"v100": Kind()}, models=ask(("bert",), 10, 1, 1).models, max_devices=2)
        answer = size.solve(asked, "usher")

        assert isinstance(answer, size.Infeasible)
        assert "its quickest batch, 4, takes 34.1 ms of 1 ms" in answer.infeasible


GOOD = {"devices": [{"id": "g", "kind": "k"}], "models": {"m": {"rps": 1, "slo_ms": 1}}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"models": {}}, "models is {}: write an object that is not empty"),
        ({"models": {"m": {"rps": 0, "slo_ms": 1}}}, "models.m.rps is 0: write a number, more than 0"),
        (
            {"models": {"m": {"rps": 1, "slo_ms": 1, "profile": {"4": {"latency": 1}}}}},
            "unknown key 'latency' in profile.4: did you mean 'latency_s'?",
        ),
        ({"models": {"m": {"rps": 1, "slo_ms": 1, "profile": {"4": {}, "k": {}}}}}, "batch sizes beside kinds"),
        (
            {"models": {"m": {"rps": 1, "slo_ms": 1, "profile": {"4": {"wsm": "5"}}}}},
            'profile.4.wsm is "5": write a number, 0 or more',
        ),
        ({"models": {"m": {"rps": 1, "slo_ms": 1, "profile": {"0": {}}}}}, "'0' is no batch size"),
        ({"models": {"m": {"rps": 1, "slo_ms": 1, "profile": {"4": {}, "04": {}}}}}, "'04' is no batch size"),
        ({"models": {"m": {"rps": 1, "slo_ms": 1, "profile": {"k": 5}}}}, "profile.k is 5: write an object"),
        ({"devices": [{"id": "g", "kind": "k"}] * 2}, "two devices are called 'g'"),
        ({"gpus": 1}, "unknown key 'gpus': there are models, kinds, devices"),
    ],
)
def test_bad_problems_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(BadProblem) as caught:
        read(json.dumps({**GOOD, **change}).encode(), Problem)

    assert said in str(caught.value)


@pytest.mark.parametrize("policy", compute.POLICIES)
def test_without_devices_nothing_is_served(policy: str) -> None:
    answer = compute.solve(ask(("alexnet",), 1, 200, 0), policy)

    assert (answer.replicas, answer.unserved) == ((), {"alexnet": "there are no devices"})


def test_a_kind_may_be_called_by_a_number() -> None:
    model = Model(rps=1, slo_ms=1, profile={"4090": {"8": {"latency_s": 0.1}}, "3090": {}})

    assert (list(model.measured("4090")), list(model.measured("3090"))) == ([8], [])


def test_a_missing_profile_is_named() -> None:
    answer = compute.solve(
        Problem(devices=(Device(id="g", kind="k"),), models={"m": Model(rps=1, slo_ms=1)}), "wsm-milp"
    )

    assert answer.unserved == {"m": "no batch has latency_s, goodput, memory_pct and wsm"}


def test_what_a_batch_uses_stands_in_for_a_measure_that_it_lacks_and_the_answer_says_so() -> None:
    batch = {"latency_s": 0.01, "goodput": 100.0, "memory_pct": 5.0}
    asked = Problem(
        devices=(Device(id="g0", kind="v100"),),
        models={
            "used": Model(rps=10, slo_ms=200, profile={"1": {**batch, "uses": 40.0}}),
            "bare": Model(rps=10, slo_ms=200, profile={"1": batch}),
        },
    )

    found = programmes.solve(asked, "wsm")

    assert [each.model for each in found.replicas] == ["used"]
    assert "no batch has" in found.unserved["bare"]
    assert "`uses` stands in for the measures of compute that the profiles of these lack: used" in found.notes
