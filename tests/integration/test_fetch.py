"""Weights across nodes: artifacts over real HTTP between real processes, killed, silenced and lying."""

import asyncio
import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.files import opened_up, put, sha256, taken_for_right, tar_of
from tests.integration.conftest import LIMIT_S, Peak, free_port, until
from tests.integration.peer import TOKEN
from tests.waiting import eventually

from gpufaas_adapters.object_store import object_store
from gpufaas_cache_manager import sources
from gpufaas_cache_manager.artifacts import ArtifactStore, PartialArtifact, storage_errors
from gpufaas_cache_manager.bundles import BundleStore
from gpufaas_cache_manager.fetcher import Fetcher
from gpufaas_cache_manager.filling import FetchSettings
from gpufaas_cache_manager.object_store import ObjectStore, publish
from gpufaas_cache_manager.peers import PeerClient
from gpufaas_core.errors import CorruptArtifact, FetchFailed, StorageFailed, UnknownArtifact
from gpufaas_core.units import MiB

DATA = random.Random(23).randbytes(40 * MiB)
DIGEST = hashlib.sha256(DATA).hexdigest()
PATIENT = FetchSettings(patience_s=LIMIT_S, pause_s=0.05)
QUICK = FetchSettings(patience_s=1.0, pause_s=0.05)
"""For peers that say nothing more. It also leaves one for which a busy machine has no time."""
PEER = str(Path(__file__).with_name("peer.py"))


class Peer:
    """A process that serves what is in its own directory of artifacts."""

    def __init__(self, root: Path, *, cut: int | None = None) -> None:
        self.artifacts = ArtifactStore(root / "artifacts")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.root = root
        self.process = subprocess.Popen(
            [sys.executable, PEER, "serve", str(root), str(self.port), *([str(cut)] if cut is not None else [])]
        )

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/sent", trust_env=False).status_code == 200
        except httpx.TransportError:
            assert self.process.poll() is None
            return False

    def sent(self) -> int:
        return int(httpx.get(f"{self.url}/sent", trust_env=False).text)

    def asked(self) -> list[int]:
        """Return from which bytes on it was asked to send."""
        return [int(each) for each in httpx.get(f"{self.url}/asked", trust_env=False).text.split()]

    def damage(self, digest: str) -> None:
        """Change a byte so that the peer does not see it: as memory or disk do it that lie."""
        path = self.artifacts.path(digest)
        stat = path.stat()
        with open(opened_up(path), "r+b") as file:
            file.seek(stat.st_size // 2)
            file.write(b"\0" if DATA[stat.st_size // 2] else b"\1")
        taken_for_right(path)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Cluster:
    """A node that fetches, and its peers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.peers: list[Peer] = []
        self.urls: list[str] = []
        self.announced: list[str] = []
        self.store: ObjectStore | None = None
        self.artifacts = ArtifactStore(root / "node" / "artifacts")
        self.bundles = BundleStore(root / "node" / "bundles", self.artifacts)
        self.clients: list[PeerClient] = []
        self.fetchers: list[Fetcher] = []

    def peer(self, *data: bytes, cut: int | None = None) -> Peer:
        peer = Peer(self.root / f"peer{len(self.peers)}", cut=cut)
        for each in data:
            put(peer.artifacts, each)
        self.peers.append(peer)
        until(peer.ready, "the peer serves")
        self.urls.append(peer.url)
        return peer

    def client(self, settings: FetchSettings, token: str = TOKEN) -> PeerClient:
        self.clients.append(PeerClient(token, patience_s=settings.patience_s))
        return self.clients[-1]

    def fetcher(self, settings: FetchSettings = PATIENT, token: str = TOKEN) -> Fetcher:
        async def holders(_: str) -> list[str]:
            return list(self.urls)

        client = self.client(settings, token)
        made = Fetcher(self.artifacts, self.bundles, holders, client, self.store, self.announced.append, settings)
        self.fetchers.append(made)
        return made

    def partial(self, digest: str = DIGEST) -> Path:
        return self.root / "node" / "artifacts" / "partial" / digest

    def has(self, size: int) -> bool:
        """Whether so many bytes have come."""
        return self.partial().exists() and self.partial().stat().st_size == size


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(
        sources.random, "shuffle", lambda _: None
    )  # peers are asked in the order in which they were made
    made = Cluster(tmp_path)
    yield made
    for fetcher in made.fetchers:
        await fetcher.close()
    for client in made.clients:
        client.close()
    for peer in made.peers:
        peer.kill()


@pytest.fixture
def share(tmp_path: Path) -> ObjectStore:
    (tmp_path / "share").mkdir()
    return object_store(f"dir:{tmp_path}/share")


def here(cluster: Cluster, data: bytes = DATA) -> bool:
    return cluster.artifacts.path(sha256(data)).read_bytes() == data


# --- the good case ---


async def test_an_artifact_comes_from_a_peer_and_is_announced(cluster: Cluster) -> None:
    peer = cluster.peer(DATA)
    seen: list[tuple[int, int]] = []

    await cluster.fetcher().ensure(DIGEST, progress=lambda done, size: seen.append((done, size)))

    assert here(cluster)
    assert cluster.announced == [DIGEST]
    assert peer.sent() == len(DATA)
    assert seen == sorted(seen)
    assert seen[-1] == (len(DATA), len(DATA))
    assert not cluster.partial().exists()


async def test_an_empty_artifact_comes_too(cluster: Cluster) -> None:
    cluster.peer(b"")

    await cluster.fetcher().ensure(sha256(b""))

    assert here(cluster, b"")


async def test_what_is_here_is_asked_of_nobody(cluster: Cluster) -> None:
    put(cluster.artifacts, DATA)
    cluster.urls.append("http://127.0.0.1:9")

    await cluster.fetcher().ensure(DIGEST)

    assert cluster.announced == []


async def test_twenty_who_ask_at_once_make_one_transfer(cluster: Cluster) -> None:
    peer = cluster.peer(DATA)
    fetcher = cluster.fetcher()

    await asyncio.gather(*(fetcher.ensure(DIGEST) for _ in range(20)))

    assert peer.sent() == len(DATA)
    assert cluster.announced == [DIGEST]


async def test_peers_are_asked_before_the_store_which_is_asked_when_they_have_nothing(
    cluster: Cluster, share: ObjectStore
) -> None:
    peer = cluster.peer(DATA)
    other = b"only the store has this"
    await share.open()
    for data in (DATA, other):
        await publish(artifacts_of(cluster.root / "source", data), share, sha256(data))
    cluster.store = share
    fetcher = cluster.fetcher()

    await fetcher.ensure(DIGEST)
    await fetcher.ensure(sha256(other))

    assert peer.sent() == len(DATA)
    assert here(cluster, other)


def artifacts_of(root: Path, data: bytes) -> ArtifactStore:
    artifacts = ArtifactStore(root)
    put(artifacts, data)
    return artifacts


async def test_a_bundle_comes_with_all_weights_that_it_names(cluster: Cluster) -> None:
    weights = [random.Random(n).randbytes(3 * MiB) for n in range(6)]
    tar = bundle_of(*weights)
    cluster.peer(tar, *weights)
    seen: list[tuple[int, int]] = []

    await cluster.fetcher().ensure_bundle(sha256(tar), progress=lambda done, size: seen.append((done, size)))

    assert cluster.bundles.install(sha256(tar)).is_dir()
    assert set(cluster.announced) == {sha256(each) for each in (tar, *weights)}
    assert seen[-1] == (18 * MiB, 18 * MiB)


# --- sources that fail ---


async def test_a_peer_killed_half_way_is_continued_by_another_at_the_byte_reached(cluster: Cluster) -> None:
    first, second = cluster.peer(DATA, cut=25 * MiB), cluster.peer(DATA)
    killed_at: list[int] = []

    def kill_first(done: int, _: int) -> None:
        if done >= 20 * MiB and not killed_at:
            killed_at.append(done)
            first.kill()

    await cluster.fetcher().ensure(DIGEST, progress=kill_first)

    assert here(cluster)
    assert 20 * MiB <= len(DATA) - second.sent() <= 25 * MiB
    assert len(DATA) - second.sent() >= killed_at[0]


async def test_a_peer_that_says_nothing_more_is_left(cluster: Cluster) -> None:
    _, second = cluster.peer(DATA, cut=10 * MiB), cluster.peer(DATA)
    seen: list[int] = []

    await cluster.fetcher(QUICK).ensure(DIGEST, progress=lambda done, _: seen.append(done))

    assert here(cluster)
    assert 0 < second.asked()[0] <= 10 * MiB
    assert second.asked()[0] in seen


async def test_the_store_continues_what_a_peer_began(cluster: Cluster, share: ObjectStore) -> None:
    cluster.peer(DATA, cut=10 * MiB)
    await share.open()
    await publish(artifacts_of(cluster.root / "source", DATA), share, DIGEST)
    cluster.store = share
    seen: list[int] = []

    await cluster.fetcher(QUICK).ensure(DIGEST, progress=lambda done, _: seen.append(done))

    assert here(cluster)
    assert seen == sorted(seen)


async def test_peers_without_it_and_peers_that_are_gone_are_passed(cluster: Cluster) -> None:
    cluster.peer(b"something else")
    cluster.urls.append(f"http://127.0.0.1:{free_port()}")
    cluster.peer(DATA)

    await cluster.fetcher().ensure(DIGEST)

    assert here(cluster)


async def test_wrong_bytes_are_never_taken_and_who_gave_them_is_not_asked_again(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = cluster.peer(DATA), cluster.peer(DATA)
    bad.damage(DIGEST)
    fetcher = cluster.fetcher()

    await fetcher.ensure(DIGEST)
    cluster.artifacts.remove(DIGEST)
    await fetcher.ensure(DIGEST)

    assert here(cluster)
    assert bad.sent() == len(DATA)
    assert good.sent() == 2 * len(DATA)
    assert f"wrong_bytes digest={DIGEST} source={bad.url}" in caplog.text


async def test_when_several_gave_parts_of_wrong_bytes_the_right_one_is_found_and_the_good_not_blamed(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = cluster.peer(DATA, cut=30 * MiB), cluster.peer(DATA)
    bad.damage(DIGEST)

    await cluster.fetcher(QUICK).ensure(DIGEST)

    assert here(cluster)
    assert "mixed_up" in caplog.text
    assert good.url not in "".join(line for line in caplog.text.splitlines() if "wrong_bytes" in line)


async def test_an_earlier_attempt_that_was_damaged_costs_time_only(cluster: Cluster) -> None:
    cluster.peer(DATA)
    cluster.partial().write_bytes(b"\0" * MiB + DATA[MiB : 5 * MiB])

    await cluster.fetcher().ensure(DIGEST)

    assert here(cluster)


async def test_an_earlier_attempt_longer_than_the_artifact_is_begun_again(cluster: Cluster) -> None:
    cluster.peer(DATA)
    cluster.partial().write_bytes(DATA + b"more")

    await cluster.fetcher().ensure(DIGEST)

    assert here(cluster)


async def test_an_attempt_that_had_all_bytes_needs_nobody(cluster: Cluster) -> None:
    cluster.partial().write_bytes(DATA)

    await cluster.fetcher().ensure(DIGEST)

    assert here(cluster)


async def test_if_all_give_wrong_bytes_they_are_named(cluster: Cluster) -> None:
    bad = cluster.peer(DATA)
    bad.damage(DIGEST)

    with pytest.raises(CorruptArtifact, match=bad.url):
        await cluster.fetcher().ensure(DIGEST)


async def test_a_source_of_another_size_than_the_bundle_says_is_not_taken_from(cluster: Cluster) -> None:
    peer = cluster.peer(DATA)

    with pytest.raises(CorruptArtifact, match=peer.url):
        await cluster.fetcher().ensure(DIGEST, size=len(DATA) - 1)

    assert not cluster.partial().stat().st_size


async def test_if_nobody_has_it_that_is_said(cluster: Cluster) -> None:
    cluster.peer(b"something else")

    with pytest.raises(UnknownArtifact, match="deploy it again"):
        await cluster.fetcher().ensure(DIGEST)


async def test_if_those_who_have_it_cannot_be_read_each_is_named_with_the_reason(cluster: Cluster) -> None:
    peer = cluster.peer(DATA, cut=MiB)
    gone = f"http://127.0.0.1:{free_port()}"
    cluster.urls.append(gone)

    with pytest.raises(FetchFailed, match=f"{peer.url}: it sent nothing.*{gone}: Connection refused"):
        await cluster.fetcher(FetchSettings(patience_s=1.0, pause_s=0.01, rounds=1)).ensure(DIGEST)


async def test_a_wrong_token_is_refused_and_said(cluster: Cluster) -> None:
    peer = cluster.peer(DATA)

    with pytest.raises(FetchFailed, match="refused our token"):
        await cluster.fetcher(FetchSettings(rounds=1), "another").ensure(DIGEST)

    assert peer.sent() == 0


async def test_holders_that_cannot_be_known_now_are_asked_for_again(cluster: Cluster) -> None:
    peer = cluster.peer(DATA)
    asked = 0

    async def holders(_: str) -> list[str]:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise OSError("etcd is away")
        return [peer.url]

    fetcher = Fetcher(cluster.artifacts, cluster.bundles, holders, cluster.client(PATIENT), settings=PATIENT)
    await fetcher.ensure(DIGEST)
    await fetcher.close()

    assert here(cluster)


# --- giving up, and going on ---


async def test_the_last_who_gives_up_ends_the_transfer_and_the_next_goes_on(cluster: Cluster) -> None:
    cluster.peer(DATA, cut=10 * MiB)
    fetcher = cluster.fetcher()
    waiting = [asyncio.create_task(fetcher.ensure(DIGEST)) for _ in range(2)]
    await eventually(lambda: cluster.has(10 * MiB))

    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    ((digest, (done, size)),) = fetcher.fetching().items()
    assert (digest, size, 0 < done <= 10 * MiB) == (DIGEST, len(DATA), True), "what was written last is told later"
    waiting[1].cancel()
    other = cluster.peer(DATA)
    cluster.urls[:] = [other.url]
    await fetcher.ensure(DIGEST)

    assert here(cluster)
    assert other.sent() == len(DATA) - 10 * MiB


async def test_a_fetching_process_that_was_killed_goes_on_when_it_is_started_again(cluster: Cluster) -> None:
    slow, other = cluster.peer(DATA, cut=10 * MiB), cluster.peer(DATA)
    command = [sys.executable, PEER, "fetch", str(cluster.root / "node")]
    first = subprocess.Popen([*command, slow.url, DIGEST], stdout=subprocess.DEVNULL)
    await eventually(lambda: cluster.has(10 * MiB))
    first.kill()
    first.wait()

    said = await asyncio.to_thread(subprocess.check_output, [*command, other.url, DIGEST], text=True)

    assert said.split()[0] == str(10 * MiB)
    assert here(cluster)
    assert other.sent() == len(DATA) - 10 * MiB


async def test_300_mb_take_little_memory_on_both_sides(cluster: Cluster) -> None:
    data = DATA * 8  # 320 MiB
    peer = cluster.peer(data)
    digest = sha256(data)
    del data
    command = [sys.executable, PEER, "fetch", str(cluster.root / "node"), peer.url, digest]
    peak = Peak(peer.process.pid)

    grown = (await asyncio.to_thread(subprocess.check_output, command, text=True)).split()[-1]

    assert cluster.artifacts.size(digest) == 320 * MiB
    assert 0 < int(grown) < 48 * MiB
    assert peak.growth < 48 * MiB


async def test_an_artifact_larger_than_the_disk_is_refused_before_it_fills_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = cluster.peer(DATA)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, MiB))

    with pytest.raises(StorageFailed, match=r"node/artifacts.*needs .*40.* more and .*1.* are free"):
        await cluster.fetcher().ensure(DIGEST)

    assert cluster.partial().stat().st_size == 0
    assert peer.sent() < len(DATA)  # what the kernel's buffers take, tens of MiB on some machines, is sent all the same


async def test_a_disk_that_fills_up_meanwhile_gets_its_room_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.peer(DATA)
    written, whole = 0, PartialArtifact.write

    def write(self: PartialArtifact, chunk: memoryview) -> None:
        nonlocal written
        written += len(chunk)
        if written > 10 * MiB:
            with storage_errors(cluster.partial()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(self, chunk)

    monkeypatch.setattr(PartialArtifact, "write", write)

    with pytest.raises(StorageFailed, match=rf"partial/{DIGEST}: No space left"):
        await cluster.fetcher().ensure(DIGEST)

    assert not cluster.partial().exists()


def bundle_of(*weights: bytes) -> bytes:
    manifest = {
        "kind": "http",
        "template": "python3-http",
        "weights": [
            {"path": f"function/w{n}.bin", "sha256": sha256(each), "bytes": len(each)} for n, each in enumerate(weights)
        ],
    }
    files = {"gpufaas.json": json.dumps(manifest).encode(), "function/handler.py": b"def handle(e, c): return 1"}
    return tar_of(files)
