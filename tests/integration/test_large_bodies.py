"""Bodies and answers of megabytes, which node and worker pass through memory that they share."""

import contextlib
import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.integration.conftest import HTTP, Platform
from tests.waiting import until

SIZE = 3_000_000
SAYS = """
    import hashlib, os, signal, time

    def handle(event, context):
        match event.path:
            case "/digest":
                return hashlib.sha256(event.body).hexdigest()
            case "/echo":
                return event.body
            case "/kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "/wait":
                gate = event.headers["x-gate"]
                open(gate + ".began", "w").close()
                until = time.monotonic() + 60
                while not os.path.exists(gate) and time.monotonic() < until:
                    time.sleep(0.005)
            case "/fork":
                if not os.fork():
                    gate = event.headers["x-gate"]
                    until = time.monotonic() + 60
                    while not os.path.exists(gate) and time.monotonic() < until:
                        time.sleep(0.005)
                    with open(gate + ".part", "w") as said:
                        said.write(hashlib.sha256(event.body).hexdigest())
                    os.rename(gate + ".part", gate + ".said")
                    os._exit(0)
            case "/maps":
                return open("/proc/self/maps").read()
        return event.body[:1] * int(event.headers.get("x-size", 0))
"""
AS_MODEL = SAYS.replace("handle(event", "handle(model, event") + "\n    def load(device):\n        return 1\n"
AS_ASYNC = AS_MODEL.replace("def handle", "async def handle")
IN_BATCHES = """
    import hashlib

    def load(device):
        return 1

    def handle_batch(model, events, contexts):
        return [each.body if each.path == "/echo" else hashlib.sha256(each.body).hexdigest() for each in events]
"""


def body_of(number: int, size: int = SIZE) -> bytes:
    return (b"%d-" % number * (size // 2 + 1))[:size]


def files_for_bodies(platform: Platform) -> int:
    """Return how many memory files and files of the spool the serving process has open."""
    links = []
    for each in Path(f"/proc/{platform.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(each))
    return sum("/memfd:" in each or "/body-" in each for each in links)


@pytest.mark.parametrize(
    ("source", "lang", "options"),
    [(SAYS, HTTP, {}), (AS_MODEL, "", {}), (AS_ASYNC, "", {"slots": "4"}), (IN_BATCHES, "", {"batch_max": "4"})],
    ids=["cpu", "model", "async", "batch"],
)
def test_each_call_gets_its_own_bytes(platform: Platform, source: str, lang: str, options: dict[str, str]) -> None:
    given = (lang,) if lang else ()
    path = platform.deploy("bodies", source, *given, memory="300Mi", **options)
    platform.call(f"{path}/digest", b"warm")
    before = files_for_bodies(platform)

    def call(number: int) -> bool:
        size = SIZE if number % 3 else 100_000
        body = body_of(number, size)
        echo = platform.http.post(f"{path}/echo", content=body).content
        digest = platform.http.post(f"{path}/digest", content=body).text
        return (echo, digest) == (body, hashlib.sha256(body).hexdigest())

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(call, range(24)))

    until(lambda: platform.spooled() == [])
    until(lambda: files_for_bodies(platform) <= before, "what calls had open is closed")


def test_pipelined_large_answers_come_whole_and_in_order(platform: Platform) -> None:
    path = platform.deploy("bodies", SAYS, HTTP, memory="300Mi")
    for _ in range(3):
        platform.call(path, b"a", headers={"x-size": str(SIZE)})
    sizes = [SIZE, 100_000, 5, SIZE, 2 * SIZE]
    requests = [
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nX-Size: {size}\r\n"
        f"{'Connection: close' if at == len(sizes) - 1 else 'X-At: 1'}\r\n\r\n{at}".encode()
        for at, size in enumerate(sizes)
    ]

    with platform.socket() as caller:
        caller.sendall(b"".join(requests))
        said = b"".join(iter(lambda: caller.recv(1 << 20), b""))

    found = [(int(match[1]), match.end()) for match in re.finditer(rb"content-length: (\d+)\r\n", said)]
    assert [size for size, _ in found] == sizes
    for at, (size, end) in enumerate(found):
        begin = said.index(b"\r\n\r\n", end - 2) + 4
        assert said[begin : begin + size] == b"%d" % at * size


@pytest.mark.parametrize("how", ["leaves", "dies"])
def test_a_caller_who_leaves_and_a_worker_that_dies_cost_only_their_call(platform: Platform, how: str) -> None:
    path = platform.deploy("bodies", AS_MODEL, memory="300Mi")
    for _ in range(3):
        platform.call(f"{path}/echo", body_of(1))
    before = files_for_bodies(platform)
    if how == "dies":
        answer = platform.http.post(f"{path}/kill", content=body_of(2))
        assert answer.status_code == 502, answer.text
    else:
        gate = platform.gate()
        request = (
            f"POST {path}/wait HTTP/1.1\r\nHost: x\r\nX-Gate: {gate.body.decode()}\r\nContent-Length: {SIZE}\r\n\r\n"
        )
        with platform.socket() as caller:
            caller.sendall(request.encode() + body_of(2))
            until(gate.reached, "it runs")
        gate.open()

    assert platform.http.post(f"{path}/echo", content=body_of(3)).content == body_of(3)
    until(lambda: files_for_bodies(platform) <= before, "what the call had open is closed")


@pytest.mark.parametrize(("source", "lang"), [(SAYS, HTTP), (AS_ASYNC, "")], ids=["cpu", "async"])
def test_a_child_that_outlives_its_call_reads_no_other_body(platform: Platform, source: str, lang: str) -> None:
    path = platform.deploy("bodies", source, *((lang,) if lang else ()), memory="300Mi")
    for number in range(3):
        platform.call(f"{path}/digest", body_of(number))
    gate = platform.gate()
    name = gate.body.decode()
    assert platform.call(f"{path}/fork", body_of(7), headers={"x-gate": name}).status_code == 200

    for number in range(10, 14):
        assert platform.call(f"{path}/echo", body_of(number)).content == body_of(number)
    gate.open()

    said = Path(name + ".said")
    until(said.exists, "the child has read the body")
    assert said.read_text() == hashlib.sha256(body_of(7)).hexdigest()


def test_what_node_and_worker_share_is_no_memory_of_the_workers(platform: Platform) -> None:
    """With what both have mapped, it would be over its memory."""
    path = platform.deploy("bodies", AS_MODEL, memory="48Mi")
    size = 24_000_000
    shared = [
        shared_by(platform)
        for _ in range(6)
        if len(platform.call(path, b"a", headers={"x-size": str(size)}).content) == size
    ]

    assert len(shared) == 6
    assert max(shared) >= size, "answers lie in it"
    assert len(platform.workers()) == 1
    (device,) = (each for each in platform.status()["devices"] if each["resident"])
    assert device["resident"][0]["memory"] < (48 << 20) + size // 2


def shared_by(platform: Platform) -> int:
    """Return how much of the memory for bodies the worker has mapped and used, in bytes."""
    (worker,) = platform.workers()
    maps = worker.memory_maps(grouped=False)
    return sum(each.rss for each in maps if "gpufaas-begun" in each.path)
