"""Large answers of functions that speak HTTP: they go from one socket to the other, past the parser."""

import functools
import hashlib
import io
import json
import random
import socket
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.integration.conftest import Platform
from tests.waiting import until

SIZE = 3_000_000
PROGRAM = """
import asyncio, contextlib, os, random

connections = 0

async def serve(reader, writer):
    global connections
    connections += 1
    while line := await reader.readline():
        method, target, _ = line.decode().split()
        size = 0
        while (header := await reader.readline()) != b"\\r\\n":
            if header.lower().startswith(b"content-length:"):
                size = int(header.partition(b":")[2])
        await reader.readexactly(size)
        _, how, size = target.split("/")
        body = str(connections).encode() if how == "connections" else random.Random(int(size)).randbytes(int(size))
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body))
        if method == "HEAD":
            continue
        if how in ("whole", "connections"):
            writer.write(body)
            continue
        writer.transport.set_write_buffer_limits(0)  # else `drain` leaves some of it in this process
        writer.write(body[: len(body) // 2])
        if how == "dies":
            await writer.drain()
            os._exit(1)
        elif how == "waits":
            with contextlib.suppress(OSError):  # reset, if some of the answer was not read
                await reader.read()
            print("the caller of", size, "is gone", flush=True)
        break
    writer.close()

async def main():
    if "on_socket" in os.environ:
        listening = asyncio.start_unix_server(serve, os.environ["GPUFAAS_SOCKET"])
    else:
        listening = asyncio.start_server(serve, "127.0.0.1", int(os.environ["PORT"]))
    async with await listening as server:
        # The kernel closes these between a connection and what listens: for a while one can connect to who has ended.
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(900)]
        await server.serve_forever()

asyncio.run(main())
"""


def deploy_program(platform: Platform, name: str, program: str, env: dict[str, str], **more: str) -> str:
    """Deploy a server of four slots, whose *program* is one Python file; return its path."""
    packed = io.BytesIO()
    manifest = {"kind": "server", "template": "test", "command": ["python", "main.py"]}
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for file, text in (("gpufaas.json", json.dumps(manifest)), ("function/main.py", program)):
            member = tarfile.TarInfo(file)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    digest = hashlib.sha256(packed.getvalue()).hexdigest()
    platform.http.put(f"/system/artifacts/{digest}", content=packed.getvalue()).raise_for_status()
    annotations = {"gpufaas.bundle": digest, "gpufaas.memory": "300Mi", "gpufaas.slots": "4", **more}
    spec = {"service": name, "image": name, "annotations": annotations, "envVars": env}
    platform.deploy_spec(spec).raise_for_status()
    return f"/function/{name}"


@pytest.fixture(params=["port", "socket"])
def path(platform: Platform, request: pytest.FixtureRequest) -> Iterator[str]:
    yield deploy_program(platform, "large", PROGRAM, {"on_socket": "1"} if request.param == "socket" else {})
    platform.remove_all()
    until(lambda: not list((platform.data / "sockets").iterdir()), "no socket outlives its worker")


@functools.cache  # made once: a connection that is not used for a second meanwhile is not kept
def body_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def read_answer(caller: socket.socket, *, bodiless: bool = False, piece_s: float = 0) -> bytes:
    """
    Return the body of an answer, and read no further. It is shorter than it says if the connection ends, and empty if
    its time was up before it began.

    :param piece_s: how long to wait before each piece of 256 KB
    """
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += caller.recv(1)
    if b" 504 " in head:
        return b""
    assert head.startswith(b"HTTP/1.1 200 OK\r\n"), head
    left = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
    body = b""
    while not bodiless and len(body) < left and (piece := caller.recv(min(left - len(body), 256_000))):
        body += piece
        time.sleep(piece_s)
    return body


def test_each_call_gets_its_own_bytes_and_connections_are_kept(platform: Platform, path: str) -> None:
    sizes = [SIZE, 70_000, 2 * SIZE, 60_000, 5] * 5

    def call(size: int) -> bool:
        return platform.call(f"{path}/whole/{size}", b"x").content == body_of(size)

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(call, sizes))

    assert int(platform.call(f"{path}/connections/0").content) <= len(sizes) // 2


def test_pipelined_answers_come_whole_and_in_order(platform: Platform, path: str) -> None:
    requests = [("GET", SIZE), ("HEAD", SIZE), ("POST", 5), ("GET", 2 * SIZE), ("GET", 70_000)]

    with platform.socket() as caller:
        for method, size in requests:
            caller.sendall(f"{method} {path}/whole/{size} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        for method, size in requests:
            head = method == "HEAD"
            assert read_answer(caller, bodiless=head) == (b"" if head else body_of(size))


def test_who_reads_slowly_gets_all_and_holds_nobody_up(platform: Platform, path: str) -> None:
    slow = [platform.socket() for _ in range(4)]  # as many as it has slots
    for caller in slow:
        caller.sendall(f"GET {path}/whole/{4 * SIZE} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert caller.recv(1, socket.MSG_PEEK)
    until(platform.is_idle, "what nobody reads waits on disk")

    assert platform.call(f"{path}/whole/{SIZE}", b"x").content == body_of(SIZE)

    for caller in slow:
        assert read_answer(caller) == body_of(4 * SIZE)
        caller.close()


@pytest.mark.parametrize("how", ["breaks", "dies", "waits"])
def test_half_an_answer_is_not_taken_for_whole(platform: Platform, path: str, how: str) -> None:
    platform.call(f"{path}/whole/5", b"x")

    def half_came() -> bool:
        limit = "X-Timeout: 1s\r\n" if how == "waits" else ""
        with platform.socket() as caller:
            caller.sendall(f"GET {path}/{how}/{SIZE} HTTP/1.1\r\nHost: x\r\n{limit}\r\n".encode())
            return read_answer(caller) == body_of(SIZE)[: SIZE // 2]

    if how == "waits":
        until(half_came, "half of it comes before its time is up")
    else:
        assert half_came()

    assert platform.call(f"{path}/whole/{SIZE}", b"x").content == body_of(SIZE)
    until(platform.is_idle, "its slot is free")


def test_what_a_dying_server_has_sent_comes_also_to_who_reads_slowly(platform: Platform, path: str) -> None:
    platform.call(f"{path}/whole/5", b"x")

    with platform.socket() as caller:
        caller.sendall(f"GET {path}/dies/{8 * SIZE} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert read_answer(caller, piece_s=0.03) == body_of(8 * SIZE)[: 4 * SIZE]


def test_a_caller_who_leaves_in_the_middle_ends_the_call(platform: Platform, path: str) -> None:
    with platform.socket() as caller:
        caller.sendall(f"GET {path}/waits/{SIZE} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert caller.recv(1 << 20)

    until(lambda: f"the caller of {SIZE} is gone" in platform.log("large"), "the server is told")
    until(platform.is_idle, "its slot is free")
    assert platform.call(f"{path}/whole/{SIZE}", b"x").content == body_of(SIZE)
