"""Load by wrk, and what the programs that use it are told."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

BODY = json.dumps({"id": 7, "text": "x" * 950, "numbers": [1, 2, 3, 4.5]})
"""About 1 KB, for what echoes it."""
LUA = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = [==[%s]==]
done = function(summary, latency, requests)
    io.write(string.format("RESULT %%d %%d %%d %%d %%d\\n", summary.requests, summary.duration,
        latency:percentile(50), latency:percentile(99),
        summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.write
            + summary.errors.timeout))
end
"""


def parser_of(doc: str | None, seconds: float = 3.0) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=seconds, help="of each run; default: %(default)g")
    parser.add_argument(
        "--json", nargs="?", const=True, type=Path, metavar="FILE", help="write what was found, as JSON"
    )
    need_wrk()
    return parser


def need_wrk() -> None:
    if not shutil.which("wrk"):
        sys.exit("wrk is missing: apt install wrk")


def wrk(url: str, connections: int, seconds: float, script: Path) -> dict[str, float]:
    """Return requests, requests/s, p50 and p99 in ms, and errors of one run."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--timeout", "20s", "-s", str(script), url]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"RESULT (\d+) (\d+) (\d+) (\d+) (\d+)", out)
    assert found, out
    requests, micros, p50, p99, errors = map(int, found.groups())
    rates = {"requests": requests, "rps": requests / (micros / 1e6)}
    return {**rates, "p50_ms": p50 / 1e3, "p99_ms": p99 / 1e3, "errors": errors}
