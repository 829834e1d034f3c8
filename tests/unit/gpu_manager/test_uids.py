"""Each function has a uid of its own, the same after a restart; and nobody else on the machine has it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from gpufaas_apps import machine
from gpufaas_apps.options import DeviceOptions
from gpufaas_core.errors import InvalidSpec, StorageFailed
from gpufaas_gpu_manager.isolation import levels
from gpufaas_gpu_manager.isolation.ids import Uids, uid_range, written
from gpufaas_gpu_manager.isolation.walls import Walls

RANGE = range(1_950_000_000, 1_950_000_003)
NEXT = range(1_950_000_003, 1_950_000_006)
_OTHER = """
import sys
from pathlib import Path
from gpufaas_gpu_manager.isolation.ids import Uids
at = Path(sys.argv[1])
uids = Uids(at / "other", range(*map(int, sys.argv[2:])), locks=at / "locks")
print(uids.range[0], flush=True)
sys.stdin.read()
"""

Open = Callable[..., Uids]


@pytest.fixture
def open_uids(tmp_path: Path) -> Open:
    def open_(uids: range = RANGE, *, strict: bool = False) -> Uids:
        return Uids(tmp_path / "uids", uids, strict=strict, locks=tmp_path / "locks")

    return open_


def test_functions_have_different_uids_that_stay_over_a_restart(
    open_uids: Open, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_uids()
    given = [first.of("f1.ns"), first.of("f2.ns"), first.of("f1.ns")]
    assert given == [RANGE[0], RANGE[1], RANGE[0]]
    del first
    again = open_uids()
    assert (again.of("f2.ns"), again.of("f3.ns"), caplog.text) == (RANGE[1], RANGE[2], "")


def test_a_uid_is_given_to_one_function_only_and_a_larger_range_has_more(open_uids: Open) -> None:
    uids = open_uids()
    assert [uids.of(name) for name in ("a", "b", "c")] == list(RANGE)
    with pytest.raises(InvalidSpec, match="all 3 uids of --uid-range 1950000000-1950000002 belong to functions"):
        uids.of("d")
    del uids
    larger = open_uids(range(RANGE[0] - 1, RANGE[0] + 4))
    assert [larger.of(name) for name in ("d", "e", "a")] == [RANGE[0] - 1, RANGE[0] + 3, RANGE[0]]


def test_of_two_platforms_with_one_range_the_second_takes_the_next_one_or_is_refused(
    open_uids: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-c", _OTHER, str(tmp_path), str(RANGE[0]), str(RANGE[-1] + 1)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == f"{RANGE[0]}\n"
        with pytest.raises(InvalidSpec, match="another platform on this machine has them"):
            open_uids(range(RANGE[1], RANGE[1] + 9), strict=True)
        second = open_uids()
        assert second.range == NEXT
        assert "another platform on this machine has them: functions have the uids " + written(NEXT) in caplog.text
        assert second.of("f.ns") == NEXT[0]
        del second
        caplog.clear()
        again = open_uids()
        assert (again.of("f.ns"), caplog.text) == (NEXT[0], ""), "it says it once: from then on the range is its own"
        del again
        other.communicate("")
    assert open_uids().of("f.ns") == NEXT[0], "it keeps what it has, though what it asked for is free again"
    assert open_uids(strict=True).of("f.ns") == RANGE[0]


def test_a_range_of_which_somebody_has_a_uid_is_not_taken(open_uids: Open) -> None:
    with pytest.raises(InvalidSpec, match=r"nobody|no such uids"):
        open_uids(range(65_533, 65_536), strict=True)


@pytest.mark.parametrize("level", ["best", "strict"])
def test_where_no_range_is_free_best_goes_without_and_says_so_and_strict_does_not_start(
    level: Literal["best", "strict"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(levels, "walls", lambda *_: Walls(root="mount", uids=True, strict=level == "strict"))
    monkeypatch.setattr(machine, "etcd_here", lambda _: ())
    given = DeviceOptions(isolation=level, uid_range=range(1, 2**32 - 1))
    if level == "strict":
        with pytest.raises(InvalidSpec, match="name 4294967294 uids that nobody has"):
            machine.isolation_of(given, tmp_path, [])
    else:
        assert machine.isolation_of(given, tmp_path, []) == (Walls(root="mount"), None)
        assert "functions have no uids of their own: --uid-range 1-4294967294: user " in caplog.text


def test_a_damaged_file_is_not_guessed_at(open_uids: Open, tmp_path: Path) -> None:
    (tmp_path / "uids").write_text("{")
    with pytest.raises(StorageFailed, match="restore it, or remove it: then each gets a new one"):
        open_uids()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("5", "FIRST-LAST"),
        ("9-5", "FIRST-LAST"),
        ("1-4294967295", "FIRST-LAST"),
        ("a-b", "FIRST-LAST"),
        ("0-9", "0 is root"),
    ],
)
def test_a_malformed_range_says_what_to_write(text: str, why: str) -> None:
    with pytest.raises(InvalidSpec, match=why):
        uid_range(text)
