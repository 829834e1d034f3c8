"""
What the gateway costs a plain HTTP function: warm calls through it, as a share of calling the function's port directly.

The function is an aiohttp echo on uvloop, one process, deployed as a program that listens on its port; the upstream it
is compared with is the same program, started beside it. Both are measured in turn, in one run, with wrk (`apt install
wrk`) and an 11-byte POST: rounds of A B A B, the ratio taken round by round, medians shown. OpenFaaS's own gateway, in
Go, reaches 0.38 / 0.35 / 0.52 of the same upstream. With a missed bar it exits with 1.

    .venv/bin/python benchmarks/gateway.py [--seconds 3] [--rounds 3] [--json [FILE]]
"""

import sys
import tempfile
from pathlib import Path

import httpx
from _deploying import SERVER, deploy
from _pairs import Limit, Pairs, load
from _platform import free_port, platform, process
from _servers import Served, Tree
from _wrk import LUA, parser_of, wrk

from gpufaas_core import local_login

TARGETS = {1: 0.40, 16: 0.45, 64: 0.52}
BODY = "hello world"
ECHO = """
async def answer(request):
    return web.Response(body=await request.read())
"""
UPSTREAM = SERVER % {"answer": ECHO, "most": 1 << 20}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script, upstream = Path(folder) / "post.lua", Path(folder) / "upstream.py"
        script.write_text(LUA.replace("application/json", "text/plain") % BODY)
        upstream.write_text(UPSTREAM)
        port = free_port()
        direct = f"http://127.0.0.1:{port}/"
        with (
            platform("--device", "cpu:0=512MiB") as (url, child, _),
            process([sys.executable, str(upstream)], direct, env={"PORT": str(port)}) as bare,
        ):
            with httpx.Client(base_url=url, auth=local_login.find(url), timeout=60) as client:
                deploy(client, "echo", UPSTREAM, kind="server")
                assert client.post("/function/echo", content=BODY).text == BODY
            ours = Served({"echo": f"{url}/function/echo"}, Tree(child.pid))
            sides = [ours, Served({"echo": direct}, Tree(bare.pid))]
            for each in sides:
                wrk(each.urls["echo"], 16, 2, script)  # warm-up
            limits = [Limit("rps", "at least", share, f"{at} connections") for at, share in TARGETS.items()]
            pairs = Pairs(("gateway", "direct"), options.rounds, *limits)
            pairs.measure({f"{at} connections": load("echo", at, options.seconds, script) for at in TARGETS}, sides)
    return pairs.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
