"""
The decision logs of the published policies are, byte for byte, those of the release before capacity and copies.

`decision_logs.json` has the sha256 of each log. A change of it needs a stated reason: a rule of a policy that changed.
"""

import hashlib
import json
import random
import re
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import pytest

from gpufaas_simulator.decisions import DecisionLog
from gpufaas_simulator.explicit import read_workload
from gpufaas_simulator.nodes import Noise
from gpufaas_simulator.noise import load_noise, lognormal, service_noise
from gpufaas_simulator.run import engine_header, simulate
from gpufaas_simulator.synthetic import TABLE_1, devices, make_workload
from gpufaas_simulator.workload import Workload

DIGESTS: Final = Path(__file__).with_name("decision_logs.json")
DOCUMENT: Final = Path(__file__).parents[3] / "docs" / "simulator.md"
POLICIES: Final = ("lb", "lalb", "lalb-o3")


def read(given: dict[str, Any]) -> Workload:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "w.json")
        path.write_text(json.dumps(given))
        return read_workload(path)


def of_the_document() -> Workload:
    found = re.search(r"### W\.json\n.*?```json\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    return read(json.loads(found[1]))


def by_hand() -> Workload:
    """Some functions fit some devices only; a minimum of copies; two calls with times of their own."""
    cost = {"load_s": 2.5, "infer_s": 1.25}
    return read({
        "devices": [{"id": "g0", "memory_mb": 7800}, {"id": "g1", "memory_mb": 3000}],
        "functions": {
            "f": {"occupation_mb": 1269, **cost, "min_copies": 1},
            "g": {"occupation_mb": 7000, "load_s": 3, "infer_s": 1},
            "h": {"occupation_mb": 1300, **cost},
        },
        "arrivals": [
            [0, "f"], [0.5, "g"], [0.5, "f"], [2, "h", 40], [2, "f"], [3, "h"], [3, "f", 0], [4, "f"], [10, "g"],
            [10, "f"], [10, "h"], [11, "h"],
        ],
    })  # fmt: skip


def drawn(shape: str, working_set: int, count: int, rpm: float, minutes: int = 2) -> Callable[[int], Workload]:
    return lambda seed: make_workload(
        shape, working_set=working_set, rpm=rpm, minutes=minutes, seed=seed, on=devices(count)
    )  # fmt: skip


def mixed(seed: int) -> Workload:
    """All that a file can say of decisions without host memory: kinds, CPU functions, limits, times, all changes."""
    rng = random.Random(seed)
    models = [{"occupation_mb": mb, "load_s": load_s, "infer_s": infer_s} for mb, load_s, infer_s in TABLE_1.values()]
    functions: dict[str, dict[str, Any]] = {}
    for number in range(14):
        cost = rng.choice(models)
        functions[f"f{number}"] = each = dict(cost)
        if rng.random() < 0.3:
            each["kinds"] = {"fast": {"occupation_mb": cost["occupation_mb"] * 1.1, "load_s": 1.5, "infer_s": 0.4}}
        if rng.random() < 0.4:
            each["host_load_s"] = 0.5
        if rng.random() < 0.2:
            each["min_copies"] = rng.randint(1, 2)
        if rng.random() < 0.2:
            each["max_queue"] = rng.randint(2, 5)
        if rng.random() < 0.2:
            each["timeout_s"] = 20
    for number in range(4):
        functions[f"c{number}"] = {
            "occupation_mb": 800, "load_s": 0.5, "infer_s": rng.choice([0.2, 2.0]), "slots": rng.randint(1, 3),
            "min_copies": rng.randint(0, 1),
        }  # fmt: skip
    names = list(functions)
    arrivals: list[list[Any]] = []
    now = 0.0
    for _ in range(320):
        now += rng.expovariate(3.5)
        name = names[min(int(rng.paretovariate(0.6)) - 1, len(names) - 1)] if rng.random() < 0.6 else rng.choice(names)
        arrivals.append([round(now, 3), name, *([rng.expovariate(1.0)] if rng.random() < 0.1 else [])])
    node = [{"id": f"n{at // 2}/{at % 2}", "memory_mb": rng.choice([4000, 7800])} for at in range(6)]
    where = [*node, {"id": "big", "memory_mb": 16000, "kind": "fast", "node": "n9"}]
    changes: list[dict[str, Any]] = [
        {"event": "device_leaves", "device": "n0/1"}, {"event": "node_leaves", "node": "n1"},
        {"event": "device_joins", "device": {"id": "late", "memory_mb": 7800, "kind": "fast"}},
        {"event": "device_joins", "device": {"id": "n0/1", "memory_mb": 7800}},
    ]  # fmt: skip
    changes += [{"event": "function_updated", "function": name} for name in rng.sample(names, 3)]
    changes += [
        {"event": "function_updated", "function": "f1", "occupation_mb": 3000, "load_s": 1, "infer_s": 2},
        {"event": "function_scaled", "function": "c0", "copies": 5},
        {"event": "function_scaled", "function": "f0", "copies": 3},
        {"event": "function_scaled", "function": "c0", "copies": 1},
    ]
    times = sorted(round(rng.uniform(1, now), 3) for _ in changes)
    return read({
        "devices": where, "functions": functions, "arrivals": arrivals,
        "changes": [{"t": at, **change} for at, change in zip(times, changes, strict=True)],
    })  # fmt: skip


def crowded(seed: int) -> Workload:
    """CPU functions have several copies on a device, and displace each other and models."""
    rng = random.Random(seed)
    functions: dict[str, dict[str, Any]] = {
        f"c{at}": {"occupation_mb": rng.choice([500, 900, 1500]), "load_s": 0.5, "infer_s": 1.0, "slots": 1}
        for at in range(6)
    }
    functions |= {f"f{at}": {"occupation_mb": 1800, "load_s": 2.0, "infer_s": 0.7} for at in range(3)}
    arrivals: list[list[Any]] = []
    now = 0.0
    for _ in range(30):
        now += rng.expovariate(0.4)
        name = rng.choice(list(functions))
        arrivals += [[round(now + 0.01 * at, 3), name] for at in range(rng.randint(1, 8))]
        now = arrivals[-1][0]
    changes = [
        {"t": 5 * (at + 1), "event": "function_scaled", "function": f"c{at % 6}", "copies": rng.randint(0, 4)}
        for at in range(8)
    ]
    return read({
        "devices": [{"id": "g0", "memory_mb": 4000}, {"id": "g1", "memory_mb": 5000}],
        "functions": functions, "arrivals": arrivals, "changes": changes,
    })  # fmt: skip


def deviating(workload: Workload, cv: float, seed: int) -> Noise | None:
    law = lognormal(cv) if cv else None
    return Noise(service_noise(workload, law, seed), load_noise(law, seed)) if law else None


DRAWN: Final[dict[str, Callable[[int], Workload]]] = {
    "paper-15": drawn("power-law", 15, 12, 325), "paper-35": drawn("power-law", 35, 12, 325),
    "poisson-8": drawn("poisson", 8, 3, 60), "bursts-10": drawn("bursts", 10, 4, 90, 3),
    "diurnal-12": drawn("diurnal", 12, 5, 120), "one-device": drawn("poisson", 5, 1, 20), "mixed": mixed,
    "crowded": crowded,
}  # fmt: skip
CASES: Final[dict[str, tuple[Callable[[], Workload], float, int]]] = {
    "document": (of_the_document, 0.0, 0), "by-hand": (by_hand, 0.0, 0),
} | {
    f"{name}, cv {cv:g}, seed {seed}": (lambda make=make, seed=seed: make(seed), cv, seed)  # type: ignore[misc]
    for name, make in DRAWN.items()
    for cv in (0.0, 1.0)
    for seed in ((0, 1, 2, 3) if name in ("mixed", "crowded") else (0, 1))
}  # fmt: skip


def digest(name: str, policy: str) -> str:
    make, cv, seed = CASES[name]
    workload = make()
    out = BytesIO()
    simulate(workload, engine_header(policy), noise=deviating(workload, cv, seed), observers=[DecisionLog(out)])
    return hashlib.sha256(out.getvalue()).hexdigest()


@pytest.mark.parametrize("group", ["document", "by-hand", *DRAWN])
@pytest.mark.parametrize("policy", POLICIES)
def test_decision_logs_are_those_of_before(policy: str, group: str) -> None:
    recorded = {name: each for name, each in json.loads(DIGESTS.read_text())[policy].items() if _group(name) == group}

    assert {name: digest(name, policy) for name in CASES if _group(name) == group} == recorded


def _group(case: str) -> str:
    return case.partition(",")[0]
