"""
How many asynchronous calls a second are accepted, each on the disk before its 202: wrk posts 11 bytes to
``/async-function/NAME`` over 64 connections, while the platform executes what it can.

Beside it, in the same run and on the same disk, what the disk allows without sharing: one SQLite transaction (WAL,
synchronous=FULL) for each call. The ratio of the two is what group commit gains, less what HTTP costs.

    .venv/bin/python benchmarks/async_accept.py [--seconds 5] [--rounds 3] [--json]
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from _platform import gpufaas, platform
from _wrk import need_wrk
from rich.console import Console
from rich.table import Table

from gpufaas_adapters.sqlite.async_queue import SqliteAsyncQueue
from gpufaas_async_calls.call import AcceptedCall
from gpufaas_core import local_login

TARGET = 2000
CONNECTIONS = 64
SCRIPT = 'wrk.method = "POST"; wrk.body = "hello world"; wrk.headers["Content-Type"] = "text/plain"'
STACK = """
provider: {name: openfaas, gateway: http://127.0.0.1:8080}
functions:
  bench: {lang: python3-http, handler: ./bench, image: bench:latest}
"""
HANDLER = "def handle(event, context):\n    return event.body\n"


def alone(folder: Path, seconds: float) -> float:
    """Return how many calls a second one commit each allows."""
    queue = SqliteAsyncQueue(folder)
    done, began = 0, time.perf_counter()
    while time.perf_counter() < began + seconds:
        call = AcceptedCall(f"{done}", "bench.openfaas-fn", "bench", b"", b"", (), None, time.time_ns(), b"hello world")
        queue.write([call], [])
        done += 1
    rate = done / (time.perf_counter() - began)
    queue.close()
    return rate


def accepted(url: str, seconds: float) -> tuple[float, float, float]:
    """Return calls a second, and the median and 99th percentile of their latency in ms; ends on any that is not 202."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(SCRIPT)
        script.flush()
        said = subprocess.run(
            ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds:g}s", "--latency", "-s", script.name, url],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    if "Non-2xx" in said or "Socket errors" in said:
        raise SystemExit(f"not all calls were accepted:\n{said}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", said)
    assert rate is not None, said
    return float(rate[1]), _latency(said, "50%"), _latency(said, "99%")


def _latency(said: str, which: str) -> float:
    found = re.search(rf"{which}\s+([\d.]+)(us|ms|s)", said)
    assert found is not None, said
    return float(found[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[found[2]]


def drain(gateway: httpx.Client) -> None:
    """Wait until everything accepted was executed: each round begins with an empty queue."""
    last = -1
    while True:
        count = gateway.get("/system/functions").json()[0]["invocationCount"]
        if count == last:
            return
        last = count
        time.sleep(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    need_wrk()
    rounds = []
    with platform("--device", "cpu:0=400MiB", "--max-async-queue", "1000000") as (url, _, home):
        (home / "stack.yml").write_text(STACK)
        (home / "bench").mkdir()
        (home / "bench" / "handler.py").write_text(HANDLER)
        gpufaas(url, "up", cwd=home)
        with httpx.Client(base_url=url, auth=local_login.find(url), timeout=60, trust_env=False) as gateway:
            gateway.post("/function/bench", content=b"warm")
            for number in range(options.rounds):
                single = alone(home / f"alone-{number}", min(2.0, options.seconds))
                rate, median_ms, p99_ms = accepted(f"{url}/async-function/bench", options.seconds)
                rounds.append({"accepted": rate, "median_ms": median_ms, "p99_ms": p99_ms, "alone": single})
                drain(gateway)
    medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    medians["ratio"] = statistics.median(each["accepted"] / each["alone"] for each in rounds)
    if options.json:
        print(json.dumps({"medians": medians, "rounds": rounds}))
    else:
        table = Table("", "calls/s", "median ms", "p99 ms", title=f"{CONNECTIONS} connections, {options.rounds} rounds")
        table.add_row(
            "accepted, durable",
            f"{medians['accepted']:,.0f}",
            f"{medians['median_ms']:.1f}",
            f"{medians['p99_ms']:.1f}",
        )
        table.add_row("one commit each, no HTTP", f"{medians['alone']:,.0f}", "", "")
        console = Console()
        console.print(table)
        console.print(f"ratio {medians['ratio']:.2f}; target {TARGET:,} accepted/s")
    sys.exit(medians["accepted"] < TARGET)


if __name__ == "__main__":
    main()
