"""No Python that the platform starts for itself imports from the directory in which somebody happens to be."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
STARTS = re.compile(r"""(?:sys\.executable|\bpython)["']?,\s*["'](?!-P)-[mc]""")
ELSEWHERE = ("tests/", "benchmarks/", "demo/", "functions/examples/", "templates/")
"""Templates: a server keeps what Python does in its own directory."""


def test_each_python_that_is_started_with_a_module_has_a_safe_path() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    sources = [each for each in listed if each.endswith((".py", ".yaml")) and not each.startswith(ELSEWHERE)]

    assert len(sources) > 200
    assert [each for each in sources if STARTS.search((ROOT / each).read_text())] == []
