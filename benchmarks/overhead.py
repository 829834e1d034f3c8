"""
What the platform adds to a warm call: `echo` (1 KB of JSON, parsed and serialised) against a bare Starlette server.

Both are measured in turn, in one run, on this machine, with wrk (`apt install wrk`) as load: rounds of A B A B, the
ratio taken round by round, medians shown. The machine's speed drifts; the ratio hardly does.

    .venv/bin/python benchmarks/overhead.py [--seconds 3] [--rounds 3] [--json]
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from _platform import ROOT, free_port, gpufaas, platform, process
from _wrk import LUA, compare, options_of, show

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


def main() -> None:
    options = options_of(__doc__)
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
            results = compare(ours, theirs, script, TARGETS, options)
    show("warm calls: echo, 1 KB JSON", ("platform", "bare"), results, TARGETS, as_json=options.json)


if __name__ == "__main__":
    main()
