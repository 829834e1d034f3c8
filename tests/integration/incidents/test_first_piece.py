"""
An error before the first piece of an answer that streams is an error like any other. It was 200 and a cut connection,
since the head had gone before the author's generator ran.
"""

from pathlib import Path

import pytest
from tests.integration.conftest import HTTP, TORCH, Platform, until

THREADS = """
    import asyncio, os, time

    def handle(event, context):
        headers = {"x-mine": "yes"} | ({"content-length": "4"} if event.path == "/long" else {})
        return {"statusCode": 203, "headers": headers, "body": pieces(event)}

    def pieces(event):
        match event.path:
            case "/raise":
                raise ValueError("no piece")
            case "/exit":
                raise SystemExit(3)
            case "/memory":
                raise MemoryError("no room")
            case "/object":
                yield object()
            case "/long":
                yield "three"
            case "/json":
                yield event.json()
            case "/wait":
                try:
                    open(event.text + ".begun", "w").close()
                    time.sleep(60)
                finally:
                    open(event.text, "w").close()
            case "/quiet":
                yield b""
                while not os.path.exists(event.text):
                    time.sleep(0.005)
                yield "spoken"
"""
ONE_SLOT = THREADS.replace("handle(event", "handle(model, event") + "\n    def load(device): return None\n"
LOOP = THREADS.replace("def ", "async def ").replace("time.sleep", "await asyncio.sleep")


@pytest.mark.parametrize(
    ("source", "lang"), [(THREADS, HTTP), (ONE_SLOT, TORCH), (LOOP, HTTP)], ids=["threads", "one slot", "loop"]
)
def test_what_fails_before_its_first_piece_is_answered_as_what_does_not_stream(
    platform: Platform, open_path: Path, source: str, lang: str
) -> None:
    path = platform.deploy("pieces", source, lang)

    for where, status, says in (
        ("raise", 500, "ValueError: no piece"),
        ("exit", 500, "SystemExit: 3"),
        ("object", 500, "TypeError: the handler returned a object that is not JSON-able"),
        ("long", 500, "ValueError: the answer is longer than its Content-Length, 4"),
        ("json", 400, "the body is not JSON"),
        ("memory", 507, ""),
    ):
        failed = platform.call(f"{path}/{where}", b"{")
        assert (failed.status_code, failed.text[: len(says)]) == (status, says)
        assert "x-mine" not in failed.headers
    assert platform.http.head(f"{path}/raise").status_code == 500
    until(lambda: "ValueError: no piece" in platform.log("pieces"))
    assert "server.py" not in platform.log("pieces").partition("ValueError: no piece")[0], "only the author's frames"
    metrics = platform.http.get("/metrics").text
    assert 'gateway_function_invocation_total{code="500",function_name="pieces.openfaas-fn"} 5.0' in metrics

    for method in ("POST", "HEAD"):
        empty = platform.http.request(method, f"{path}/none")
        assert (empty.status_code, empty.content, empty.headers["x-mine"]) == (203, b"", "yes")

    with platform.http.stream("POST", f"{path}/quiet", content=str(open_path / "gate").encode()) as answer:
        assert (answer.status_code, answer.headers["x-mine"]) == (203, "yes"), "an empty piece sends the head"
        (open_path / "gate").touch()
        assert b"".join(answer.iter_raw()) == b"spoken"


def test_a_caller_who_leaves_before_the_first_piece_cancels_an_async_generator(
    platform: Platform, open_path: Path
) -> None:
    path = platform.deploy("pieces", LOOP, HTTP)
    ended = str(open_path / "ended")

    with platform.socket() as caller:
        caller.sendall(f"POST {path}/wait HTTP/1.1\r\nHost: x\r\nContent-Length: {len(ended)}\r\n\r\n{ended}".encode())
        until(Path(f"{ended}.begun").exists)

    until(Path(ended).exists)
    until(platform.is_idle)
