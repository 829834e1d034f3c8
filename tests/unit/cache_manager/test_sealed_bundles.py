"""An extracted bundle cannot be written: what one worker does there, the next one would find."""

import ctypes
import errno
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from tests.files import MODES_HOLD, hashed_files, opened_up
from tests.unit.cache_manager.test_bundles import WEIGHTS, Stores, manifest_of

from gpufaas_core.errors import StorageFailed

HANDLER = b"import helper\ndef handle(event, context): return helper.TEXT"
FILES = {
    "function/handler.py": HANDLER,
    "function/helper.py": b"TEXT = 'here'",
    "site/pack/__init__.py": b"",
    "site/pack/tests/__init__.py": b"",
}
BUNDLE = "function", "function/__pycache__", "site", "site/pack"


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return Stores(tmp_path)


def modes(directory: Path) -> set[str]:
    """Return the modes of folders and of files, in octal."""
    found = [directory, *directory.rglob("*")]
    return {("d" if each.is_dir() else "f") + format(each.stat().st_mode & 0o777, "o") for each in found}


def test_files_folders_and_weights_are_read_only(stores: Stores) -> None:
    stores.put(WEIGHTS)

    directory = stores.bundles.install(stores.put_bundle(FILES))

    assert modes(directory) == {"d555", "f444"}
    assert (directory / "function/weights.safetensors").read_bytes() == WEIGHTS


def test_modules_are_compiled_when_the_bundle_is_extracted_and_then_imported_unseen(stores: Stores) -> None:
    stores.put(WEIGHTS)
    directory = stores.bundles.install(stores.put_bundle(FILES))

    for name in ("function/handler.py", "function/helper.py", "site/pack/__init__.py"):
        bytecode = Path(importlib.util.cache_from_source(str(directory / name))).read_bytes()
        assert bytecode[4:8] == b"\x01\0\0\0", "its source is not compared"
    assert not (directory / "site/pack/tests/__pycache__").exists(), "nobody imports it: to compile it takes time"


@pytest.mark.parametrize(
    "source",
    [b"def handle(", b"\0", b"(" * 100_000, b"-" * 1_000_000 + b"1", b"x = " + b"[" * 90 + b"]" * 90,
     b"if 1:\n" + b"\n".join(b" " * depth + b"if 1:" for depth in range(1, 99)), b"# coding: none\n"],
    ids=["syntax", "null", "nested", "signs", "lists", "blocks", "coding"],
)  # fmt: skip
def test_a_source_that_does_not_compile_harms_neither_the_platform_nor_its_bundle(
    stores: Stores, source: bytes
) -> None:
    stores.put(WEIGHTS)

    directory = stores.bundles.install(stores.put_bundle({**FILES, "function/zz.py": source}))

    assert (directory / "function/zz.py").read_bytes() == source
    assert Path(importlib.util.cache_from_source(str(directory / "function/handler.py"))).exists()


@pytest.mark.parametrize("by", ["an earlier release", "another Python"])
def test_a_bundle_that_was_made_in_another_way_is_extracted_anew(stores: Stores, by: str) -> None:
    """So what a worker had changed in a bundle of an earlier release is gone."""
    stores.put(WEIGHTS)
    digest = stores.put_bundle(FILES)
    directory = stores.bundles.install(digest)
    (opened_up(directory) / f".{sys.implementation.cache_tag}").unlink()
    if by == "another Python":
        (directory / ".cpython-300").touch()
    (directory / "function/helper.py").chmod(0o644)
    (directory / "function/helper.py").write_bytes(b"TEXT = 'changed by a worker'")
    kept = stores.bundles.compiled(digest)
    kept.mkdir(parents=True)

    again = Stores(stores.root).bundles

    assert not kept.exists(), "what was compiled for it is gone, too"
    assert (again.install(digest) / "function/helper.py").read_bytes() == b"TEXT = 'here'"
    assert modes(directory) == {"d555", "f444"}


def test_what_workers_compile_lies_beside_the_bundle_and_goes_with_it(stores: Stores) -> None:
    stores.put(WEIGHTS)
    digest = stores.put_bundle(FILES)
    directory, compiled = stores.bundles.install(digest), stores.bundles.compiled(digest)
    (compiled / "f.openfaas-fn/cpu").mkdir(parents=True)
    assert not compiled.is_relative_to(directory)

    assert Stores(stores.root).bundles.compiled(digest).is_dir(), "it outlives a restart"
    stores.bundles.remove(digest)
    assert not compiled.exists()


def test_bundles_that_come_and_go_do_not_have_their_weights_hashed_again(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.put(WEIGHTS)
    hashed = hashed_files(monkeypatch)
    one, other = stores.put_bundle(FILES), stores.put_bundle(FILES, manifest_of("function/sub/weights.safetensors"))

    for digest in (one, other):
        stores.bundles.install(digest)
    again = Stores(stores.root)
    again.bundles.remove(one)
    again.bundles.install(other)

    assert hashed == []


WHERE_MODES_HOLD = """
import os, pathlib, sys
from tests.unit.cache_manager.test_sealed_bundles import BUNDLE, FILES, WEIGHTS, Stores
stores = Stores(pathlib.Path(sys.argv[1]))
stores.put(WEIGHTS)
digest = stores.put_bundle(FILES)
directory = stores.bundles.install(digest)
for name in (*(f"{each}/new" for each in BUNDLE), "new", "function/handler.py", "function/weights.safetensors"):
    try:
        open(directory / name, "r+b" if (directory / name).exists() else "xb")
        print("written:", name)
    except PermissionError:
        pass
sys.path[:0] = [str(directory / "function"), str(directory / "site")]
import handler, pack
assert handler.handle(None, None) == "here"
assert handler.handle.__code__.co_filename == str(directory / "function/handler.py"), "as tracebacks show it"
stores.artifacts.remove(stores.put(WEIGHTS))
stores.put(WEIGHTS)
assert stores.bundles.install(digest) == directory, "weights are linked anew into the folder that is read-only"
assert (directory / "function/weights.safetensors").read_bytes() == WEIGHTS
stores.bundles.remove(digest)
print("left:", os.listdir(directory.parent))
"""


def test_its_owner_can_extract_import_relink_and_remove_it_and_not_write_there(tmp_path: Path) -> None:
    command = [*MODES_HOLD, sys.executable, "-c", WHERE_MODES_HOLD, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)

    assert (done.stdout, done.stderr) == ("left: []\n", "")


def test_a_bundle_that_was_not_synced_is_not_there(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenDisk:
        def syncfs(self, _: int) -> int:
            ctypes.set_errno(errno.EIO)
            return -1

    monkeypatch.setattr("gpufaas_cache_manager.trees._LIBC", BrokenDisk())
    stores.put(WEIGHTS)

    with pytest.raises(StorageFailed, match="Input/output error"):
        stores.bundles.install(stores.put_bundle(FILES))

    assert stores.bundles.digests() == []
