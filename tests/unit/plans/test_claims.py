"""The ledger of claims: each row can be judged, its measurement exists, and the page that was written has it."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from _claims import BadClaim, Claim, check, read_claims  # noqa: E402
from _measures import MEASURES  # noqa: E402

CLAIM = Claim("paldia", "equation", "time, ms", "160", "= 160 +-1", "split 80 64 0.5 1 256 0", "")


def test_every_claim_has_a_measurement_that_exists_or_a_reason() -> None:
    check(read_claims(), MEASURES)


def test_the_page_has_every_claim_with_a_verdict() -> None:
    page = (ROOT / "docs" / "claims.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]

    for claim in read_claims():
        of = [row for row in rows if f"| {claim.what} | {claim.published} |" in row]
        assert of, claim
        assert any(verdict in row for row in of for verdict in ("| met |", "differs because", "cannot be", "not run: "))


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
