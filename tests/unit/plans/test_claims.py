"""
The ledger of claims: each row can be judged, its measurement exists, and the page that was written has it, with the
number that the code computes now: whoever changes a decision, and with it what was reproduced, sees it here.
"""

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from _claims import BadClaim, Claim, check, read_claims  # noqa: E402
from _measures import MEASURES, SEEDS, _both  # noqa: E402
from paper import O3_LIMIT, POWER_LAW  # noqa: E402

CLAIM = Claim("paldia", "equation", "time, ms", "160", "= 160 +-1", "split 80 64 0.5 1 256 0", "")

PAGE = (ROOT / "docs" / "claims.md").read_text()
TIMES = ("decision_ms", "programme_s", "select_ms")
"""Of this machine: they are held to their claims only."""
SOME_SECONDS = ("less", "limit", "times", "false_misses", "placement wsm-milp vision", "programme_s")
"""Measurements that take a second or more each. Two of them are made all the same, since they run the whole engine."""
CLAIMS = {each.measure: each for each in read_claims() if each.measure}


def test_every_claim_has_a_measurement_that_exists_or_a_reason() -> None:
    check(read_claims(), MEASURES)


def test_the_page_has_every_claim_with_a_verdict() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]

    for claim in read_claims():
        of = [row for row in rows if f"| {claim.what} | {claim.published} |" in row]
        assert of, claim
        assert any(verdict in row for row in of for verdict in ("| met |", "differs because", "cannot be", "not run: "))


def is_long(measure: str) -> bool:
    return measure.startswith(SOME_SECONDS) and measure not in ("less mean lalb 15", "times 25")


def shown(claim: Claim) -> str:
    """Return our number, as the page has it."""
    row = next(line for line in PAGE.splitlines() if line.endswith(f"| `{claim.measure}` |") and claim.what in line)
    return row.split(" | ")[3]


def compare(measures: list[str]) -> list[str]:
    """Return the measurements whose number is another one now."""
    changed = []
    for measure in measures:
        claim = CLAIMS[measure]
        name, *words = measure.split()
        ours = MEASURES[name](*words)
        claim.verdict(ours)  # raises if it is not as claimed, and nobody says why
        told = shown(claim)
        is_same = told == ours if isinstance(ours, str) else math.isclose(float(told), ours, rel_tol=1e-3)
        if not is_same and name not in TIMES:
            changed.append(f"{claim.system}: {claim.what}: {told} on the page, {ours} now ({measure})")
    return changed


@pytest.mark.slow
def test_the_page_has_the_numbers_of_now() -> None:
    changed = compare([each for each in CLAIMS if not is_long(each)])

    assert not changed, "make reproduce, and say in CHANGELOG.md what has changed:\n" + "\n".join(changed)


@pytest.mark.long
def test_the_page_has_the_numbers_of_now_that_take_longer() -> None:
    changed = compare([each for each in CLAIMS if is_long(each)])

    assert not changed, "make reproduce, and say in CHANGELOG.md what has changed:\n" + "\n".join(changed)


@pytest.mark.slow
def test_the_evaluation_has_the_numbers_of_now() -> None:
    """Of one setting, by all policies of its table."""
    both = _both(15, *((policy, O3_LIMIT) for policy in ("lb", "lalb", "lalb-o3", "least-wait")))
    (row,) = re.findall(r"^\| power law, 15 \| (.*) \|$", (ROOT / "docs" / "evaluation.md").read_text(), re.MULTILINE)
    told = [float(re.match(r"−?([\d.]+)", cell)[1]) for cell in row.split(" | ")]  # type: ignore[index]
    lb = (POWER_LAW, 15, 325, "lb")

    now = [both.mean("mean", *lb).mean] + [
        100 * both.less(name, (*lb[:3], policy), lb).mean
        for policy in ("lalb", "lalb-o3", "least-wait")
        for name in ("mean", "miss_ratio")
    ]

    assert SEEDS == 10
    assert [round(each, 1) for each in now] == told, "make bench-paper, and bench-policy where least-wait differs"


@pytest.mark.parametrize(
    ("expect", "met", "missed"),
    [("= 160 +-1", 161.0, 161.1), (">= 95", 95.0, 94.9), ("<= 3", 3.0, 3.1), ("= m60", "m60", "v100")],
)
def test_a_number_is_met_within_its_tolerance(expect: str, met: str | float, missed: str | float) -> None:
    claim = dataclasses.replace(CLAIM, expect=expect)

    assert claim.verdict(met) == "met"
    with pytest.raises(BadClaim, match="say why"):
        claim.verdict(missed)
    assert dataclasses.replace(claim, why="differs because of x").verdict(missed) == "differs because of x"


@pytest.mark.parametrize(
    "change",
    [{"measure": "guess 1"}, {"measure": "", "why": ""}, {"measure": "", "why": "no idea"}, {"expect": "about 3"}],
)
def test_a_row_that_cannot_be_judged_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(BadClaim):
        check([dataclasses.replace(CLAIM, **change)], MEASURES)


@pytest.mark.long
@pytest.mark.timeout(500)  # four platforms, and processes that import torch
def test_the_bundle_of_a_gpu_can_be_tried_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "bundle.json"
    script = ROOT / "benchmarks" / "gpu.py"
    subprocess.run([sys.executable, script, "--device", "cpu", "--quick", "--out", out], check=True, cwd=tmp_path)

    bundle = json.loads(out.read_text())

    assert set(bundle) == {"machine", "transfer", "starts", "storm", "together", "profiles", "tests"}
    assert bundle["transfer"]["pinned"] == {"not run": "there is no GPU here"}
    assert bundle["transfer"]["own"] > 0
    model = bundle["starts"]["resnet50"]
    assert all(model[how]["answer"] == model["platform"]["answer"] for how in ("safetensors", "torch.load"))
    assert model["platform as it is"]["warm"]["tier"] == "hit"
    assert bundle["storm"]["held"] <= 1
    assert all(each["1"]["latency_s"] > 0 for each in bundle["profiles"].values())
