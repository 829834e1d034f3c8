"""
What the gateway costs a plain HTTP function: warm calls through it, as a share of calling the function's port directly.

The function is an aiohttp echo on uvloop, one process, deployed as a program that listens on its port; the upstream it
is compared with is the same program, started beside it. Both are measured in turn, in one run, with wrk (`apt install
wrk`) and an 11-byte POST: rounds of A B A B, the ratio taken round by round, medians shown. OpenFaaS's own gateway, in
Go, reaches 0.38 / 0.35 / 0.52 of the same upstream.

    .venv/bin/python benchmarks/gateway.py [--seconds 3] [--rounds 3] [--json]
"""

import argparse
import hashlib
import io
import json
import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import httpx
from _platform import free_port, platform, process
from overhead import LUA, summary, wrk
from rich.console import Console
from rich.table import Table

CONNECTIONS = (1, 16, 64)
TARGETS = {1: 0.20, 16: 0.20, 64: 0.25}
BODY = "hello world"
UPSTREAM = """
import asyncio
import os
import uvloop
from aiohttp import web

async def echo(request):
    return web.Response(body=await request.read())

async def main():
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", echo)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(os.environ["PORT"]), backlog=1024).start()
    await asyncio.Event().wait()

uvloop.run(main())
"""


def deploy(url: str, name: str) -> None:
    """Deploy the upstream as a bundle of kind server."""
    manifest = {"kind": "server", "template": "benchmark", "command": ["python", "main.py"]}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path, text in (("gpufaas.json", json.dumps(manifest)), ("function/main.py", UPSTREAM)):
            member = tarfile.TarInfo(path)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    digest = hashlib.sha256(packed.getvalue()).hexdigest()
    with httpx.Client(base_url=url, timeout=60) as client:
        client.put(f"/system/artifacts/{digest}", content=packed.getvalue()).raise_for_status()
        spec = {"service": name, "image": name, "annotations": {"gpufaas.bundle": digest}}
        answer = client.post("/system/functions", json=spec)
        if answer.is_error:
            raise SystemExit(answer.text)
        assert client.post(f"/function/{name}", content=BODY).text == BODY


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
        script, upstream = Path(folder) / "post.lua", Path(folder) / "upstream.py"
        script.write_text(LUA.replace("application/json", "text/plain") % BODY)
        upstream.write_text(UPSTREAM)
        port = free_port()
        with (
            platform("--device", "cpu:0=512MiB") as (url, _, _),
            process([sys.executable, str(upstream)], f"http://127.0.0.1:{port}/", env={"PORT": str(port)}),
        ):
            deploy(url, "echo")
            ours, theirs = f"{url}/function/echo", f"http://127.0.0.1:{port}/"
            results = {}
            for connections in CONNECTIONS:
                for each in (ours, theirs):
                    wrk(each, connections, 1, script)  # warm-up
                rounds = []
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
    table = Table(title="warm calls of an HTTP function, 11 bytes", title_justify="left")
    served = ("req/s", "p50 ms", "p99 ms")
    names = ("connections", *(f"gateway {each}" for each in served), *(f"direct {each}" for each in served))
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


if __name__ == "__main__":
    main()
