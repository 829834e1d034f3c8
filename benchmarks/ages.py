"""
How old the measurements are that the pages have: when each was written, and how many commits have changed what it
measures since.

    python benchmarks/ages.py

It judges nothing: a commit may change nothing that is measured. What is computed without a clock is compared with the
code by tests/unit/plans/test_claims.py; times are measured again by hand, with the command that stands here.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from _document import table

ROOT: Final = Path(__file__).resolve().parent.parent
DECIDING: Final = ("core", "scheduler", "cache-manager", "simulator")
SERVING: Final = ("core", "scheduler", "cache-manager", "gateway", "gpu-manager", "functions", "apps", "async-calls")
MEASURED: Final = {
    "benchmarks/paper.py": ("make bench-paper TRACE=FILE", DECIDING),
    "benchmarks/policy.py": ("python benchmarks/policy.py --trace FILE --write docs/policy-evaluation.md", DECIDING),
    "tiers": ("python benchmarks/tiers.py --write docs/tiers.md", DECIDING),
    "parked": ("python benchmarks/tiers.py --parked --write docs/tiers.md", DECIDING),
    "benchmarks/peers.py": ("make bench-peers WRITE=1", SERVING),
    "benchmarks/coldstart.py": ("python benchmarks/coldstart.py --write", SERVING),
    "benchmarks/live_agreement.py": ("make bench-live", (*SERVING, "simulator")),
    "benchmarks/emulated.py": ("make bench-emulated", (*SERVING, "simulator")),
    "benchmarks/neighbours.py": ("make bench-neighbours", (*SERVING, "simulator")),
}
"""The command that writes each part of a page, and the folders that it measures, by the name in its marks."""
PAGES: Final = (
    "README.md",
    *(f"docs/{name}.md" for name in ("evaluation", "performance", "policy-evaluation", "tiers")),
)


def parts(page: str) -> list[tuple[str, int, int]]:
    """Return the parts of *page* that a program writes: by which, first and last line."""
    lines = (ROOT / page).read_text().splitlines()
    marks = {mark: at for at, line in enumerate(lines, 1) if (mark := re.match(r"<!-- (begin|end) (.*) -->", line))}
    begun = {mark[2]: at for mark, at in marks.items() if mark[1] == "begin"}
    found = [(mark[2], begun[mark[2]] + 1, at - 1) for mark, at in marks.items() if mark[1] == "end"]
    return found or [("benchmarks/policy.py", 1, len(lines))]


def git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as exc:
        sys.exit(f"ages: only the history of a clone knows: {getattr(exc, 'stderr', exc)}".rstrip())


def main() -> None:
    if git("rev-parse", "--is-shallow-repository") == "true":
        sys.exit("ages: this clone is shallow, and does not know: git fetch --unshallow")
    rows = []
    for page in PAGES:
        for of, first, last in parts(page):
            command, folders = MEASURED[of]
            blamed = git("blame", "--line-porcelain", "-L", f"{first},{last}", "--", page)
            newest = max(
                re.findall(r"^([0-9a-f]{40}) [\s\S]*?^committer-time (\d+)", blamed, re.MULTILINE), key=lambda at: at[1]
            )
            commit = newest[0] if int(newest[0], 16) else "HEAD"  # what is not committed yet has only zeros
            day, since = (
                git("show", "-s", "--format=%cs %h", commit),
                git("rev-list", "--count", f"{commit}..", "--", *folders),
            )
            rows.append([page, of, day, since, f"`{command}`"])
    print(table(["page", "part", "written", "commits since", "again by"], rows))


if __name__ == "__main__":
    main()
