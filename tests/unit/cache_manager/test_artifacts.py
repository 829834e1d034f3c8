"""Artifacts by sha256: what the store promises, with real files, real locks and a really full disk."""

import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.files import hashed_files, opened_up, put, sha256, small_disk
from tests.waiting import LIMIT_S

from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_core.errors import CorruptArtifact, InvalidSpec, StorageFailed, UnknownArtifact


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path)


def test_what_was_written_is_found_under_its_digest(store: ArtifactStore, tmp_path: Path) -> None:
    content = os.urandom(100_000)
    digest = sha256(content)

    assert not store.has(digest)
    with store.writer(digest) as writer:
        writer.write(content[:7])
        writer.write(memoryview(content)[7:])

    assert store.has(digest)
    assert store.path(digest) == tmp_path / "sha256" / digest[:2] / digest
    assert store.path(digest).read_bytes() == content


def test_an_artifact_is_not_there_before_its_writer_ends(store: ArtifactStore) -> None:
    with store.writer(sha256(b"abc")) as writer:
        writer.write(b"abc")
        assert not store.has(sha256(b"abc"))

    assert store.has(sha256(b"abc"))


def test_other_bytes_than_promised_are_refused_and_leave_nothing(store: ArtifactStore, tmp_path: Path) -> None:
    digest = sha256(b"promised")

    with pytest.raises(CorruptArtifact, match=digest), store.writer(digest) as writer:
        writer.write(b"delivered")

    assert files(tmp_path) == []
    with pytest.raises(UnknownArtifact, match=digest):
        store.path(digest)


def test_a_writer_that_is_broken_off_leaves_nothing(store: ArtifactStore, tmp_path: Path) -> None:
    def break_off() -> None:
        with store.writer(sha256(b"whole")) as writer:
            writer.write(b"who")
            raise ConnectionError("the uploader went away")

    with pytest.raises(ConnectionError):
        break_off()

    assert files(tmp_path) == []


@pytest.mark.parametrize("digest", ["", "abc", "../" * 21 + "a", "A" * 64, "g" * 64, "a" * 63 + "\n", "a" * 65])
def test_what_is_not_a_digest_touches_no_path(store: ArtifactStore, digest: str) -> None:
    with pytest.raises(InvalidSpec, match="not a sha256 digest"):
        store.path(digest)
    with pytest.raises(InvalidSpec), store.writer(digest):
        pass


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_a_damaged_artifact_is_named_removed_and_can_be_written_again(store: ArtifactStore, damage: str) -> None:
    content = os.urandom(5000)
    digest = put(store, content)
    path = store.path(digest)
    match damage:
        case "flip":
            opened_up(path).write_bytes(bytes([content[0] ^ 1]) + content[1:])
        case "truncate":
            os.truncate(opened_up(path), 4999)
        case "empty":
            os.truncate(opened_up(path), 0)

    with pytest.raises(CorruptArtifact, match=digest):
        store.path(digest)

    assert not store.has(digest)
    assert put(store, content) == digest
    assert store.path(digest).read_bytes() == content


def test_damage_that_was_done_while_the_platform_was_down_is_found(tmp_path: Path) -> None:
    digest = put(ArtifactStore(tmp_path), b"x" * 1000)
    opened_up(tmp_path / "sha256" / digest[:2] / digest).write_bytes(b"y" * 1000)

    with pytest.raises(CorruptArtifact):
        ArtifactStore(tmp_path).path(digest)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    return hashed_files(monkeypatch)


def test_an_untouched_artifact_is_not_read_again(store: ArtifactStore, hashed: list[Path]) -> None:
    digest = put(store, b"x" * 1000)

    assert store.has(digest)
    assert store.path(digest).read_bytes() == b"x" * 1000
    assert hashed == []


def test_an_artifact_cannot_be_written(store: ArtifactStore) -> None:
    assert store.path(put(store, b"x")).stat().st_mode & 0o777 == 0o444


def test_a_touched_but_right_artifact_is_hashed_once_and_trusted_again(store: ArtifactStore) -> None:
    digest = put(store, b"x" * 1000)
    path = store.path(digest)
    sidecar = path.with_name(digest + ".json")
    recorded = sidecar.read_bytes()
    os.utime(path)

    assert store.path(digest) == path
    assert sidecar.read_bytes() != recorded


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"size": "many"}'])
def test_a_lost_or_broken_record_only_costs_another_hash(store: ArtifactStore, content: bytes | None) -> None:
    digest = put(store, b"x" * 1000)
    sidecar = store.path(digest).with_name(digest + ".json")
    if content is None:
        sidecar.unlink()
    else:
        sidecar.write_bytes(content)

    assert store.path(digest).read_bytes() == b"x" * 1000


def test_leftovers_of_a_killed_writer_are_removed_at_the_next_start(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", _WRITE_AND_DIE, str(tmp_path)], check=False, capture_output=True, timeout=30
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(files(tmp_path)) == 1

    ArtifactStore(tmp_path)

    assert files(tmp_path) == []


_WRITE_AND_DIE = """
import os, pathlib, signal, sys
from gpufaas_cache_manager.artifacts import ArtifactStore
with ArtifactStore(pathlib.Path(sys.argv[1])).writer("a" * 64) as writer:
    writer.write(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_store_that_starts_leaves_living_writers_alone(store: ArtifactStore, tmp_path: Path) -> None:
    with store.writer(sha256(b"abc")) as writer:
        writer.write(b"a")
        ArtifactStore(tmp_path)
        writer.write(b"bc")

    assert store.path(sha256(b"abc")).read_bytes() == b"abc"


def test_many_writers_of_one_artifact_at_once_all_succeed(store: ArtifactStore, tmp_path: Path) -> None:
    content = os.urandom(300_000)

    with ThreadPoolExecutor(8) as pool:
        for path in pool.map(lambda _: store.path(put(store, content)), range(8), timeout=LIMIT_S):
            assert path == store.path(sha256(content))

    assert store.path(sha256(content)).read_bytes() == content
    assert list((tmp_path / "incoming").iterdir()) == []


def test_a_removed_artifact_is_unknown(store: ArtifactStore) -> None:
    digest = put(store, b"abc")

    store.remove(digest)
    store.remove(digest)

    with pytest.raises(UnknownArtifact):
        store.path(digest)


# What the disk may say.


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        store = ArtifactStore(disk)
        kept = put(store, b"small")

        with pytest.raises(StorageFailed, match=r"cannot write .*No space left on device: free space there"):
            put(store, os.urandom(1_000_000))

        assert files(disk) == sorted([f"sha256/{kept[:2]}/{kept}", f"sha256/{kept[:2]}/{kept}.json"])
        assert store.path(kept).read_bytes() == b"small"
        put(store, b"there is room again")


def test_a_read_only_disk_is_a_clear_error(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        store = ArtifactStore(disk)
        kept = put(store, b"small")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)

        with pytest.raises(StorageFailed, match=r"Read-only file system: mount it writable"):
            put(store, b"more")

        assert store.path(kept).read_bytes() == b"small"


def test_a_file_size_limit_is_a_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    """The one way to a full disk that needs no rights: RLIMIT_FSIZE, in a process of its own."""
    program = f"""
import pathlib, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_core.errors import StorageFailed
try:
    with ArtifactStore(pathlib.Path({str(tmp_path)!r})).writer("a" * 64) as writer:
        for _ in range(100):
            writer.write(bytes(10_000))
except StorageFailed as exc:
    print(exc)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )

    assert "cannot write" in done.stdout
    assert "File too large" in done.stdout
    assert files(tmp_path) == []


def test_a_directory_without_write_permission_is_a_clear_error(tmp_path: Path) -> None:
    """In a process that is not root, since root may write anywhere."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    program = f"""
import os, pathlib
if os.getuid() == 0:
    from gpufaas_cache_manager.artifacts import ArtifactStore
    from gpufaas_core.errors import StorageFailed
    os.setresuid(12345, 12345, 12345)
else:
    from gpufaas_cache_manager.artifacts import ArtifactStore
    from gpufaas_core.errors import StorageFailed
try:
    ArtifactStore(pathlib.Path({str(closed)!r}) / "artifacts")
except StorageFailed as exc:
    print(exc)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=30)

    assert "Permission denied: give this user the right to write there" in done.stdout
    assert str(closed) in done.stdout


def test_a_file_where_the_directory_should_be_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StorageFailed, match=r"cannot write .*file"):
        ArtifactStore(tmp_path / "file")
