"""Bundles on disk: extracted once, whole or not at all, their weights linked and looked at on every call."""

import bz2
import gzip
import io
import lzma
import os
import random
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from tests.files import opened_up, sha256, taken_for_right, tar_of
from tests.waiting import LIMIT_S

from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.bundles import BundleLimits, BundleStore
from gpufaas_core.bundle import Manifest, WeightsFile
from gpufaas_core.errors import CorruptArtifact, InvalidSpec, UnknownArtifact

WEIGHTS = os.urandom(20_000)


class Stores:
    """Both stores over one directory, and ways to put things in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.artifacts = ArtifactStore(root / "artifacts")
        self.bundles = BundleStore(root / "bundles", self.artifacts)

    def put(self, content: bytes) -> str:
        with self.artifacts.writer(sha256(content)) as writer:
            writer.write(content)
        return sha256(content)

    def put_bundle(self, files: dict[str, bytes] | None = None, manifest: Manifest | None = None) -> str:
        files = {"function/handler.py": b"def handle(event, context): ..."} if files is None else files
        return self.put(tar_of({"gpufaas.json": msgspec.json.encode(manifest or manifest_of()), **files}))

    def put_all(self) -> str:
        self.put(WEIGHTS)
        return self.put_bundle()


def test_files_that_are_neither_code_nor_weights_are_counted(stores: Stores) -> None:
    files = {"function/handler.py": b"x" * 50, "function/words/table.bin": b"y" * 70, "site/six.py": b"z" * 90}
    digest = stores.put_bundle(files)

    assert stores.bundles.manifest(digest).data_bytes == 70


def manifest_of(path: str = "function/weights.safetensors", **changes: object) -> Manifest:
    manifest = Manifest("model", "python3-torch", weights=(WeightsFile(path, sha256(WEIGHTS), len(WEIGHTS)),))
    return msgspec.structs.replace(manifest, **changes)


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return Stores(tmp_path)


def test_a_bundle_is_a_directory_with_code_and_weights(stores: Stores) -> None:
    digest = stores.put_all()

    directory = stores.bundles.install(digest)

    assert directory == stores.root / "bundles" / digest
    assert (directory / "function" / "handler.py").read_bytes() == b"def handle(event, context): ..."
    assert (directory / "function" / "weights.safetensors").read_bytes() == WEIGHTS
    assert stores.bundles.manifest(digest) == manifest_of()


def test_weights_share_one_file_with_their_artifact(stores: Stores) -> None:
    """One file means one page cache, however many functions have these weights."""
    directory = stores.bundles.install(stores.put_all())

    assert os.path.samefile(directory / "function/weights.safetensors", stores.artifacts.path(sha256(WEIGHTS)))


def test_installing_twice_extracts_once(stores: Stores) -> None:
    digest = stores.put_all()
    directory = stores.bundles.install(digest)
    (opened_up(directory) / "mark").touch()

    assert stores.bundles.install(digest) == directory
    assert (directory / "mark").exists()


def test_a_bundle_outlives_its_store(stores: Stores) -> None:
    digest = stores.put_all()
    directory = stores.bundles.install(digest)

    again = Stores(stores.root)

    assert again.bundles.manifest(digest) == manifest_of()
    assert again.bundles.install(digest) == directory


def test_many_installations_at_once_agree(stores: Stores) -> None:
    digest = stores.put_all()

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: stores.bundles.install(digest), range(8), timeout=LIMIT_S))

    assert results == [stores.root / "bundles" / digest] * 8
    assert [each.name for each in (stores.root / "bundles").iterdir()] == [digest]


def test_weights_that_are_not_here_are_named(stores: Stores) -> None:
    digest = stores.put_bundle()

    with pytest.raises(UnknownArtifact, match=rf"function/weights.safetensors .*{digest}.*{sha256(WEIGHTS)}.*upload"):
        stores.bundles.install(digest)

    stores.put(WEIGHTS)
    assert (stores.bundles.install(digest) / "function/weights.safetensors").read_bytes() == WEIGHTS


def test_weights_of_another_size_than_the_manifest_says_are_refused(stores: Stores) -> None:
    stores.put(WEIGHTS)
    said = WeightsFile("function/weights.safetensors", sha256(WEIGHTS), len(WEIGHTS) + 1)
    digest = stores.put_bundle(manifest=manifest_of(weights=(said,)))

    with pytest.raises(
        InvalidSpec, match=rf"{len(WEIGHTS) + 1} bytes of function/weights.safetensors, .* {len(WEIGHTS)}:"
    ):
        stores.bundles.install(digest)


def test_weights_that_look_right_and_are_damaged_are_found_by_hashing_them_again(stores: Stores) -> None:
    """What filled the host tier found it: the file is as it was when it was hashed, as after a fault of the disk."""
    stores.put(WEIGHTS)
    path = stores.artifacts.path(sha256(WEIGHTS))
    stores.artifacts.recheck(sha256(WEIGHTS))
    opened_up(path).write_bytes(WEIGHTS[::-1])
    taken_for_right(path)
    assert stores.artifacts.path(sha256(WEIGHTS)) == path, "it is trusted"

    with pytest.raises(CorruptArtifact, match="was damaged on the disk"):
        stores.artifacts.recheck(sha256(WEIGHTS))
    assert not path.exists()


def test_an_unknown_bundle_is_named(stores: Stores) -> None:
    with pytest.raises(UnknownArtifact, match="a" * 64):
        stores.bundles.install("a" * 64)


def test_weights_damaged_after_installation_are_found_at_the_next_one_and_heal_by_upload(stores: Stores) -> None:
    digest = stores.put_all()
    weights = stores.bundles.install(digest) / "function/weights.safetensors"
    with open(opened_up(weights), "r+b") as file:
        file.write(b"damage")

    with pytest.raises(CorruptArtifact, match=rf"function/weights.safetensors .*{digest}.*{sha256(WEIGHTS)}"):
        stores.bundles.install(digest)

    stores.put(WEIGHTS)
    stores.bundles.install(digest)
    assert weights.read_bytes() == WEIGHTS


def test_weights_that_somebody_removed_or_replaced_are_linked_again(stores: Stores) -> None:
    digest = stores.put_all()
    weights = stores.bundles.install(digest) / "function/weights.safetensors"

    opened_up(weights.parent)
    weights.unlink()
    stores.bundles.install(digest)
    assert weights.read_bytes() == WEIGHTS

    opened_up(weights.parent)
    weights.unlink()
    weights.write_bytes(b"others")
    stores.bundles.install(digest)
    assert weights.read_bytes() == WEIGHTS


def test_a_damaged_bundle_is_named(stores: Stores) -> None:
    digest = stores.put_bundle()
    os.truncate(opened_up(stores.artifacts.path(digest)), 100)

    with pytest.raises(CorruptArtifact, match=digest):
        stores.bundles.install(digest)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"no tar at all", "no tar"),
        (tar_of({"function/handler.py": b""}), "without gpufaas.json"),
        (tar_of({"gpufaas.json": b"{", "function/handler.py": b""}), "malformed"),
        (tar_of({"gpufaas.json": b'{"kind": "magic", "template": "x"}'}), "malformed"),
        (tar_of({"gpufaas.json": msgspec.json.encode(manifest_of())}), "no function/handler.py"),
        (tar_of({"gpufaas.json": msgspec.json.encode(manifest_of(handler="../../x"))}), "handler"),
        (tar_of({"gpufaas.json": msgspec.json.encode(manifest_of("function/../../x"))}), "below function/"),
        (tar_of({"gpufaas.json": msgspec.json.encode(manifest_of("/etc/passwd"))}), "below function/"),
        (tar_of({"gpufaas.json": msgspec.json.encode(manifest_of(version=3))}), "version 3"),
        (tar_of({"../escaped": b""}), "may be extracted"),
    ],
    ids=lambda each: each if isinstance(each, str) else "bundle",
)
def test_what_is_no_bundle_is_refused_and_leaves_nothing(stores: Stores, content: bytes, says: str) -> None:
    digest = stores.put(content)

    with pytest.raises(InvalidSpec, match=says):
        stores.bundles.install(digest)

    assert list((stores.root / "bundles").iterdir()) == []
    assert not (stores.root / "escaped").exists()


def test_a_bundle_is_bounded_while_it_is_unpacked(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    stores.bundles = BundleStore(tmp_path / "bundles", stores.artifacts, BundleLimits(1_000_000, 20, 1000))
    manifest = msgspec.json.encode(manifest_of())
    code = {"gpufaas.json": manifest, "function/handler.py": b""}
    for files, says in (
        ({**code, "function/zeros": bytes(1_000_000)}, "more than .* when it is unpacked"),
        ({**code, **{f"function/{number}": b"" for number in range(20)}}, "more than 20 files and folders"),
        ({**code, "function/" + "/".join(map(str, range(20))): b""}, "more than 20 files and folders"),
        ({**code, "gpufaas.json": manifest + b" " * 1000}, "gpufaas.json of the bundle has more than 1000 B"),
        ({**code, "function/" + "n" * 70_000: b""}, "a header of 6"),
    ):
        digest = stores.put(gzip.compress(tar_of(files)))
        with pytest.raises(InvalidSpec, match=says):
            stores.bundles.install(digest)
        assert list((tmp_path / "bundles").iterdir()) == []


@pytest.mark.parametrize("packed", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_a_bundle_with_too_many_files_is_refused_before_one_is_written(
    stores: Stores, packed: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100,500 empty files 100,000 were written first, in 23 s; to read their headers takes 2 s."""
    stores.bundles = BundleStore(stores.root / "bundles", stores.artifacts, BundleLimits(members=1000))
    digest = stores.put(packed(tarfile.TarInfo("function/one").tobuf() * 1001))
    written = list[object]()
    monkeypatch.setattr(tarfile.TarFile, "makefile", counted(written, tarfile.TarFile.makefile))

    with pytest.raises(InvalidSpec, match="more than 1000 files and folders"):
        stores.bundles.install(digest)

    assert written == []
    assert list((stores.root / "bundles").iterdir()) == []


def counted(calls: list[object], does: Callable[..., object]) -> Callable[..., object]:
    """Return what does the same as *does*, and adds to *calls*."""

    def counting(*args: object) -> object:
        calls.append(args)
        return does(*args)

    return counting


def test_headers_of_names_are_bounded_together(stores: Stores) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for number in range(300):
            tar.addfile(tarfile.TarInfo(f"{number}" + "n" * 60_000))

    with pytest.raises(InvalidSpec, match="a header of 59 KiB, 16 MiB in all"):
        stores.bundles.install(stores.put(gzip.compress(made.getvalue())))


@pytest.mark.parametrize("form", ["of GNU", "of POSIX"])
def test_a_sparse_file_is_refused_before_its_holes_are_listed(stores: Stores, form: str) -> None:
    """Of 2 GiB of holes in 2 MiB `tarfile` makes lists of 8 GB, for minutes."""
    holes, made = b"500000\n" + b"0\n" * 1_000_000, io.BytesIO()
    member = tarfile.TarInfo("function/holes")
    member.size = len(holes)
    if form == "of GNU":
        member.type = tarfile.GNUTYPE_SPARSE
    else:
        member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "0"}
    with tarfile.open(fileobj=made, mode="w:gz", compresslevel=1, format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member, io.BytesIO(holes))

    with pytest.raises(InvalidSpec, match="a file in it is sparse"):
        stores.bundles.install(stores.put(made.getvalue()))


@pytest.mark.slow
def test_whatever_is_wrong_in_a_bundle_is_the_authors(stores: Stores) -> None:
    """Never an error of the disk, and never an unexpected one."""
    whole = tar_of({"gpufaas.json": msgspec.json.encode(manifest_of()), "function/handler.py": b"x" * 3000})
    chance = random.Random(11)
    odd = [
        gzip.compress(whole)[:-20], b"\x1f\x8b" + whole[:600], lzma.compress(whole)[:-40], bz2.compress(whole)[:-9],
        tar_of({"gpufaas.json": b"[" * 100_000}),
        tar_of({"gpufaas.json/x": b"", "function/handler.py": b""}),
        tar_of({"function": b"", "function/handler.py": b""}),
        tar_of({"gpufaas.json": msgspec.json.encode(manifest_of("function/handler.py/w")), "function/handler.py": b""}),
        tar_of({"gpufaas.json": msgspec.json.encode(manifest_of("function/sub")), "function/sub/x": b"",
                "function/handler.py": b""}),
        tar_of({"function/" + "/".join(["n" * 300] * 3): b""}),
    ]  # fmt: skip
    for packed in (whole, gzip.compress(whole)):
        for _ in range(150):
            damaged = bytearray(packed)
            for _ in range(chance.randint(1, 8)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            odd.append(bytes(damaged))
    stores.put(WEIGHTS)
    refused = 0
    for content in odd:
        try:
            stores.bundles.install(stores.put(content))
        except (InvalidSpec, UnknownArtifact):
            refused += 1
    assert refused > len(odd) / 2


def test_a_half_extracted_bundle_of_a_crash_is_removed_at_the_next_start(stores: Stores) -> None:
    left = stores.root / "bundles" / ".aside-0123"
    left.mkdir()
    (left / "half").touch()

    Stores(stores.root)

    assert not left.exists()


def test_a_removed_bundle_keeps_its_artifacts(stores: Stores) -> None:
    digest = stores.put_all()
    directory = stores.bundles.install(digest)

    stores.bundles.remove(digest)
    stores.bundles.remove(digest)

    assert not directory.exists()
    assert stores.artifacts.has(sha256(WEIGHTS))
    assert stores.bundles.install(digest) == directory


def test_weights_on_another_file_system_are_linked_by_symbol(tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system at /dev/shm")
    stores = Stores(tmp_path)
    digest = stores.put_all()
    root = shm / f"gpufaas-test-{os.getpid()}"
    bundles = BundleStore(root, stores.artifacts)
    try:
        weights = bundles.install(digest) / "function/weights.safetensors"
        bundles.install(digest)

        assert weights.is_symlink()
        assert weights.read_bytes() == WEIGHTS
    finally:
        bundles.remove(digest)
        root.rmdir()
