"""
What the papers state, number by number, beside what is measured here: how claims are read and judged.

``claims/SYSTEM.csv`` has a row for each number: where it stands, what it is, the published value, what is expected of
ours (``= 22 +-0.1``, ``>= 95``, ``<= 3``, ``= v100``), the measurement that gives ours (a function of `_measures` and
its arguments), and why the two differ, why the published one cannot be right, or why it is not run.
"""

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CLAIMS: Final = Path(__file__).parent / "claims"
SYSTEMS: Final = ("gpu-faas", "paldia", "infaas", "flashpoint", "co-location")
REASONS: Final = ("differs because ", "cannot be right because ", "not run: ")
_EXPECTED: Final = re.compile(r"(?P<how>=|>=|<=) (?P<value>.+?)(?: \+-(?P<within>[\d.]+))?")


class BadClaim(Exception):
    """A row says too little, or names a measurement that does not exist."""


@dataclass(frozen=True)
class Claim:
    system: str
    place: str
    what: str
    published: str
    expect: str
    measure: str
    why: str

    def is_met(self, ours: str | float) -> bool:
        found = _EXPECTED.fullmatch(self.expect)
        if found is None:
            raise BadClaim(f"{self.system}, {self.what}: cannot read what is expected: {self.expect!r}")
        if isinstance(ours, str):
            return ours == found["value"]
        value, within = float(found["value"]), float(found["within"] or 0) + 1e-9
        low, high = {"=": (-within, within), ">=": (-within, float("inf")), "<=": (-float("inf"), within)}[found["how"]]
        return low <= ours - value <= high

    def verdict(self, ours: str | float | None) -> str:
        """
        Return ``met``, or the reason of the row.

        :raises BadClaim: ours is not as expected, or not measured, and no reason is given
        """
        if ours is not None and self.is_met(ours):
            return "met"
        if not self.why.startswith(REASONS):
            raise BadClaim(f"{self.system}, {self.place}, {self.what}: expected {self.expect}, is {ours}: say why")
        return self.why


def read_claims() -> list[Claim]:
    """Return all claims, in the order of the systems."""
    claims = []
    for system in SYSTEMS:
        with (CLAIMS / f"{system}.csv").open(newline="") as file:
            claims += [Claim(system, **row) for row in csv.DictReader(file)]
    return claims


def check(claims: Sequence[Claim], measures: dict[str, Callable[..., str | float]]) -> None:
    """
    Check that each claim can be judged.

    :raises BadClaim: a measurement does not exist, or a row has neither measurement nor reason
    """
    for claim in claims:
        name = claim.measure.partition(" ")[0]
        if name and name not in measures:
            raise BadClaim(f"{claim.system}, {claim.what}: there is no measurement {name!r}")
        if name and _EXPECTED.fullmatch(claim.expect) is None:
            raise BadClaim(f"{claim.system}, {claim.what}: cannot read what is expected: {claim.expect!r}")
        if not name and not claim.why.startswith(REASONS):
            raise BadClaim(f"{claim.system}, {claim.what}: neither a measurement nor a reason")
