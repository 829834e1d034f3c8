"""
Every number of the five papers beside ours, written to docs/claims.md: met, or why not.

    python benchmarks/reproduce.py [--system NAME] [--out docs/claims.md]

Half a minute. A row whose number is not as expected, and that does not say why, ends it with an error.
"""

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from _claims import SYSTEMS, BadClaim, Claim, check, read_claims
from _document import table
from _measures import MEASURES
from rich.console import Console
from rich.progress import Progress

KINDS = ("met", "differs", "cannot be right", "not run")
ROOT = Path(__file__).resolve().parent.parent

HEAD = """# Claims

What the papers of the five systems state, number by number, and what this repository computes. Written by

```console
$ make reproduce
```

in half a minute. `tests/unit/plans/test_claims.py` computes them again for each change, and fails where one has become
another; times are of the machine that wrote this. *met*: as expected, with the tolerance of `benchmarks/claims/`;
*differs because*; *cannot be right because* of something else that the paper states; *not run*: the system is not
connected to the simulator yet, or it needs other hardware. A number that is neither met nor explained is an error.

Measurements called `ratio`, `percent`, `dearer`, `times_of` and `download_s` check printed numbers against each other:
they show that the paper agrees with itself, not that we reproduce it.

{summary}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Every number of the five papers beside ours.")
    parser.add_argument("--system", choices=SYSTEMS, help="only this one; nothing is written")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "claims.md")
    given = parser.parse_args()
    claims = [each for each in read_claims() if given.system in (None, each.system)]
    try:
        check(claims, MEASURES)
        judged = judge(claims)
    except BadClaim as exc:
        sys.exit(f"reproduce: {exc}")
    text = document(judged)
    if given.system is None:
        given.out.write_text(text)
    else:
        print(text)


def judge(claims: Sequence[Claim]) -> list[tuple[Claim, str, str]]:
    """Return each claim with our number and the verdict; measurements of several rows are made once."""
    judged = []
    known: dict[str, str | float] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("claims", total=len(claims))
        for claim in claims:
            progress.update(task, advance=1, description=f"{claim.system}: {claim.what[:50]}")
            if claim.measure and claim.measure not in known:
                name, *words = claim.measure.split()
                known[claim.measure] = MEASURES[name](*words)
            ours = known.get(claim.measure)
            told = "" if ours is None else ours if isinstance(ours, str) else f"{ours:.4g}"
            judged.append((claim, told, claim.verdict(ours)))
    return judged


def document(judged: Sequence[tuple[Claim, str, str]]) -> str:
    summary, parts = [], []
    for system, rows in itertools.groupby(judged, key=lambda row: row[0].system):
        lines = []
        counts: Counter[str] = Counter()
        for claim, ours, verdict in rows:
            counts[next(kind for kind in KINDS if verdict.startswith(kind))] += 1
            how = f"`{claim.measure}`" if claim.measure else ""
            lines.append([claim.place, claim.what, claim.published, ours or "-", verdict, how])
        summary.append([system, *(str(counts[kind]) for kind in KINDS)])
        headings = ["where", "what", "published", "ours", "verdict", "measurement"]
        parts.append(f"## {system}\n\n{table(headings, lines)}\n")
    return "\n".join([HEAD.format(summary=table(["", *KINDS], summary)), *parts])


if __name__ == "__main__":
    main()
