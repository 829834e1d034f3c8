"""
What the platform adds to a warm call: `echo` (1 KB of JSON, parsed and serialised) against a bare Starlette server.

Both are measured in turn, in one run, on this machine, with wrk (`apt install wrk`) as load: rounds of A B A B, the
ratio taken round by round, medians shown. The machine's speed drifts; the ratio hardly does.

    .venv/bin/python benchmarks/overhead.py [--seconds 3] [--rounds 3] [--json]
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _platform import ROOT, free_port, gpufaas, platform, process
from rich.console import Console
from rich.table import Table

CONNECTIONS = (1, 16, 64)
TARGETS = {1: 0.40, 16: 0.35, 64: 0.35}
BODY = json.dumps({"id": 7, "text": "x" * 950, "numbers": [1, 2, 3, 4.5]})
BARE = """
import sys, uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

async def echo(request):
    return JSONResponse(await request.json())

async def health(request):
    return JSONResponse("OK")

app = Starlette(routes=[Route("/", echo, methods=["POST"]), Route("/healthz", health)])
uvicorn.run(app, port=int(sys.argv[1]), loop="uvloop", http="httptools", access_log=False, log_level="error")
"""
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


def wrk(url: str, connections: int, seconds: float, script: Path) -> dict[str, float]:
    """Return requests/s, p50 and p99 in ms, and errors of one run."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "-s", str(script), url]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"RESULT (\d+) (\d+) (\d+) (\d+) (\d+)", out)
    assert found, out
    requests, micros, p50, p99, errors = map(int, found.groups())
    return {"rps": requests / (micros / 1e6), "p50_ms": p50 / 1e3, "p99_ms": p99 / 1e3, "errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not shutil.which("wrk"):
        sys.exit("wrk is missing: apt install wrk")
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        script, bare = Path(folder) / "post.lua", Path(folder) / "bare.py"
        script.write_text(LUA % BODY)
        bare.write_text(BARE)
        port = free_port()
        with (
            platform("--device", "cpu:0=512MiB") as (url, _, home),
            process([sys.executable, str(bare), str(port)], f"http://127.0.0.1:{port}/healthz"),
        ):
            examples = home / "examples"
            shutil.copytree(ROOT / "functions" / "examples", examples, ignore=shutil.ignore_patterns("build"))
            gpufaas(url, "up", "-f", str(examples / "stack.yaml"), "--filter", "echo", cwd=examples)
            ours, theirs = f"{url}/function/echo", f"http://127.0.0.1:{port}/"
            results = {}
            for connections in CONNECTIONS:
                rounds = []
                for each in (ours, theirs):
                    wrk(each, connections, 1, script)  # warm-up
                for turn in range(options.rounds):
                    with console.status(f"{connections} connections, round {turn + 1} of {options.rounds}"):
                        time.sleep(0.2)
                        rounds.append(
                            {
                                "platform": wrk(ours, connections, options.seconds, script),
                                "bare": wrk(theirs, connections, options.seconds, script),
                            }
                        )
                results[connections] = summary(rounds)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    table = Table(title="warm calls: echo, 1 KB JSON", title_justify="left")
    served = ("req/s", "p50 ms", "p99 ms")
    names = ("connections", *(f"platform {each}" for each in served), *(f"bare {each}" for each in served))
    for name in (*names, "share", "goal", "errors"):
        table.add_column(name, justify="right")
    for connections, each in results.items():
        a, b = each["platform"], each["bare"]
        table.add_row(
            str(connections), f"{a['rps']:,.0f}", f"{a['p50_ms']:.2f}", f"{a['p99_ms']:.2f}", f"{b['rps']:,.0f}",
            f"{b['p50_ms']:.2f}", f"{b['p99_ms']:.2f}", f"{each['share']:.2f}", f"{TARGETS[connections]:.2f}",
            f"{a['errors'] + b['errors']:.0f}",
        )  # fmt: skip
    Console().print(table)


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, object]:
    """Return the medians of each server, and the median of the rounds' ratios of requests/s."""
    middle = {
        name: {
            key: statistics.median(each[name][key] for each in rounds) for key in ("rps", "p50_ms", "p99_ms", "errors")
        }
        for name in ("platform", "bare")
    }
    share = statistics.median(each["platform"]["rps"] / each["bare"]["rps"] for each in rounds)
    return {**middle, "share": share}


if __name__ == "__main__":
    main()
