"""Bodies of 100 MB go up and down without filling the memory of the serving process."""

import hashlib
from collections.abc import Iterator

import pytest
from tests.integration.conftest import HTTP, TORCH, Peak, Platform, until

MB = 1_000_000
SIZE = 100 * MB
PIECE = b"0123456789abcdef" * 4096
MAX_GROWTH = 20 * MB

COUNTING = """
    import hashlib
    def handle(event, context):
        digest, size = hashlib.sha256(), 0
        for piece in event.stream():
            digest.update(piece)
            size += len(piece)
        return f"{size} {digest.hexdigest()}"
"""
SENDING = """
    def handle(event, context):
        size, piece = int(event.text), b"0123456789abcdef" * 4096
        return (piece[: min(len(piece), size - at)] for at in range(0, size, len(piece)))
"""


def as_model(source: str) -> str:
    return source.replace("handle(event", "handle(model, event") + "\n    def load(device):\n        return 1\n"


def pieces(size: int) -> Iterator[bytes]:
    for at in range(0, size, len(PIECE)):
        yield PIECE[: size - at]


def digest_of(body: Iterator[bytes]) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    for piece in body:
        digest.update(piece)
        size += len(piece)
    return size, digest.hexdigest()


@pytest.mark.parametrize("lang", [HTTP, TORCH])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_of_100_mb_goes_up(platform: Platform, lang: str, chunked: bool) -> None:
    source = COUNTING if lang == HTTP else as_model(COUNTING)
    path = platform.deploy("counting", source, lang, memory="300Mi", max_body="200Mi")
    platform.call(path, b"warm")
    headers = {} if chunked else {"Content-Length": str(SIZE)}

    peak = Peak(platform.pid)
    answer = platform.http.post(path, content=pieces(SIZE), headers=headers)

    size, digest = digest_of(pieces(SIZE))
    assert answer.text == f"{size} {digest}"
    assert peak.growth < MAX_GROWTH
    until(lambda: platform.spooled() == [])


@pytest.mark.parametrize("lang", [HTTP, TORCH])
def test_a_body_of_100_mb_comes_down(platform: Platform, lang: str) -> None:
    source = SENDING if lang == HTTP else as_model(SENDING)
    path = platform.deploy("sending", source, lang, memory="64Mi")
    platform.call(path, b"1")

    peak = Peak(platform.pid)
    with platform.http.stream("POST", path, content=str(SIZE).encode()) as answer:
        got = digest_of(answer.iter_raw())

    assert got == digest_of(pieces(SIZE))
    assert peak.growth < MAX_GROWTH
