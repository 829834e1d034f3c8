"""What a node answers to those who want its artifacts: in memory, as ASGI has it."""

import hashlib
from pathlib import Path

import httpx
import pytest

from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.peers import PeerArtifacts
from gpufaas_core.errors import InvalidSpec

DATA = bytes(range(256)) * 10_000
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def client(tmp_path: Path) -> httpx.AsyncClient:
    artifacts = ArtifactStore(tmp_path)
    with artifacts.writer(DIGEST) as writer:
        writer.write(DATA)
    transport = httpx.ASGITransport(PeerArtifacts(artifacts, "token"))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://node", headers={"authorization": "Bearer token"})


async def test_the_whole_is_answered_with_its_size_and_name(client: httpx.AsyncClient) -> None:
    answer = await client.get(f"/artifacts/{DIGEST}")

    assert (answer.status_code, answer.content) == (200, DATA)
    assert answer.headers["etag"] == f'"{DIGEST}"'
    assert answer.headers["accept-ranges"] == "bytes"


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [("bytes=0-0", 0, 1), ("bytes=1500000-", 1_500_000, len(DATA)), ("bytes=-7", len(DATA) - 7, len(DATA)),
     ("bytes=10-99999999", 10, len(DATA))],
)  # fmt: skip
async def test_a_range_is_answered(client: httpx.AsyncClient, asked: str, start: int, end: int) -> None:
    answer = await client.get(f"/artifacts/{DIGEST}", headers={"range": asked})

    assert (answer.status_code, answer.content) == (206, DATA[start:end])
    assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{len(DATA)}"


@pytest.mark.parametrize("asked", [f"bytes={len(DATA)}-", "bytes=-", "bytes=9-3", "lines=1-2"])
async def test_a_range_that_cannot_be_is_refused_with_the_size(client: httpx.AsyncClient, asked: str) -> None:
    answer = await client.get(f"/artifacts/{DIGEST}", headers={"range": asked})

    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{len(DATA)}"


async def test_head_says_the_size_only(client: httpx.AsyncClient) -> None:
    answer = await client.head(f"/artifacts/{DIGEST}")

    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == str(len(DATA))


@pytest.mark.parametrize("header", ["", "Bearer another", "Basic token", "token"])
async def test_who_does_not_know_the_token_gets_nothing(client: httpx.AsyncClient, header: str) -> None:
    answer = await client.get(f"/artifacts/{DIGEST}", headers={"authorization": header})

    assert answer.status_code == 401
    assert "token" in answer.text


@pytest.mark.parametrize("name", ["0" * 64, "short", "..%2f..%2fetc%2fpasswd"])
async def test_what_is_not_here_is_404(client: httpx.AsyncClient, name: str) -> None:
    assert (await client.get(f"/artifacts/{name}")).status_code == 404


async def test_artifacts_are_only_read_here(client: httpx.AsyncClient) -> None:
    answer = await client.put(f"/artifacts/{DIGEST}", content=b"x")

    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_an_empty_token_protects_nothing_and_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="empty"):
        PeerArtifacts(ArtifactStore(tmp_path), "")
