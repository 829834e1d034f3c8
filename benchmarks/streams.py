"""
Streams side by side: what the platform adds to each token, and what a token costs.

    .venv/bin/python benchmarks/streams.py [--streams 200] [--seconds 5] [--rounds 3] [--base TREE] [--json FILE]

Each stream gets a token every 10 ms, as a server-sent event that says when it was made; the client is on the same
machine, and so reads how long it was on its way. Four servers, alternately: a program on uvicorn, called directly; the
same program as a function, on its port and on the unix socket that the platform offers; and an async generator as a
function. Processor time is that of the server and all its descendants, per token, from /proc. --base: the functions
beside those on the platform of another working tree (`_base.py`), none called directly. The bars are judged at the end;
with a missed one it exits with 1.
"""

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httpx
import uvloop
from _base import measure, options_of, pairs_of
from _deploying import deploy
from _judged import Bar, most, status_of
from _pairs import Row
from _platform import ROOT, free_port, platform, process
from _servers import Served, Tree
from rich.console import Console
from rich.table import Table

from gpufaas_core import local_login

EVERY_S: Final = 0.01
ADDED_MS, SERVER_CPU, GENERATOR_CPU = 3.0, 1.5, 2.5
"""The bars: what the 99th percentile of a token's way grows by, and times the processor time of a direct token."""
NAMES: Final = ("direct", "server function", "server function on a socket", "generator")

_TOKENS: Final = f"""
import asyncio
import time


async def tokens(count):
    loop = asyncio.get_running_loop()
    at = loop.time()
    for _ in range(count):
        at += {EVERY_S}
        await asyncio.sleep(max(0.0, at - loop.time()))
        yield f"data: {{time.monotonic_ns():019}}\\n\\n"
"""
SERVER: Final = f"""
import json
import os

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
{_TOKENS}

async def stream(request):
    return StreamingResponse(tokens(int(await request.body())), media_type="text/event-stream")


async def health(request):
    return JSONResponse("OK")


app = Starlette(routes=[Route("/", stream, methods=["POST"]), Route("/healthz", health)])
uvicorn.run(app, port=int(os.environ["PORT"]), loop="uvloop", http="httptools", access_log=False, log_level="error")
"""
GENERATOR: Final = f"""{_TOKENS}

async def handle(event, context):
    return {{"headers": {{"Content-Type": "text/event-stream"}}, "body": tokens(int(event.body))}}
"""


class Client(asyncio.Protocol):
    """One stream: notes how long each token was on its way while *counts* says so."""

    made: Final = re.compile(rb"data: (\d{19})\n")

    def __init__(self, request: bytes, found: list[int], counts: list[bool]) -> None:
        self._request, self._found, self._counts = request, found, counts
        self.began = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        if not self.began.done():
            if data.startswith(b"HTTP") and b" 200 " not in data[:20]:
                self.began.set_exception(RuntimeError(data[:300].decode(errors="replace")))
            elif self.made.search(data):
                self.began.set_result(None)
        if self._counts[0]:
            self._found += [now - int(made) for made in self.made.findall(data)]

    def close(self) -> None:
        assert self._transport
        self._transport.abort()


async def measured(url: str, tree: Tree, streams: int, seconds: float) -> dict[str, float]:
    """Open all streams, and look at them for so long once all have begun."""
    parts = urlsplit(url)
    body = str(int((seconds + 30) / EVERY_S)).encode()
    lines = (f"POST {parts.path} HTTP/1.1", f"Host: {parts.netloc}", f"Content-Length: {len(body)}", "", "")
    request = "\r\n".join(lines).encode() + body
    found: list[int] = []
    counts = [False]
    loop = asyncio.get_running_loop()
    clients = []
    try:
        for _ in range(streams):
            connected = loop.create_connection(lambda: Client(request, found, counts), parts.hostname, parts.port)
            clients.append((await connected)[1])
            await asyncio.sleep(EVERY_S / 7)  # so that not all tokens are made at one time
        async with asyncio.timeout(20):
            await asyncio.gather(*(each.began for each in clients))
        await asyncio.sleep(0.5)
        used, began, counts[0] = tree.cpu_s()[0], loop.time(), True
        await asyncio.sleep(seconds)
        counts[0], took, used = False, loop.time() - began, tree.cpu_s()[0] - used
    finally:
        for each in clients:
            each.close()
    found.sort()
    await asyncio.sleep(0.5)  # the server ends its streams
    return {
        "tokens": len(found) / took, "expected": streams / EVERY_S, "p50_ms": found[len(found) // 2] / 1e6,
        "p99_ms": found[int(len(found) * 0.99)] / 1e6, "cpu_us": 1e6 * used / len(found),
    }  # fmt: skip


@contextlib.contextmanager
def served(streams: int, tree: Path = ROOT) -> Iterator[Served]:
    """Serve the functions by the platform of *tree*."""
    on_socket = SERVER.replace('port=int(os.environ["PORT"])', 'uds=os.environ["GPUFAAS_SOCKET"]')
    programs = {"server": (SERVER, "server"), "socket": (on_socket, "server"), "generator": (GENERATOR, "http")}
    with platform("--device", "cpu:0=1GiB", tree=tree) as (url, child, _):
        with httpx.Client(base_url=url, auth=local_login.find(url), timeout=60) as client:
            for name, (program, kind) in programs.items():
                deploy(client, name, program, kind=kind, annotations={"gpufaas.slots": str(streams)})
                client.post(f"/function/{name}", content="2").raise_for_status()
        urls = (f"{url}/function/{name}" for name in programs)
        yield Served(dict(zip(NAMES[1:], urls, strict=True)), Tree(child.pid))


def run(options: argparse.Namespace, console: Console) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {name: [] for name in NAMES}
    with TemporaryDirectory() as folder:
        program, port = Path(folder) / "main.py", free_port()
        program.write_text(SERVER)
        direct = f"http://127.0.0.1:{port}/"
        with (
            served(options.streams) as ours,
            process([sys.executable, str(program)], f"{direct}healthz", env={"PORT": str(port)}) as bare,
        ):
            for turn in range(options.rounds):
                for name in NAMES:
                    each = ours if name in ours.urls else Served({name: direct}, Tree(bare.pid))
                    with console.status(f"{name}: {options.streams} streams, round {turn + 1} of {options.rounds}"):
                        found[name].append(part(name, options)(each))
    return found


def part(name: str, options: argparse.Namespace) -> Callable[[Served], Row]:
    return lambda each: uvloop.run(measured(each.urls[name], each.tree, options.streams, options.seconds))


def medians(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return each server's medians; *added*, *times*: of the rounds' differences and ratios to the direct one."""
    rows = {}
    for name, each in found.items():
        both = list(zip(each, found["direct"], strict=True))
        rows[name] = {key: statistics.median(row[key] for row in each) for key in each[0]}
        rows[name]["added"] = statistics.median(row["p99_ms"] - direct["p99_ms"] for row, direct in both)
        rows[name]["times"] = statistics.median(row["cpu_us"] / direct["cpu_us"] for row, direct in both)
    return rows


def bars(rows: dict[str, dict[str, float]]) -> Sequence[Bar]:
    judged = []
    for name in NAMES[1:]:
        limit = GENERATOR_CPU if name == "generator" else SERVER_CPU
        judged.append(most(f"{name}: ms that the p99 of a token's way grows by", rows[name]["added"], ADDED_MS))
        judged.append(most(f"{name}: times the processor time of a direct token", rows[name]["times"], limit))
    return judged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = options_of(parser, rounds=3)
    if options.base:
        pairs, parts = pairs_of(options), {name: part(name, options) for name in NAMES[1:]}
        measure(pairs, options, parts, lambda tree: served(options.streams, tree), lambda mine: mine.urls["generator"])
        return pairs.finish(options)
    found = run(options, Console(stderr=True))
    rows = medians(found)
    if options.json:
        kept: dict[str, Any] = {"streams": options.streams, "seconds": options.seconds, "rounds": found}
        options.json.write_text(json.dumps(kept, indent=1) + "\n")
    shown = Table(title=f"{options.streams} streams, a token every {1e3 * EVERY_S:g} ms each", title_justify="left")
    for heading in ("", "tokens/s", "of", "p50 ms", "p99 ms", "CPU µs a token", "p99 added, ms", "times the CPU"):
        shown.add_column(heading, justify="right" if heading else "left")
    for name, row in rows.items():
        times = (f"{row[key]:.2f}" for key in ("p50_ms", "p99_ms", "cpu_us", "added", "times"))
        shown.add_row(name, f"{row['tokens']:,.0f}", f"{row['expected']:,.0f}", *times)
    Console().print(shown)
    return status_of(bars(rows))


if __name__ == "__main__":
    raise SystemExit(main())
