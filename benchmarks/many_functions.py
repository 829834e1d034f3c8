"""
Many functions: a warm call where 400 functions are deployed against one where 10 are.

    .venv/bin/python benchmarks/many_functions.py [--functions 400] [--seconds 2] [--rounds 8] [--json [FILE]]

Two platforms, the same function (`echo`, 1 KB), alternately, with wrk (`apt install wrk`) at 1 and 16 connections; the
others are deployed, and nobody calls them. Median latency and processor time of a call, from /proc, as ratios
round by round. The bars are judged at the end; with a missed one it exits with 1.
"""

import tempfile
from pathlib import Path
from typing import Final

import httpx
from _deploying import deploy
from _pairs import Limit, Pairs, load
from _platform import platform
from _servers import Served, Tree
from _wrk import BODY, LUA, parser_of, wrk
from rich.console import Console

from gpufaas_core import local_login

CONNECTIONS: Final = (1, 16)
FEW, TIMES = 10, 1.05
"""The bar: the latency and the processor time of a call, as a multiple of that where ten functions are deployed."""
ECHO: Final = """
import json


def handle(event, context):
    return {"headers": {"Content-Type": "application/json"}, "body": event.json()}
"""


def fill(url: str, functions: int, console: Console) -> None:
    """Deploy so many functions."""
    with (
        httpx.Client(base_url=url, auth=local_login.find(url), timeout=120) as client,
        console.status(f"deploying {functions} functions"),
    ):
        for number in range(functions):
            deploy(client, f"f{number}", ECHO, kind="http")
        client.post("/function/f0", content=BODY).raise_for_status()


def main() -> int:
    parser = parser_of(__doc__, seconds=2.0)
    parser.add_argument("--functions", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    limits = (Limit("p50_ms", "at most", TIMES), Limit("cpu_us", "at most", TIMES))
    pairs = Pairs([f"{number} functions" for number in (options.functions, FEW)], options.rounds, *limits)
    device = ("--device", "cpu:0=512MiB")
    with tempfile.TemporaryDirectory() as folder, platform(*device) as many, platform(*device) as few:
        script = Path(folder) / "post.lua"
        script.write_text(LUA % BODY)
        servers = []
        for (url, child, _), functions in ((many, options.functions), (few, FEW)):
            fill(url, functions, Console(stderr=True))
            servers.append(Served({"f0": f"{url}/function/f0"}, Tree(child.pid)))
            wrk(f"{url}/function/f0", 16, 2, script)  # warm-up
        parts = {f"echo, {at} connections": load("f0", at, options.seconds, script) for at in CONNECTIONS}
        pairs.measure(parts, servers)
    return pairs.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
