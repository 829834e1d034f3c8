"""
Large bodies: calls with a body of 10 MiB, and calls that are answered with one, as a share of calling directly.

    .venv/bin/python benchmarks/bodies.py [--seconds 3] [--rounds 3] [--json]

The server is an aiohttp program on uvloop, called directly and as a function; beside it the same as a handler of a
template. By turns in one run, with wrk (`apt install wrk`), the ratio taken round by round, medians shown. The bars are
judged at the end; with a missed one it exits with 1.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import httpx
from _deploying import SERVER, deploy
from _judged import least, status_of
from _platform import free_port, platform, process
from _wrk import LUA, compare, options_of, show

SIZE: Final = 10 << 20
TARGETS: Final = {1: 0.8, 4: 0.8}
ANSWER: Final = f"""
LARGE = b"x" * {SIZE}

async def answer(request):
    size = len(await request.read())
    return web.Response(body=LARGE if size < 100 else b"%d" % size)
"""
PROGRAM: Final = SERVER % {"answer": ANSWER, "most": 2 * SIZE}
HANDLER: Final = f"""
LARGE = b"x" * {SIZE}


def handle(event, context):
    size = len(event.body)
    return LARGE if size < 100 else b"%d" % size
"""


def main() -> int:
    options = options_of(__doc__)
    judged = []
    with tempfile.TemporaryDirectory() as folder:
        program, port = Path(folder) / "main.py", free_port()
        program.write_text(PROGRAM)
        direct = f"http://127.0.0.1:{port}/"
        scripts = {"sent": f'string.rep("x", {SIZE})', "answered": '"large"'}
        with (
            platform("--device", "cpu:0=1GiB") as (url, _, _),
            process([sys.executable, str(program)], direct, env={"PORT": str(port)}, stderr=subprocess.DEVNULL),
            httpx.Client(base_url=url, timeout=60) as client,
        ):
            deploy(client, "server", PROGRAM, kind="server")
            deploy(client, "handler", HANDLER, kind="http")
            for name in ("server", "handler"):
                assert client.post(f"/function/{name}", content=b"x" * SIZE).text == str(SIZE)
                assert len(client.post(f"/function/{name}", content=b"large").content) == SIZE
                for case, body in scripts.items():
                    script = Path(folder) / f"{case}.lua"
                    script.write_text(LUA.replace("application/json", "text/plain").replace("[==[%s]==]", body) % ())
                    results = compare(f"{url}/function/{name}", direct, script, TARGETS, options)
                    title = f"10 MiB {case}, function from a {name}"
                    show(title, ("function", "direct"), results, TARGETS, as_json=options.json)
                    judged += [
                        least(f"{title}, {at} connections: share", results[at]["share"], TARGETS[at]) for at in TARGETS
                    ]
    return status_of(judged)


if __name__ == "__main__":
    raise SystemExit(main())
