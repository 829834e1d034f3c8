"""
A neighbour lives: one function does its worst for some seconds, and another one is called meanwhile.

    python benchmarks/neighbour_lives.py [ATTACK ...] [--seconds 10] [--kinds http,model] [--json FILE] [-- OPTION ...]

Each attack has a platform of its own, with OPTION of `gpufaas serve`. The neighbour is called every 10 ms, first beside
an attacker at rest, then during the attack. Goal: all its calls are answered, and their median is at most twice as
long. Exit status 1: one of them was not met. Attacks fill 4 GiB of a disk at most, and signal only what the platform
that is under attack has started.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import httpx
import msgspec
from _document import table
from _platform import gpufaas, platform

FACTOR: Final = 2.0
"""The bar: the median during the attack, of that before."""
PERIOD_S: Final = 0.01
TIMEOUT_S: Final = 5.0
QUIET_S: Final = 4.0
DEVICE: Final = "cpu:0=1GiB"
MOST_BYTES: Final = 4 << 30

ATTACKER = '''
import array, glob, mmap, os, signal, socket, subprocess, sys, threading, time, urllib.request

MOST = {most}


def fork_bomb(end):
    while time.monotonic() < end:
        try:
            if not os.fork():
                os.setsid()
        except OSError:
            pass
    os._exit(0)


def fill(folder, end):
    os.makedirs(folder, exist_ok=True)
    while time.monotonic() < end:
        made, count = [], 0
        try:
            while time.monotonic() < end and count < MOST:
                made.append(os.path.join(folder, f"fill-{{len(made)}}"))
                with open(made[-1], "wb") as file:
                    for _ in range(64):
                        file.write(bytes(1 << 20))
                        count += 1 << 20
        except OSError:
            time.sleep(0.2)  # as full as it gets
        for each in made:
            try:
                os.unlink(each)
            except OSError:
                pass


def many_files(folder, end):
    at = 0
    os.makedirs(os.path.join(folder, "many"), exist_ok=True)
    while time.monotonic() < end and at < 200_000:
        try:
            open(os.path.join(folder, "many", str(at)), "wb").close()
        except OSError:
            time.sleep(0.2)
        at += 1


def syncs(folder, end):
    with open(os.path.join(folder, "synced"), "wb") as file:
        while time.monotonic() < end:
            file.seek(0)
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())


def memory(end):
    while time.monotonic() < end:
        held = []
        try:
            while time.monotonic() < end:
                held.append(bytearray(b"x") * (4 << 20))
        except MemoryError:
            pass


def shared_memory(end):
    while time.monotonic() < end:
        pid = os.fork()
        if not pid:
            held = []
            while time.monotonic() < end:
                held.append(mmap.mmap(-1, 4 << 20))
                held[-1].write(b"x" * (4 << 20))
            os._exit(0)
        os.waitpid(pid, 0)


def signals(end):
    """Stop the fork server's other children, itself, and the platform."""
    def parent(pid):
        return int(open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[1])
    fork_server = os.getppid()
    while time.monotonic() < end:
        targets = [fork_server]
        for each in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                if each != os.getpid() and parent(each) == fork_server:
                    targets.append(each)
                if each == fork_server and parent(fork_server) > 1:
                    targets.append(parent(fork_server))
            except OSError:
                pass
        for each in targets:
            for number in (signal.SIGSTOP, signal.SIGUSR1):
                try:
                    os.kill(each, number)
                except OSError:
                    pass
        time.sleep(0.001)


def burn(end):
    for _ in range(31):
        if not os.fork():
            os.setsid()
            break
    for _ in range(4):
        threading.Thread(target=spin, args=(end,)).start()
    if threading.main_thread() is threading.current_thread():
        spin(end)
        os._exit(0)


def spin(end):
    while time.monotonic() < end:
        pass


def address():
    return ("127.0.0.1", int(os.environ["OPENFAAS_URL"].split("/")[2].rpartition(":")[2]))


def connections(end):
    """Open as many as it may, and say little on each."""
    held = []
    while time.monotonic() < end:
        try:
            held.append(socket.create_connection(address(), timeout=1))
            held[-1].sendall(b"POST /function/neighbour HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: 1000\\r\\n\\r\\n1")
        except OSError:
            held = held[len(held) // 2:]
    del held


def descriptors(end):
    held = []
    while time.monotonic() < end:
        try:
            held += os.pipe()
            held.append(os.memfd_create("x"))
        except OSError:
            for each in held:
                os.close(each)
            held = []


def requests(end, line):
    """Send one request after the other on 8 connections, and read what comes."""
    def one():
        while time.monotonic() < end:
            try:
                with socket.create_connection(address(), timeout=2) as made:
                    while time.monotonic() < end:
                        made.sendall(line)
                        made.recv(1 << 20)
            except OSError:
                pass
    for _ in range(7):
        threading.Thread(target=one).start()
    one()


def streams(end):
    requests(end, b"POST /function/attacker HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: 7\\r\\n\\r\\nstream ")


def asynchronous(end):
    body = bytes(1 << 20)
    head = b"POST /async-function/attacker HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body)
    requests(end, head + body)


def prints(end, stream):
    while time.monotonic() < end:
        os.write(stream, b"flood\\n" * 10_000)


def open_lines(end, stream):
    while time.monotonic() < end:
        os.write(stream, b"x" * 65536)


SCRATCH, COMPILED = os.environ.get("GPUFAAS_SCRATCH", "/tmp"), os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/tmp/none")
ATTACKS = {{
    "fork-bomb": fork_bomb, "burn": burn, "memory": memory, "shared-memory": shared_memory, "signals": signals,
    "fill-tmp": lambda end: fill("/tmp/fill", end), "fill-shm": lambda end: fill("/dev/shm/fill", end),
    "fill-scratch": lambda end: fill(SCRATCH, end), "fill-compiled": lambda end: fill(COMPILED, end),
    "many-files": lambda end: many_files(SCRATCH, end), "syncs": lambda end: syncs(SCRATCH, end),
    "connections": connections, "descriptors": descriptors, "streams": streams, "async": asynchronous,
    "prints": lambda end: prints(end, 1), "open-lines": lambda end: open_lines(end, 2),
}}


def endless():
    end = time.monotonic() + 15
    while time.monotonic() < end:
        yield bytes(65536)


def begin(what, seconds):
    """The attack has a process of its own: it is to hurt the worker of another function, not its own answers."""
    if what not in ATTACKS:
        return
    if what == "signals":  # by its place in the tree
        threading.Thread(target=ATTACKS[what], args=(time.monotonic() + seconds,), daemon=True).start()
    elif not os.fork():
        try:
            ATTACKS[what](time.monotonic() + seconds)
        finally:
            os._exit(0)
'''
HTTP = """
def handle(event, context):
    words = bytes(event.body or b"").decode().split()
    if words == ["stream"]:
        return {"statusCode": 200, "body": endless()}
    if len(words) == 2:
        begin(words[0], float(words[1]))
    return {"statusCode": 200, "body": b"here"}
"""
MODEL = """
def load(device):
    return None


def handle(model, event, context):
    words = bytes(event.body).decode().split()
    if words == ["stream"]:
        return endless()
    if len(words) == 2:
        begin(words[0], float(words[1]))
    return "here"
"""
NEIGHBOURS: Final = {
    "http": 'def handle(event, context):\n    return {"statusCode": 200, "body": b"here"}\n',
    "model": "def load(device):\n    return None\n\n\ndef handle(model, event, context):\n    return 'here'\n",
}
LANGUAGES: Final = {"http": "python3-http", "model": "python3-torch"}
ATTACKS: Final = (
    "none", "fork-bomb", "burn", "memory", "shared-memory", "signals", "fill-tmp", "fill-shm", "fill-scratch",
    "fill-compiled", "many-files", "syncs", "connections", "descriptors", "streams", "async", "prints", "open-lines",
)  # fmt: skip

CALLS: Final = ("streams", "async")
"""Attacks by calls. Those of models take turns on the device, which is the policy's and the quotas' matter."""


class Lived(msgspec.Struct, frozen=True):
    """How the neighbour lived."""

    attack: str
    kind: str
    quiet_ms: float
    """Median of its calls before the attack, in milliseconds."""
    during_ms: float
    p99_ms: float
    """During the attack."""
    calls: int
    failed: int
    """Calls during the attack without an answer of the function within 5 s."""
    why: str
    """The first failure."""

    @property
    def met(self) -> bool:
        return not self.failed and self.during_ms <= FACTOR * self.quiet_ms


def write_functions(home: Path, kind: str) -> None:
    source = {"attacker": ATTACKER.format(most=MOST_BYTES) + (HTTP if kind == "http" else MODEL)}
    source["neighbour"] = NEIGHBOURS[kind]
    functions = {}
    for name, text in source.items():
        (home / name).mkdir()
        (home / name / "handler.py").write_text(text)
        annotations = {"gpufaas.memory": "256MiB"} if kind == "model" or name == "attacker" else {}
        functions[name] = {
            "lang": LANGUAGES[kind], "handler": f"./{name}", "image": f"{name}:latest", "annotations": annotations,
        }  # fmt: skip
    stack = {"version": "1.0", "provider": {"name": "openfaas"}, "functions": functions}
    (home / "stack.yaml").write_text(json.dumps(stack))


async def called(http: httpx.AsyncClient, seconds: float) -> tuple[list[float], list[str]]:
    """Call the neighbour every 10 ms, or as soon as it has answered; return seconds of its answers, and failures."""
    took, failed = [], []
    end = time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        try:
            answer = await http.post("/function/neighbour", content=b"hello")
            if answer.status_code == 200 and answer.text == "here":
                took.append(time.monotonic() - began)
            else:
                failed.append(f"{answer.status_code} {answer.text[:200]}")
        except httpx.HTTPError as exc:
            failed.append(repr(exc))
        await asyncio.sleep(max(0.0, began + PERIOD_S - time.monotonic()))
    return took, failed


async def lived(url: str, attack: str, kind: str, seconds: float) -> Lived:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as http:
        (await http.post("/function/attacker")).raise_for_status()
        await called(http, 1.0)
        quiet, _ = await called(http, QUIET_S)
        (await http.post("/function/attacker", content=f"{attack} {seconds}".encode())).raise_for_status()
        during, failed = await called(http, seconds)
    ms = sorted(1000 * each for each in during) or [0.0]
    return Lived(
        attack, kind, 1000 * statistics.median(quiet), statistics.median(ms), ms[int(0.99 * len(ms))],
        len(during) + len(failed), len(failed), (failed or [""])[0],
    )  # fmt: skip


def measured(attack: str, kind: str, seconds: float, options: list[str]) -> Lived:
    with tempfile.TemporaryDirectory(prefix="gpufaas-neighbour-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        write_functions(home, kind)
        with platform("--device", DEVICE, *options, home=home) as (url, *_):
            gpufaas(url, "up", "-f", str(home / "stack.yaml"), cwd=home)
            return asyncio.run(lived(url, attack, kind, seconds))


def row(each: Lived) -> list[str]:
    times = f"{each.during_ms / each.quiet_ms:.2f}"
    return [
        each.attack, each.kind, f"{each.quiet_ms:.1f}", f"{each.during_ms:.1f}", times, f"{each.p99_ms:.0f}",
        str(each.calls), str(each.failed), "met" if each.met else f"**not met** {each.why}",
    ]  # fmt: skip


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("attacks", nargs="*", default=list(ATTACKS), metavar="ATTACK", help=", ".join(ATTACKS))
    arguments.add_argument("--seconds", type=float, default=10.0)
    arguments.add_argument("--kinds", default="http,model")
    arguments.add_argument("--json", type=Path, help="write the figures to this file, too")
    own, _, rest = " ".join(sys.argv[1:]).partition(" -- ")
    options = arguments.parse_args(own.split())
    found = []
    for kind in options.kinds.split(","):
        for attack in options.attacks if kind == "http" else [each for each in options.attacks if each not in CALLS]:
            found.append(measured(attack, kind, options.seconds, rest.split()))
            print(*row(found[-1]), file=sys.stderr)
    head = ["attack", "kind", "quiet, ms", "during, ms", "of quiet", "p99, ms", "calls", "failed", "bar"]
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n\n{table(head, map(row, found))}")
    if options.json is not None:
        options.json.write_bytes(msgspec.json.encode(found))
    return 0 if all(each.met for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
