"""Each function has a uid of its own, the same after a restart; and nobody else on the machine has it."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpufaas_core.errors import InvalidSpec, StorageFailed
from gpufaas_gpu_manager.isolation.ids import Uids, uid_range, written

RANGE = range(1_950_000_000, 1_950_000_003)
NEXT = range(1_950_000_003, 1_950_000_006)


Open = Callable[..., Uids]


@pytest.fixture
def open_uids(tmp_path: Path) -> Iterator[Open]:
    with contextlib.ExitStack() as opened:

        def open_(uids: range = RANGE, name: str = "uids", *, strict: bool = False) -> Uids:
            found = Uids(tmp_path / name, uids, strict=strict, locks=tmp_path / "locks")
            opened.callback(found.close)
            return found

        yield open_


def test_functions_have_different_uids_that_stay_over_a_restart(open_uids: Open) -> None:
    first = open_uids()
    given = [first.of(f"f{n}.ns") for n in (1, 2, 1)]
    assert given == [RANGE[0], RANGE[1], RANGE[0]]
    first.close()
    again = open_uids()
    assert (again.of("f2.ns"), again.of("f3.ns"), again.note) == (RANGE[1], RANGE[2], "")


def test_a_uid_is_given_again_only_when_its_function_is_gone_and_there_is_no_other(open_uids: Open) -> None:
    uids = open_uids()
    uids.known = lambda: {"a", "c"}
    assert [uids.of(name) for name in ("a", "b", "c")] == list(RANGE)
    assert uids.of("d") == RANGE[1]  # of b
    uids.known = lambda: {"a", "c", "d"}
    with pytest.raises(InvalidSpec, match="all 3 uids of --uid-range 1950000000-1950000002 belong to functions"):
        uids.of("e")


def test_of_two_platforms_with_one_range_the_second_takes_the_next_one_or_is_refused(open_uids: Open) -> None:
    first = open_uids()
    with pytest.raises(InvalidSpec, match="another platform on this machine has them"):
        open_uids(range(RANGE[1], RANGE[1] + 9), "other", strict=True)
    second = open_uids(name="other")
    assert second.range == NEXT
    assert "another platform" in second.note
    assert written(NEXT) in second.note
    second.of("f.ns")
    first.close()
    second.close()
    assert open_uids(name="other").of("f.ns") == NEXT[0], "it keeps what it has, though what it asked for is free again"


def test_a_range_of_which_somebody_has_a_uid_is_not_taken(open_uids: Open) -> None:
    with pytest.raises(InvalidSpec, match=r"nobody|nogroup|no such uids"):
        open_uids(range(65_533, 65_536), strict=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs a process as another user")
def test_a_range_in_which_a_process_runs_is_not_taken(open_uids: Open) -> None:
    with subprocess.Popen(
        ["/bin/sh", "-c", "echo; read -r _"], user=RANGE[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        with pytest.raises(InvalidSpec, match=f"process {process.pid} runs as {RANGE[1]}"):
            open_uids(strict=True)
        process.stdin.close()


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
