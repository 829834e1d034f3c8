"""What of a request and of an answer is passed on, and what is for the connection alone."""

import json

import pytest
from tests.integration.conftest import HTTP, Platform
from tests.integration.test_server_answers import deploy_program

pytestmark = pytest.mark.timeout(120)

MIRROR = """
import asyncio, os

async def serve(reader, writer):
    while head := await reader.readuntil(b"\\r\\n\\r\\n"):
        writer.write(
            b"HTTP/1.1 200 OK\\r\\nConnection: keep-alive, X-Leg\\r\\nX-Leg: 1\\r\\nX-Whole: 1\\r\\n"
            b"Access-Control-Allow-Origin: https://app.example\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(head) + head
        )

async def main():
    async with await asyncio.start_server(serve, "127.0.0.1", int(os.environ["PORT"])) as server:
        await server.serve_forever()

asyncio.run(main())
"""
"""A server that speaks for itself: answers with the head of the request."""
HANDLER = """
    def handle(event, context):
        said = {"connection": "X-Leg", "x-leg": "1", "x-whole": "1"}
        return {"headers": said, "body": [event.path, event.query.get("q"), sorted(event.headers)]}
"""
PREFLIGHT = {"Origin": "https://app.example", "Access-Control-Request-Method": "PUT"}


def test_a_server_is_given_what_it_would_be_given_behind_openfaas(platform: Platform) -> None:
    """Its preflights were answered for it; headers of one leg went on to the next; raw bytes in the target were 400."""
    path = deploy_program(platform, "mirror", MIRROR, {})

    preflight = platform.http.options(path, headers=PREFLIGHT)
    said = platform.call(
        path, headers={"Connection": "keep-alive, X-Leg, Content-Length", "X-Leg": "1", "X-Whole": "1"}
    )
    raw = platform.exchange(f"GET {path}/Zoë?q=José%20A HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())

    assert (preflight.status_code, preflight.text.partition(" ")[0]) == (200, "OPTIONS")
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert "x-whole: 1" in said.text
    assert "x-leg" not in said.text.lower()
    assert "content-length: 0" in said.text, "a body does not end elsewhere because Connection says so"
    assert "x-whole" in said.headers
    assert "x-leg" not in said.headers
    assert b"\r\n\r\nGET /Zo%C3%AB?q=Jos%C3%A9%20A HTTP/1.1\r\n" in raw


def test_a_handler_is_given_the_same(platform: Platform) -> None:
    path = platform.deploy("handler", HANDLER, HTTP)

    said = platform.call(path, headers={"Connection": "X-Leg", "X-Leg": "", "X-Whole": "1"})
    line = f"GET {path}/Zoë?q=José%20A HTTP/1.1\r\nHost: x\r\n".encode()
    with platform.socket() as sock:  # one that comes in pieces
        for piece in (line[:40], line[40:], b"Connection: close\r\n\r\n"):
            sock.sendall(piece)
        raw = b"".join(iter(lambda: sock.recv(65_536), b""))

    assert said.headers["x-whole"] == "1"
    assert "x-leg" not in said.headers
    assert "X-Whole" in said.json()[2]
    assert "X-Leg" not in said.json()[2]
    assert json.loads(raw.partition(b"\r\n\r\n")[2])[:2] == ["/Zoë", "José A"]
