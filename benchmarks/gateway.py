"""
What the gateway costs a plain HTTP function: warm calls through it, as a share of calling the function's port directly.

The function is an aiohttp echo on uvloop, one process, deployed as a program that listens on its port; the upstream it
is compared with is the same program, started beside it. Both are measured in turn, in one run, with wrk (`apt install
wrk`) and an 11-byte POST: rounds of A B A B, the ratio taken round by round, medians shown. OpenFaaS's own gateway, in
Go, reaches 0.38 / 0.35 / 0.52 of the same upstream. With a missed bar it exits with 1.

    .venv/bin/python benchmarks/gateway.py [--seconds 3] [--rounds 3] [--json]
"""

import sys
import tempfile
from pathlib import Path

import httpx
from _deploying import SERVER, deploy
from _judged import least, status_of
from _platform import free_port, platform, process
from _wrk import LUA, compare, options_of, show

TARGETS = {1: 0.40, 16: 0.45, 64: 0.52}
BODY = "hello world"
ECHO = """
async def answer(request):
    return web.Response(body=await request.read())
"""
UPSTREAM = SERVER % {"answer": ECHO, "most": 1 << 20}


def main() -> int:
    options = options_of(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        script, upstream = Path(folder) / "post.lua", Path(folder) / "upstream.py"
        script.write_text(LUA.replace("application/json", "text/plain") % BODY)
        upstream.write_text(UPSTREAM)
        port = free_port()
        with (
            platform("--device", "cpu:0=512MiB") as (url, _, _),
            process([sys.executable, str(upstream)], f"http://127.0.0.1:{port}/", env={"PORT": str(port)}),
        ):
            with httpx.Client(base_url=url, timeout=60) as client:
                deploy(client, "echo", UPSTREAM, kind="server")
                assert client.post("/function/echo", content=BODY).text == BODY
            ours, theirs = f"{url}/function/echo", f"http://127.0.0.1:{port}/"
            results = compare(ours, theirs, script, TARGETS, options)
    show("warm calls of an HTTP function, 11 bytes", ("gateway", "direct"), results, TARGETS, as_json=options.json)
    return status_of([least(f"{at} connections: share of direct", results[at]["share"], TARGETS[at]) for at in TARGETS])


if __name__ == "__main__":
    raise SystemExit(main())
