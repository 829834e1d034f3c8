"""A server of every kind of answer, on asyncio streams alone: what the contract of HTTP workers is tested with."""

import asyncio
import json
import os
import signal
import sys

PORT = int(os.environ.get("PORT", "8080"))
calls = 0
connections = 0
at_once = most = 0
"""Calls of /chunked: now, and at most."""
gone_on = asyncio.Event()


def answer(status: str, body: bytes = b"", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


async def body_of(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0")))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    global calls, connections, at_once, most
    connections += 1
    while line := await reader.readline():
        method, target, _ = line.decode("latin-1").split(" ")
        pairs = []
        while (header := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = header.decode("latin-1").rstrip("\r\n").partition(": ")
            pairs.append((name.lower(), value))
        headers = dict(pairs)
        path = target.partition("?")[0]
        if path == "/early":
            writer.write(answer("413 Too Large", b"too much", "connection: close\r\n"))
            await writer.drain()
            break
        if path == "/duplex":
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            while size := int(await reader.readline(), 16):
                piece = await reader.readexactly(size)
                await reader.readline()
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
            await reader.readline()
            writer.write(b"0\r\n\r\n")
            continue
        body = await body_of(reader, headers)
        calls += 1
        match path:
            case "/_/health":
                writer.write(answer("200 OK" if not os.path.exists("/tmp/unhealthy") else "503 Sick"))
            case "/echo":
                writer.write(answer("200 OK", body, "content-type: application/x-echo\r\nx-one: 1\r\nX-One: 2\r\n"))
            case "/seen":
                seen = {"method": method, "target": target, "headers": pairs, "bytes": len(body)}
                writer.write(answer("200 OK", json.dumps(seen).encode()))
            case "/count":
                counts = {"calls": calls, "connections": connections, "most": most}
                writer.write(answer("200 OK", json.dumps(counts).encode()))
            case "/env":
                writer.write(answer("200 OK", json.dumps(dict(os.environ)).encode()))
            case "/secret":
                folder = os.environ.get("secret_mount_path", "/var/openfaas/secrets")  # noqa: SIM112
                with open(os.path.join(folder, target.partition("?")[2]), "rb") as file:  # noqa: ASYNC230
                    writer.write(answer("200 OK", file.read()))
            case "/write":
                try:
                    with open(target.partition("?")[2], "w") as file:  # noqa: ASYNC230
                        file.write("x")
                    writer.write(answer("200 OK", b"written"))
                except OSError as exc:
                    writer.write(answer("500 No", str(exc).encode()))
            case "/chunked":
                at_once += 1
                most = max(most, at_once)
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-end\r\n\r\n")
                for piece in (b"one,", b"two,", b"three"):
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    await writer.drain()
                    await asyncio.sleep(0.05)
                at_once -= 1
                writer.write(b"0\r\nx-end: yes\r\n\r\n")
            case "/eof":
                writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nuntil the ")
                await writer.drain()
                await asyncio.sleep(0.05)
                writer.write(b"end")
                break
            case "/early-hints":
                writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + answer("200 OK", b"after the hints"))
            case "/empty":
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            case "/unchanged":
                writer.write(b"HTTP/1.1 304 Not Modified\r\ncontent-length: 7\r\n\r\n")
            case "/head":
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n" + (b"" if method == "HEAD" else b"seven77")
                )
            case "/apart":  # head and a short body in two writes, as many servers do it
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n")
                await writer.drain()
                await asyncio.sleep(0)
                writer.write(b"body")
            case "/drips":  # the second half after a call of /go-on
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\none")
                await writer.drain()
                await gone_on.wait()
                writer.write(b"two")
            case "/go-on":
                gone_on.set()
                writer.write(answer("200 OK"))
            case "/longer":
                size = int(target.partition("?")[2])
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n\r\n".encode() + b"x" * (size + 1))
            case "/half":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\nonly this")
                break
            case "/mute":
                break
            case "/garbage":
                writer.write(b"SMTP ready when you are\r\n\r\n")
            case "/close-idle":
                writer.write(answer("200 OK", b"bye"))
                await writer.drain()
                break
            case "/big":
                size = int(target.partition("?")[2])
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n\r\n".encode())
                while size > 0:
                    writer.write(b"x" * min(size, 65536))
                    size -= 65536
                    await writer.drain()
            case "/slow":
                print("slow began", flush=True)
                try:
                    await asyncio.wait_for(reader.read(1), 60)
                    print("slow: the caller went away", flush=True)
                except TimeoutError:
                    pass
                break
            case "/switch":
                writer.write(
                    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: echo\r\nconnection: Upgrade\r\ncontent-length: 0\r\n"
                    b"x-asked: " + headers.get("connection", "").encode() + b"\r\n\r\nhello"
                )
                while piece := await reader.read(65536):
                    if piece == b"bye":
                        break
                    writer.write(piece)
                    await writer.drain()
                break
            case "/die":
                print("last words", flush=True)
                os._exit(3)
            case "/eat":
                hoard = bytearray(int(target.partition("?")[2]))
                for at in range(0, len(hoard), 4096):
                    hoard[at] = 1
                writer.write(answer("200 OK", str(len(hoard)).encode()))
            case _:
                writer.write(answer("404 Not Found", path.encode()))
        await writer.drain()
    writer.close()


async def main() -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def end() -> None:
        print("asked to end", flush=True)
        ended.set()

    loop.add_signal_handler(signal.SIGTERM, end)
    server = await asyncio.start_server(serve, os.environ.get("HOST", "0.0.0.0"), PORT, limit=1 << 20)
    print(f"listening on {PORT}", flush=True)
    async with server:
        await ended.wait()


if __name__ == "__main__":
    if os.environ.get("FAIL"):
        sys.exit("this cannot work")
    asyncio.run(main())
