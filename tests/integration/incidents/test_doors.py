"""What clients and strangers send to a platform's doors."""

import pytest
from tests.integration.conftest import ECHO, HTTP, Platform

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("segments", [1, 2])
def test_java_and_curl_offer_h2c_with_a_body(platform: Platform, segments: int) -> None:
    """The body was lost behind a 200; in a segment of its own it was taken for a second request."""
    path = platform.deploy("echo", ECHO, HTTP)
    body = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    head = (
        f"POST {path} HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: {len(body)}\r\nHost: x\r\n"
        "HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\nUpgrade: h2c\r\n"
        "User-Agent: Java-http-client/17.0.15\r\n\r\n"
    ).encode()
    with platform.socket() as sock:
        for piece in [head + body] if segments == 1 else [head, body]:
            sock.sendall(piece)
        sock.sendall(b"GET /system/info HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: sock.recv(65_536), b""))

    assert answer.count(b"HTTP/1.1 200 OK") == 2, answer
    assert body in answer.partition(b"\r\n\r\n")[2]
