"""The contract of every `ObjectStore`: a directory, and S3 over the wire from a server process on loopback."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import obstore
import pytest
from tests.files import sha256
from tests.integration.conftest import free_port, until

from gpufaas_adapters.files.object_store import DirectoryStore
from gpufaas_adapters.object_store import object_store
from gpufaas_adapters.s3 import S3ObjectStore
from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.object_store import ObjectStore, publish
from gpufaas_core.errors import CorruptArtifact, InvalidSpec, StorageFailed, UnknownArtifact
from gpufaas_core.units import MiB

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
SMALL = b"weights"
LARGE = os.urandom(1 * MiB) * 37 + b"and a tail"  # several parts, several ranges


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an S3 server with a bucket named ``weights``."""
    port, said = free_port(), tmp_path_factory.mktemp("s3") / "said"
    with said.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=output, stderr=output
        )
    url = f"http://127.0.0.1:{port}"

    def bucket_made() -> bool:
        try:
            return httpx.put(f"{url}/weights", trust_env=False).status_code == 200
        except httpx.TransportError:
            assert server.poll() is None, said.read_text()
            return False

    try:
        until(bucket_made, "the S3 server answers", 60)
        yield url
    finally:
        server.kill()
        server.wait()


@pytest.fixture(params=["dir", "s3", "s3 with a prefix"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    if request.param == "dir":
        (tmp_path / "share").mkdir()
        made = object_store(f"dir:{tmp_path}/share")
    else:
        endpoint, bucket = request.getfixturevalue("s3"), os.urandom(8).hex()
        async with httpx.AsyncClient(trust_env=False) as client:
            (await client.put(f"{endpoint}/{bucket}")).raise_for_status()
        prefix = "/models/of-us" if request.param == "s3 with a prefix" else ""
        made = object_store(f"s3://{bucket}{prefix}?endpoint={endpoint}", KEYS)
    await made.open()
    yield made
    await made.close()


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for each in data:
        yield each


async def whole(store: ObjectStore, digest: str, start: int, end: int) -> bytes:
    return b"".join([piece async for piece in store.read(digest, start, end)])


def digests(store: ObjectStore) -> set[str]:
    """Return what is there, as its tools list it."""
    if isinstance(store, DirectoryStore):
        return {each.name for each in Path(store.url.removeprefix("dir:")).glob("sha256/??/*")}
    assert isinstance(store, S3ObjectStore)
    return {each["path"].rpartition("/")[2] for page in obstore.list(store._store, "sha256/") for each in page}


async def test_a_new_store_is_empty(store: ObjectStore) -> None:
    assert await store.head(sha256(SMALL)) is None
    assert digests(store) == set()


@pytest.mark.parametrize(
    "data", [b"", SMALL, pytest.param(LARGE, marks=pytest.mark.long)], ids=["nothing", "small", "large"]
)
async def test_what_was_written_from_a_file_is_read(store: ObjectStore, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)

    await store.write(sha256(data), tmp_path / "file")

    assert await store.head(sha256(data)) == len(data)
    assert await whole(store, sha256(data), 0, len(data)) == data
    assert digests(store) == {sha256(data)}


@pytest.mark.long
async def test_what_was_written_from_pieces_is_read(store: ObjectStore) -> None:
    await store.write(sha256(LARGE), pieces(LARGE[:100], LARGE[100:]))

    assert await whole(store, sha256(LARGE), 0, len(LARGE)) == LARGE


async def test_any_range_can_be_read(store: ObjectStore) -> None:
    await store.write(sha256(LARGE), pieces(LARGE))

    for start, end in [(0, 1), (5 * MiB - 1, 9 * MiB + 3), (len(LARGE) - 1, len(LARGE)), (7, 7)]:
        assert await whole(store, sha256(LARGE), start, end) == LARGE[start:end]


@pytest.mark.long
async def test_a_read_that_is_given_up_half_way_leaves_the_store_usable(store: ObjectStore) -> None:
    await store.write(sha256(LARGE), pieces(LARGE))

    reading = store.read(sha256(LARGE), 0, len(LARGE))
    assert await anext(reading)
    await reading.aclose()  # type: ignore[attr-defined]

    assert await whole(store, sha256(LARGE), 0, 10) == LARGE[:10]


@pytest.mark.parametrize("data", [SMALL, pytest.param(LARGE, marks=pytest.mark.long)], ids=["small", "large"])
async def test_other_bytes_than_those_of_the_digest_are_refused_and_not_kept(
    store: ObjectStore, tmp_path: Path, data: bytes
) -> None:
    digest = sha256(data)
    (tmp_path / "file").write_bytes(data[:-1] + b"?")

    with pytest.raises(CorruptArtifact, match=digest):
        await store.write(digest, tmp_path / "file")
    with pytest.raises(CorruptArtifact, match=digest):
        await store.write(digest, pieces(data, b"and more"))

    assert await store.head(digest) is None
    assert digests(store) == set()


async def test_an_upload_that_breaks_off_leaves_nothing(store: ObjectStore) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield LARGE[: 20 * MiB]
        raise UnknownArtifact("the peer went away")

    with pytest.raises(UnknownArtifact, match="went away"):
        await store.write(sha256(LARGE), broken())

    assert await store.head(sha256(LARGE)) is None


async def test_written_twice_is_there_once(store: ObjectStore) -> None:
    await store.write(sha256(SMALL), pieces(SMALL))
    await store.write(sha256(SMALL), pieces(SMALL))

    assert digests(store) == {sha256(SMALL)}


async def test_reading_what_is_not_there_says_so(store: ObjectStore) -> None:
    with pytest.raises(UnknownArtifact, match=sha256(SMALL)):
        await whole(store, sha256(SMALL), 0, 5)


async def test_what_is_no_digest_is_refused(store: ObjectStore) -> None:
    for name in ("../../etc/passwd", "ABC", ""):
        with pytest.raises(InvalidSpec, match="not a sha256"):
            await store.head(name)


async def test_an_artifact_is_published_once(store: ObjectStore, tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path / "artifacts")
    with artifacts.writer(sha256(LARGE)) as writer:
        writer.write(LARGE)

    await publish(artifacts, store, sha256(LARGE))
    await publish(artifacts, store, sha256(LARGE))

    assert await store.head(sha256(LARGE)) == len(LARGE)


# --- what is wrong is said ---


async def test_a_directory_that_is_not_mounted_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="mount it"):
        await object_store(f"dir:{tmp_path}/absent").open()

    assert not (tmp_path / "absent").exists()


async def test_a_bucket_that_is_not_there_is_named(s3: str) -> None:
    store = object_store(f"s3://nowhere?endpoint={s3}", KEYS)

    with pytest.raises(StorageFailed, match="s3://nowhere: there is no such bucket"):
        await store.open()
    with pytest.raises(StorageFailed, match="s3://nowhere: there is no such bucket"):
        await store.write(sha256(SMALL), pieces(SMALL))


async def test_a_store_that_does_not_answer_is_named() -> None:
    with pytest.raises(StorageFailed, match="s3://weights"):
        await object_store(f"s3://weights?endpoint=http://127.0.0.1:{free_port()}", KEYS).open()


async def test_credentials_come_from_the_usual_file(s3: str, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = key\naws_secret_access_key = se%cret\n")
    store = object_store(f"s3://weights?endpoint={s3}", {"AWS_SHARED_CREDENTIALS_FILE": str(file)})

    await store.write(sha256(SMALL), pieces(SMALL))

    assert await store.head(sha256(SMALL)) == len(SMALL)


async def test_a_file_without_credentials_is_named(s3: str, tmp_path: Path) -> None:
    store = object_store(f"s3://weights?endpoint={s3}", {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "absent")})

    with pytest.raises(StorageFailed, match="absent"):
        await store.open()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("dir:relative", "absolute path"),
        ("dir:/", "absolute path"),
        ("/mnt/share", "dir:/path, or s3://bucket"),
        ("gs://bucket", "no known kind"),
        ("s3://", "no bucket's name"),
        ("s3://Bad_Bucket", "no bucket's name"),
        ("s3://key:secret@bucket", "carries no credentials"),
        ("s3://bucket?endpoint=minio:9000", "is not a URL"),
        ("s3://bucket?endpont=http://minio:9000", "endpont"),
    ],
)
def test_what_is_wrong_with_an_url_is_said(url: str, said: str) -> None:
    with pytest.raises(InvalidSpec, match=said):
        object_store(url)
