"""What the claims are measured with: each function's arguments are the words of a row. Simulations are run once."""

import functools
import random
import statistics
import time
from collections.abc import Callable
from typing import Final

from log_cutting import log_cutting
from paper import O3_LIMIT, POWER_LAW, Results, Task, run

from gpufaas_scheduler.plans import hardware, partition, provisioning, selection, split, variants
from gpufaas_scheduler.plans.placement import (
    compute,
    igniter,
    kernels,
    problem,
    profiles,
    programmes,
    size,
    usher,
)

Value = str | float
MEASURES: Final[dict[str, Callable[..., Value]]] = {}
SEEDS: Final = 10


def measure(function: Callable[..., Value]) -> Callable[..., Value]:
    MEASURES[function.__name__] = function
    return function


# --- what the numbers of a paper say about one another ----------------------------------------------------------------


@measure
def ratio(one: str, other: str) -> Value:
    return float(one) / float(other)


@measure
def dearer(one: str, other: str) -> Value:
    return 100 * (float(one) / float(other) - 1)


@measure
def percent(part: str, whole: str) -> Value:
    return 100 * float(part) / float(whole)


@measure
def total(*parts: str) -> Value:
    return sum(map(float, parts))


@measure
def times_of(less: str) -> Value:
    """How many times shorter something is that is so many percent less."""
    return 1 / (1 - float(less) / 100)


@measure
def download_s(megabytes: str, megabits_per_s: str) -> Value:
    return 8 * float(megabytes) / float(megabits_per_s)


# --- GPU-FaaS: the published evaluation in the simulator --------------------------------------------------------------


@functools.cache
def _results(working_set: int, policy: str, limit: int = O3_LIMIT) -> Results:
    tasks = [Task(POWER_LAW, working_set, 325, policy, limit, seed) for seed in range(SEEDS)]
    return Results(dict(map(run, tasks)), SEEDS)


def _both(working_set: int, *settings: tuple[str, int]) -> Results:
    done = {}
    for policy, limit in settings:
        done.update(_results(working_set, policy, limit).done)
    return Results(done, SEEDS)


@measure
def less(name: str, policy: str, working_set: str) -> Value:
    both = _both(int(working_set), (policy, O3_LIMIT), ("lb", O3_LIMIT))
    where, than = ((POWER_LAW, int(working_set), 325, each) for each in (policy, "lb"))
    return 100 * both.less(name, where, than).mean


@measure
def limit(name: str) -> Value:
    both = _both(35, ("lalb-o3", 45), ("lalb-o3", 0))
    where, than = ((POWER_LAW, 35, 325, "lalb-o3", each) for each in (45, 0))
    return 100 * both.less(name, where, than).mean


@measure
def times(working_set: str) -> Value:
    size = int(working_set)
    means = [_results(size, policy).mean("mean", POWER_LAW, size, 325, policy).mean for policy in ("lb", "lalb-o3")]
    return means[0] / means[1]


@measure
def false_misses() -> Value:
    return 100 * max(_results(n, "lb").mean("false_miss_ratio", POWER_LAW, n, 325, "lb").mean for n in (15, 25, 35))


# --- PALDIA -----------------------------------------------------------------------------------------------------------


@measure
def split_(solo: str, batch: str, fbr: str, p: str, n: str, y: str) -> Value:
    return split.Sharing(float(solo), int(batch), float(fbr), float(p)).last_ends(int(n), int(y))


MEASURES["split"] = MEASURES.pop("split_")


@measure
def choice(*solo_ms: str) -> Value:
    prices = (("m60", 0.75), ("k80", 0.9), ("v100", 3.06))
    types = tuple(
        hardware.NodeType(name=name, price=price, kind="gpu", solo_ms=float(solo), batch=64, fbr=0.5)
        for (name, price), solo in zip(prices, solo_ms, strict=True)
    )
    return hardware.solve(hardware.Problem(n=64, slo_ms=200, types=types)).choice


@measure
def in_time(solo: str, batch: str, fbr: str, n: str) -> Value:
    return split.split(int(n), split.Sharing(float(solo), int(batch), float(fbr)), 200).in_time


@measure
def in_time_at(solo: str, batch: str, fbr: str, n: str, y: str) -> Value:
    return split.Sharing(float(solo), int(batch), float(fbr)).in_time(int(n), int(y), 200)


@measure
def best_y(solo: str, batch: str, fbr: str, n: str) -> Value:
    return split.split(int(n), split.Sharing(float(solo), int(batch), float(fbr)), 200).y


@measure
def forecast(*rates: str) -> Value:
    made = provisioning.Forecast()
    for rate in rates:
        made.observe(float(rate))
    return made.ahead()


@measure
def exhaustion(how: str) -> Value:
    """GoogLeNet on a V100, seconds of Poisson 700 requests each, all there at once, within 200 ms."""
    rng, sharing = random.Random(0), split.Sharing(59, 128, 0.63)
    counts = [_poisson(rng, 700) for _ in range(1500)]
    served = {
        "hybrid": lambda n: split.split(n, sharing, 200).in_time,
        "spatial": lambda n: sharing.in_time(n, 0, 200),
        "temporal": lambda n: sharing.in_time(n, n, 200),
    }[how]
    return 100 * sum(served(n) for n in counts) / sum(counts)


def _poisson(rng: random.Random, mean: float) -> int:
    count, at = 0, rng.expovariate(mean)
    while at < 1:
        count += 1
        at += rng.expovariate(mean)
    return count


@measure
def decision_ms() -> Value:
    """The 99th percentile of 300 choices among 6 types, up to 2,000 requests."""
    rng, took = random.Random(0), []
    for _ in range(300):
        types = tuple(
            hardware.NodeType(
                name=str(i), price=rng.random(), kind="gpu", solo_ms=rng.uniform(20, 200),
                batch=rng.choice([8, 64, 128]), fbr=rng.uniform(0.1, 1), p=rng.choice([1.0, rng.uniform(1, 3)]),
            )
            for i in range(6)
        )  # fmt: skip
        asked = hardware.Problem(n=rng.randint(1, 2000), slo_ms=200, types=types)
        took.append(_milliseconds(lambda asked=asked: hardware.solve(asked)))
    return statistics.quantiles(took, n=100)[98]


def _milliseconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return 1000 * (time.process_time() - start)


# --- INFaaS -----------------------------------------------------------------------------------------------------------

_RESNET: Final = (("A", 1, 5, 200, 1), ("B", 3, 100, 20, 8), ("C", 16, 800, 15, 11))


def _resnet(load: str, slo_ms: str, weight: str, running: str) -> variants.Problem:
    made = tuple(
        variants.Variant(name=name, cost=cost, qps=qps, latency_ms=latency, load_s=load_s, running=int(count))
        for (name, cost, qps, latency, load_s), count in zip(_RESNET, running.split(","), strict=True)
    )
    return variants.Problem(load=float(load), slo_ms=float(slo_ms), lambda_=float(weight), variants=made)


@measure
def variants_(load: str, slo_ms: str, weight: str, running: str) -> Value:
    answer = variants.solve(_resnet(load, slo_ms, weight, running))
    assert isinstance(answer, variants.Result)
    return answer.objective


MEASURES["variants"] = MEASURES.pop("variants_")


@measure
def next_best(load: str, slo_ms: str, instances: str) -> Value:
    """What these instances cost, as a multiple of the least."""
    asked = _resnet(load, slo_ms, "0", "0,0,0")
    answer = variants.solve(asked)
    assert isinstance(answer, variants.Result)
    return asked.objective([int(each) for each in instances.split(",")]) / answer.objective


@measure
def programme_s(architectures: str) -> Value:
    """The median of three random programmes with 8 variants for each architecture."""
    took = []
    for seed in range(3):
        rng = random.Random(seed)
        made = tuple(
            variants.Variant(
                name=str(i), cost=rng.uniform(0.5, 20), qps=rng.uniform(5, 300), latency_ms=rng.uniform(1, 110),
                load_s=rng.uniform(0.5, 11), running=rng.randint(0, 2), needs={"cpu": rng.uniform(0, 8)},
            )
            for i in range(8 * int(architectures))
        )  # fmt: skip
        asked = variants.Problem(load=20000, slo_ms=100, lambda_=0.1, resources={"cpu": 2000}, variants=made)
        took.append(_milliseconds(lambda asked=asked: variants.solve(asked)) / 1000)
    return statistics.median(took)


@measure
def select_ms(by: str, state: str = "active") -> Value:
    """The median of 200 decisions among 175 variants on 14 workers, all of them in one state."""
    rng = random.Random(0)
    of = tuple(
        selection.Variant(
            name=f"v{i}", model=f"m{i % 22}", app="images", accuracy=rng.uniform(56, 83), max_batch=8, slope_ms=1,
            intercept_ms=rng.uniform(1, 300), cost_rate=rng.random(), sat_qps=rng.uniform(5, 800), kind="gpu",
        )
        for i in range(175)
    )  # fmt: skip
    workers = tuple(selection.Worker(id=f"w{i}", kinds=("cpu", "gpu"), utilisation=i) for i in range(14))
    running = tuple(
        selection.Instance(variant=each.name, worker=f"w{i % 14}", state=state) for i, each in enumerate(of)
    )
    query = (
        selection.Query(variant="v3")
        if by == "variant"
        else selection.Query(app="images", min_accuracy=72, latency_ms=20)
    )
    asked = selection.Problem(query=query, variants=of, instances=running, workers=workers)
    return statistics.median(_milliseconds(lambda: selection.solve(asked)) for _ in range(200))


# --- Flashpoint -------------------------------------------------------------------------------------------------------

_MODELS: Final = {
    "worked": partition.Costs(0.0, (12.0, 12.0), (2.0, 2.0), (1.0,)),
    "counter": partition.Costs(0.5, (4, 2, 6, 3, 5), (0.02, 0.01, 0.03, 0.015, 0.025), (0.004, 0.001, 0.008, 0.002)),
}


@measure
def partition_(model: str, parts: str, requests: str, devices: str) -> Value:
    return partition.measure(_MODELS[model], tuple(range(int(parts) - 1)), int(requests), int(devices)).t_avg


MEASURES["partition"] = MEASURES.pop("partition_")


@measure
def unpipelined(model: str, requests: str) -> Value:
    """Two parts on two devices, one request at a time."""
    plan = partition.measure(_MODELS[model], (0,), int(requests), 2)
    alone = sum(_MODELS[model].e) + plan.IN
    return plan.C + alone + alone * partition.waits(int(requests), 1) / int(requests)


@measure
def heuristic() -> Value:
    of = _MODELS["counter"]
    return log_cutting(of, 3000, 4).t_avg / partition.best(of, 3000, 4).t_avg


# --- co-location ------------------------------------------------------------------------------------------------------

_SETS: Final = {"vision": profiles.VISION, "language": ("resnet50", "mobilenet_v2", "bert", "gpt2")}
_EXAMPLES: Final = {
    "G1": (("alexnet", "gpt2", "resnet50", "t5"), 400, 200, 4),
    "G2": (("vgg19", "mobilenet_v2", "resnet50", "gpt2", "bert"), 400, 300, 4),
    "G4": (("alexnet", "resnet50", "mobilenet_v2", "bert"), 500, 200, 4),
}


def _asked(models: str, *numbers: str) -> problem.Problem:
    if models in _EXAMPLES:
        names, rps, slo_ms, devices = _EXAMPLES[models]
    else:
        names, (rps, slo_ms, devices) = _SETS[models], map(int, numbers)
    return problem.Problem(
        devices=tuple(problem.Device(id=f"g{i}", kind="v100") for i in range(devices)),
        models={name: problem.Model(rps=rps, slo_ms=slo_ms, profile=profiles.profile(name)) for name in names},
    )


@measure
def placement(policy: str, models: str, *numbers: str) -> Value:
    return sum(compute.solve(_asked(models, *numbers), policy).expected.values())


@measure
def devices(policy: str, models: str, *numbers: str) -> Value:
    return len({each.device for each in compute.solve(_asked(models, *numbers), policy).replicas})


@measure
def usher_order(models: str, *groups: str) -> Value:
    return sum(usher.solve(_asked(models), "ao", [each.split(",") for each in groups]).expected.values())


@measure
def size_(policy: str, models: str, rps: str, slo_ms: str) -> Value:
    asked = size.Problem(kinds={"v100": problem.Kind()}, models=_asked(models, rps, slo_ms, "1").models)
    answer = size.solve(asked, policy)
    assert isinstance(answer, size.Result)
    return answer.devices["v100"]


MEASURES["size"] = MEASURES.pop("size_")


@measure
def goodput(model: str, batch: str, replicas: str) -> Value:
    return int(replicas) * (profiles.profile(model)[batch]["goodput"] or 0)


@measure
def table_a1(which: str, metric: str) -> Value:
    every = [batch[metric] for name in profiles.models() for batch in profiles.profile(name).values()]
    return (min if which == "min" else max)(each for each in every if each is not None)


@measure
def fill_ms(batch: str, rps: str) -> Value:
    return 1000 * int(batch) / float(rps)


@measure
def network_ms(batch: str) -> Value:
    return 1000 * programmes.network(int(batch))


@measure
def kernel(device: str, grid: str, block: str, registers: str, shared_kib: str) -> Value:
    of = kernels.Kernel(int(grid), int(block), int(registers), 1024 * int(shared_kib))
    return kernels.share(of, {"v100": kernels.V100, "h200": kernels.H200}[device])


@measure
def least_share(model: str, goal_ms: str, batch: str) -> Value:
    of = profiles.IGNITER_MODELS[model]
    return igniter.least_share(profiles.IGNITER_V100, of, float(goal_ms), int(batch)) or float("nan")


def _igniter() -> dict[str, igniter.Workload]:
    made = []
    for name, slo_ms, rps in (("alexnet", 15, 500), ("resnet50", 40, 400), ("vgg19", 60, 200)):
        of = profiles.IGNITER_MODELS[name]
        made += igniter.workloads_of(name, profiles.IGNITER_V100, of, rps, slo_ms)
    (there,) = igniter.place(profiles.IGNITER_V100, made)
    return {each.model: each for each in there}


@measure
def igniter_(model: str) -> Value:
    return f"{_igniter()[model].batch} {_igniter()[model].share:g}"


MEASURES["igniter"] = MEASURES.pop("igniter_")


@measure
def igniter_ms(model: str) -> Value:
    there = _igniter()
    found = igniter.predict(profiles.IGNITER_V100, list(there.values()))
    return found[list(there).index(model)].latency
