"""The checker detects each violation."""

from pathlib import Path

import pytest
from tests.chaos.load import CUT, Call, Load, judge

SINCE, UNTIL = 10.0, 20.0
"""Broken meanwhile."""


def sync_call(*, status: int = 200, text: str = "p", began: float = 1.0, ended: float = 1.1) -> Call:
    return Call("p", "f", 0, False, began, ended, status, text)


def async_call(*, callbacks: int = 1, began: float = 1.0, called_back: float = 2.0) -> Call:
    return Call("p", "f", 0, True, began, began + 0.1, 202, "", "id", [("200", "id")] * callbacks, called_back)


def wrong(tmp_path: Path, call: Call, executed: int) -> list[str]:
    record = tmp_path / "record"
    record.write_text("p\n" * executed)
    load = Load([("127.0.0.1", 1)], [], 1.0, "127.0.0.1")
    load.calls.append(call)
    return judge(load, record, SINCE, UNTIL).wrong


@pytest.mark.parametrize(
    ("call", "executed"),
    [
        (sync_call(), 1),
        (sync_call(status=503, text="why", began=11.0, ended=12.0), 0),
        (sync_call(status=502, text="may have run", began=9.0, ended=12.0), 1),
        (sync_call(status=CUT, text="reset", began=11.0, ended=11.0), 1),
        (async_call(), 1),
        (async_call(callbacks=2, began=9.0, called_back=12.0), 2),
    ],
)
def test_what_may_be(tmp_path: Path, call: Call, executed: int) -> None:
    assert wrong(tmp_path, call, executed) == []


@pytest.mark.parametrize(
    ("call", "executed", "said"),
    [
        (sync_call(text="q"), 1, "it got another answer"),
        (sync_call(), 2, "executed 2 times"),
        (sync_call(), 0, "executed 0 times"),
        (sync_call(status=-1, began=11.0), 0, "nothing came of it"),
        (sync_call(status=500, text="why", began=11.0, ended=12.0), 0, "it failed with 500"),
        (sync_call(status=404, text="no function", began=11.0, ended=12.0), 0, "it failed with 404"),
        (sync_call(status=503, text=" ", began=11.0, ended=12.0), 0, "no word why"),
        (sync_call(status=503, text="why", began=8.0, ended=9.0), 0, "though nothing was broken"),
        (sync_call(status=503, text="why", began=21.0, ended=22.0), 0, "though nothing was broken"),
        (sync_call(status=502, text="why", began=11.0, ended=12.0), 2, "executed 2 times"),
        (async_call(callbacks=0), 1, "never called back"),
        (async_call(), 0, "never executed"),
        (async_call(), 2, "executed 2 times though nothing was broken"),
    ],
)
def test_what_must_not_be(tmp_path: Path, call: Call, executed: int, said: str) -> None:
    (found,) = wrong(tmp_path, call, executed)
    assert said in found
