"""What --bind may name: directories of data, and nothing of the machine's or the platform's own."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufaas_core.errors import InvalidSpec
from gpufaas_gpu_manager.isolation.binds import advice, checked
from gpufaas_gpu_manager.isolation.walls import Walls

OWN_ROOT = Walls(root="mount")


def test_directories_are_opened_to_read_or_to_write(tmp_path: Path) -> None:
    for name in ("sets", "cache", "platform"):
        (tmp_path / name).mkdir()
    given = [f"{tmp_path}/sets/", f"{tmp_path}/cache:rw", f"{tmp_path}/sets"]
    assert checked(given, tmp_path / "platform") == (f"{tmp_path}/sets", f"{tmp_path}/cache:rw")


@pytest.mark.parametrize(
    ("bind", "why"),
    [
        ("{}/nowhere", "no directory"),
        ("data", "no directory"),
        ("{}/file", "no directory"),
        ("/", "has a / of its own"),
        ("/proc/self:rw", "of its own"),
        ("{}/platform", "what the platform keeps in"),
        ("{}/platform/artifacts", "what the platform keeps in"),
        ("{}:rw", "what the platform keeps in"),
        ("{}/link", "what the platform keeps in"),
    ],
)
def test_what_shows_more_than_data_is_refused(bind: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "platform" / "artifacts").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("platform")
    with pytest.raises(InvalidSpec, match=f"^--bind {bind.format(tmp_path)}: .*{why}"):
        checked([bind.format(tmp_path)], tmp_path / "platform")


@pytest.fixture
def outside() -> Iterator[Path]:
    """A directory that all users of this machine may read, with one in it that they may not."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "data").touch()
        (folder / "private").mkdir(mode=0o700)
        (folder / "private" / "key").touch()
        (folder / "link").symlink_to("private/key")
        yield folder


def test_a_load_that_lacks_a_file_that_all_may_read_is_told_how_it_is_opened(outside: Path) -> None:
    said = f"FileNotFoundError: [Errno 2] No such file or directory: '{outside}/data'"
    assert f"--bind {outside} shows it" in advice(said, OWN_ROOT)
    assert advice(said.replace("FileNotFound", "Permission"), Walls(landlock=7))
    assert not advice(said, Walls()), "where nothing is hidden it is not there"


@pytest.mark.parametrize("name", ["nothing", "private/key", "link", "data/../private/key", "data\0"])
def test_it_does_not_learn_what_others_may_not_see(name: str, outside: Path) -> None:
    assert advice(f"FileNotFoundError: {outside}/{name}", OWN_ROOT) == ""


def test_no_look_mounts_what_is_mounted_when_it_is_looked_at(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: f"/etc/auto.misc {outside} autofs rw 0 0\n")
    assert advice(f"FileNotFoundError: {outside}/data", OWN_ROOT) == ""
