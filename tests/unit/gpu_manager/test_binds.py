"""What --bind may name: directories of data, and nothing of the machine's or the platform's own."""

from pathlib import Path

import pytest

from gpufaas_core.errors import InvalidSpec
from gpufaas_gpu_manager.isolation.binds import checked


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
