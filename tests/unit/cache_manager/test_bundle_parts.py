"""A part of a bundle is extracted once on a node, whichever bundles name it, and no bundle can write into it."""

import io
import tarfile
from pathlib import Path

import msgspec
import pytest
from tests.files import sha256, tar_of
from tests.unit.cache_manager.test_bundles import Stores, manifest_of
from tests.unit.cache_manager.test_collect import age, swept

from gpufaas_core.bundle import Manifest, Part, WeightsFile
from gpufaas_core.errors import InvalidSpec, UnknownArtifact

SITE = tar_of({"pack/__init__.py": b"HERE = 1", "pack/data": b"d"})
MADE = tar_of({"function/words/list.txt": b"made", "function/helper.py": b"A = 1"})
HANDLER = b"def handle(event, context): ..."


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return Stores(tmp_path)


def part(name: str, content: bytes) -> Part:
    return Part(name, sha256(content), len(content))  # type: ignore[arg-type]


def bundle(stores: Stores, handler: bytes = HANDLER, *parts: Part, **files: bytes) -> str:
    parts = parts or (part("site", SITE), part("made", MADE))
    manifest = manifest_of(weights=(), version=2, parts=parts)
    return stores.put_bundle({"function/handler.py": handler, **files}, manifest)


def test_bundles_with_one_part_share_its_files(stores: Stores) -> None:
    stores.put(SITE)
    stores.put(MADE)

    one, other = (stores.bundles.install(bundle(stores, HANDLER + each)) for each in (b"1", b"2"))

    for path in ("site/pack/__init__.py", "site/pack/data", "function/words/list.txt"):
        assert (one / path).samefile(other / path)
        assert (one / path).stat().st_mode & 0o777 == 0o444
    assert (one / "site").is_symlink()
    assert (one / "function/words/list.txt").read_bytes() == b"made"
    assert list((one / "site/pack/__pycache__").iterdir()), "it is compiled once, too"
    assert (one / "function").stat().st_mode & 0o777 == 0o555


def test_the_data_that_build_py_made_counts(stores: Stores) -> None:
    stores.put(SITE)
    stores.put(MADE)

    assert stores.bundles.manifest(bundle(stores)).data_bytes == len(b"made")


def test_a_data_directory_that_is_moved_finds_its_parts(stores: Stores, tmp_path: Path) -> None:
    stores.put(SITE)
    digest = bundle(stores, HANDLER, part("site", SITE))
    stores.bundles.install(digest)

    stores.root.joinpath("bundles").parent.rename(tmp_path.with_name("moved"))
    moved = Stores(tmp_path.with_name("moved"))
    tmp_path.mkdir()

    assert (moved.bundles.install(digest) / "site/pack/data").read_bytes() == b"d"


def test_a_part_that_is_not_here_is_named_and_what_is_named_is_known_before(stores: Stores) -> None:
    digest = bundle(stores)

    assert [each.sha256 for each in stores.bundles.named_by(digest)] == [sha256(SITE), sha256(MADE)]
    with pytest.raises(UnknownArtifact, match=f"part made of the function in .*{digest}.*{sha256(MADE)}.*upload"):
        stores.bundles.install(digest)

    stores.put(SITE)
    stores.put(MADE)
    assert stores.bundles.install(digest).is_dir()


def test_a_part_whose_directory_is_gone_is_extracted_again(stores: Stores) -> None:
    stores.put(SITE)
    digest = bundle(stores, HANDLER, part("site", SITE))
    stores.bundles.install(digest)
    stores.bundles._parts.remove(sha256(SITE))

    assert (stores.bundles.install(digest) / "site/pack/data").read_bytes() == b"d"


def test_parts_are_collected_as_weights_are(stores: Stores) -> None:
    stores.put(SITE)
    stores.put(MADE)
    used, unused = bundle(stores, HANDLER, part("site", SITE)), bundle(stores, HANDLER, part("made", MADE))
    for each in (used, unused):
        stores.bundles.install(each)
    age(stores, used, unused, sha256(SITE), sha256(MADE))

    assert swept(stores, used) == {used, sha256(SITE)}
    assert set(stores.bundles.digests()) == {used, sha256(SITE)}


def linked(name: str, target: str, manifest: Manifest) -> bytes:
    """Return a bundle with a link in it."""
    file = io.BytesIO(tar_of({"gpufaas.json": msgspec.json.encode(manifest), "function/handler.py": HANDLER}))
    with tarfile.open(fileobj=file, mode="a") as tar:
        link = tarfile.TarInfo(name)
        link.type, link.linkname = tarfile.SYMTYPE, target
        tar.addfile(link)
    return file.getvalue()


def test_a_bundle_cannot_write_into_a_part_through_links(stores: Stores) -> None:
    """Functions of others import what is in it."""
    stores.put(SITE)
    weights = WeightsFile("function/door/pack/__init__.py", stores.put(b"evil"), 4)
    manifest = manifest_of(weights=(weights,), version=2, parts=(part("site", SITE),))

    with pytest.raises(InvalidSpec, match="parts, and links"):
        stores.bundles.install(stores.put(linked("function/door", "../site", manifest)))

    clean = stores.bundles.install(bundle(stores, HANDLER, part("site", SITE)))
    assert (clean / "site/pack/__init__.py").read_bytes() == b"HERE = 1"


@pytest.mark.parametrize("name", ["site/pack/more.py", "gpufaas.json", "function/handler.py"])
def test_what_build_py_made_replaces_nothing_and_goes_nowhere_else(stores: Stores, name: str) -> None:
    made = tar_of({name: b"evil"})
    stores.put(SITE)
    stores.put(made)

    with pytest.raises(InvalidSpec, match="cannot be extracted"):
        stores.bundles.install(bundle(stores, HANDLER, part("site", SITE), part("made", made)))

    assert not (stores.root / "parts" / sha256(SITE) / "pack/more.py").exists()


@pytest.mark.parametrize("digest", ["../bundles", "/etc", "A" * 64])
def test_a_part_has_a_digest(stores: Stores, digest: str) -> None:
    with pytest.raises(InvalidSpec, match="not a sha256 digest"):
        stores.bundles.install(bundle(stores, HANDLER, Part("site", digest, 1)))
