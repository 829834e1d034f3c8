"""
Large bodies: calls with a body of 10 MiB, and calls that are answered with one, as a share of calling directly.

    .venv/bin/python benchmarks/bodies.py [--seconds 3] [--rounds 3] [--base TREE] [--json [FILE]]

The server is an aiohttp program on uvloop, called directly and as a function; beside it the same as a handler of a
template. By turns in one run, with wrk (`apt install wrk`), the ratio taken round by round, medians shown. --base: the
platform of another working tree in place of the direct server (`_base.py`). The bars are judged at the end; with a
missed one it exits with 1.
"""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
from _base import measure, options_of, pairs_of
from _deploying import SERVER, deploy
from _pairs import Limit, Pairs, load
from _platform import ROOT, free_port, platform, process
from _servers import Served, Tree
from _wrk import LUA, parser_of, wrk

from gpufaas_core import local_login

SIZE: Final = 10 << 20
CONNECTIONS: Final = (1, 4)
SHARE: Final = 0.8
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


NAMES: Final = ("server", "handler")
SCRIPTS: Final = {"sent": f'string.rep("x", {SIZE})', "answered": '"large"'}


@contextlib.contextmanager
def served(tree: Path = ROOT) -> Iterator[Served]:
    """Serve both functions by the platform of *tree*."""
    with platform("--device", "cpu:0=1GiB", tree=tree) as (url, child, _):
        with httpx.Client(base_url=url, auth=local_login.find(url), timeout=60) as client:
            deploy(client, "server", PROGRAM, kind="server")
            deploy(client, "handler", HANDLER, kind="http")
            for name in NAMES:
                assert client.post(f"/function/{name}", content=b"x" * SIZE).text == str(SIZE)
                assert len(client.post(f"/function/{name}", content=b"large").content) == SIZE
        yield Served({name: f"{url}/function/{name}" for name in NAMES}, Tree(child.pid))


def main() -> int:
    options = options_of(parser_of(__doc__), rounds=3)
    with tempfile.TemporaryDirectory() as folder:
        parts = {}
        for case, body in SCRIPTS.items():
            script = Path(folder) / f"{case}.lua"
            script.write_text(LUA.replace("application/json", "text/plain").replace("[==[%s]==]", body) % ())
            for name in NAMES:
                for at in CONNECTIONS:
                    told = f"10 MiB {case}, function from a {name}, {at} connections"
                    parts[told] = load(name, at, 1.0 if options.base else options.seconds, script)
        if options.base:
            pairs = pairs_of(options, options.seconds)
            measure(pairs, options, parts, served, lambda mine: mine.urls["handler"])
            return pairs.finish(options)
        program, port = Path(folder) / "main.py", free_port()
        program.write_text(PROGRAM)
        direct, env = f"http://127.0.0.1:{port}/", {"PORT": str(port)}
        with (
            served() as mine,
            process([sys.executable, str(program)], direct, env=env, stderr=subprocess.DEVNULL) as child,
        ):
            sides = [mine, Served(dict.fromkeys(NAMES, direct), Tree(child.pid))]
            for each in sides:
                for name in NAMES:
                    wrk(each.urls[name], 4, 1, script)  # warm-up
            pairs = Pairs(("function", "direct"), options.rounds, Limit("rps", "at least", SHARE))
            pairs.measure(parts, sides)
            return pairs.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
