"""Output of functions can be read: after a restart, from any point, and as it comes."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S

from gpufaas_core import logs as module
from gpufaas_core.logs import FunctionLogs, LogLine, LogQuery, Printed

ECHO = "echo.openfaas-fn"
NAME = ("echo", "openfaas-fn")
ALL = LogQuery(*NAME)


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[FunctionLogs]:
    logs = FunctionLogs(tmp_path / "logs")
    yield logs
    logs.close()


def texts(lines: list[LogLine]) -> list[str]:
    return [line.text for line in lines]


def fill(logs: FunctionLogs, *numbers: int, instance: str = "w1") -> None:
    for number in numbers:
        logs.extend(ECHO, instance, [Printed(f"line {number}\n")])


def test_lines_come_back_in_order_with_what_clients_expect(logs: FunctionLogs) -> None:
    logs.extend(ECHO, "w1", [Printed("héllo\n")])
    logs.extend(ECHO, "w2", [Printed("world")])

    first, second = logs.query(ALL)

    assert (first.name, first.namespace, first.instance, first.text) == ("echo", "openfaas-fn", "w1", "héllo")
    assert first.timestamp < second.timestamp
    assert datetime.fromisoformat(first.timestamp).tzinfo == UTC


def test_functions_are_apart(logs: FunctionLogs) -> None:
    fill(logs, 1)

    assert logs.query(LogQuery("echo", "other")) == []
    assert logs.known(*NAME)
    assert not logs.known("echo", "other")


def test_timestamps_grow_even_in_a_burst(logs: FunctionLogs) -> None:
    fill(logs, *range(500))

    stamps = [line.timestamp for line in logs.query(ALL)]

    assert stamps == sorted(set(stamps))
    assert len({len(stamp) for stamp in stamps}) == 1


@pytest.mark.parametrize(("tail", "expected"), [(2, [8, 9]), (50, [*range(10)]), (0, [*range(10)]), (-1, [*range(10)])])
def test_tail_is_the_last_lines_and_nothing_is_all(logs: FunctionLogs, tail: int, expected: list[int]) -> None:
    fill(logs, *range(10))

    assert texts(logs.query(LogQuery(*NAME, tail=tail))) == [f"line {number}" for number in expected]


def test_since_and_instance_select(logs: FunctionLogs) -> None:
    fill(logs, 1, 2, instance="w1")
    fill(logs, 3, 4, instance="w2")
    third = datetime.fromisoformat(logs.query(ALL)[2].timestamp)
    far = timedelta(hours=5)

    assert texts(logs.query(LogQuery(*NAME, since=third))) == ["line 3", "line 4"]
    assert texts(logs.query(LogQuery(*NAME, since=third + far))) == []
    assert texts(logs.query(LogQuery(*NAME, since=datetime(1, 1, 1, tzinfo=UTC), instance="w1"))) == [
        "line 1",
        "line 2",
    ]
    assert texts(logs.query(LogQuery(*NAME, instance="w2", tail=1))) == ["line 4"]


def test_more_than_the_memory_holds_is_read_from_the_file(logs: FunctionLogs) -> None:
    fill(logs, *range(2500))

    assert texts(logs.query(ALL)) == [f"line {number}" for number in range(2500)]
    assert len(logs.query(LogQuery(*NAME, tail=1200))) == 1200
    assert texts(logs.query(LogQuery(*NAME, tail=2))) == ["line 2498", "line 2499"]


def test_logs_survive_a_restart_and_go_on(tmp_path: Path) -> None:
    """Not even closed: what was appended is with the kernel."""
    first = FunctionLogs(tmp_path)
    fill(first, 1, 2)

    second = FunctionLogs(tmp_path)
    fill(second, 3)

    assert texts(second.query(ALL)) == ["line 1", "line 2", "line 3"]
    assert texts(second.query(LogQuery(*NAME, tail=2))) == ["line 2", "line 3"]
    first.close()
    second.close()


def test_a_clock_that_went_back_keeps_the_order(tmp_path: Path) -> None:
    (tmp_path / f"{ECHO}.jsonl").write_text(
        '{"name":"echo","namespace":"openfaas-fn","instance":"w","timestamp":"2999-01-01T00:00:00.000000Z","text":"a"}\n'
    )
    logs = FunctionLogs(tmp_path)

    logs.extend(ECHO, "w", [Printed("b")])

    assert [line.timestamp for line in logs.query(ALL)] == [
        "2999-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000001Z",
    ]  # fmt: skip
    logs.close()


def test_a_line_cut_short_by_a_full_disk_is_skipped(tmp_path: Path) -> None:
    logs = FunctionLogs(tmp_path)
    fill(logs, 1)
    logs.close()
    with (tmp_path / f"{ECHO}.jsonl").open("ab") as file:
        file.write(b'{"name":"echo","te\n\xff\xfe\n')

    again = FunctionLogs(tmp_path)
    fill(again, 2)

    assert texts(again.query(ALL)) == ["line 1", "line 2"]
    again.close()


def test_files_are_bounded_and_the_newest_lines_are_kept(tmp_path: Path) -> None:
    logs = FunctionLogs(tmp_path, max_bytes=10_000)

    fill(logs, *range(3000))

    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {f"{ECHO}.jsonl", f"{ECHO}.jsonl.1"}
    assert max(sizes.values()) <= 10_000
    assert texts(logs.query(ALL))[-1] == "line 2999"
    assert len(logs.query(ALL)) == 1000
    logs.close()


def test_a_very_long_line_is_cut(logs: FunctionLogs) -> None:
    logs.extend(ECHO, "w1", [Printed("x" * 1_000_000)])

    assert len(logs.query(ALL)[0].text) == 64 * 1024


def test_a_disk_that_takes_nothing_costs_only_the_file(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the directory should be")
    logs = FunctionLogs(tmp_path / "logs")

    fill(logs, 1, 2)

    assert texts(logs.query(ALL)) == ["line 1", "line 2"]
    logs.close()


def test_many_functions_do_not_hold_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_OPEN", 3)
    logs = FunctionLogs(tmp_path)
    before = len(os.listdir("/proc/self/fd"))

    for number in (1, 2):
        for function in range(20):
            logs.extend(f"f{function}.openfaas-fn", "w", [Printed(f"line {number}")])

    assert len(os.listdir("/proc/self/fd")) <= before + 3
    assert texts(logs.query(LogQuery("f7", "openfaas-fn"))) == ["line 1", "line 2"]
    logs.close()


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "", ".hidden", "a\0b", "a" * 300])
def test_names_that_are_no_files_have_no_logs(logs: FunctionLogs, name: str) -> None:
    fill(logs, 1)
    logs.extend(f"{name}.openfaas-fn", "w", [Printed("x")])

    assert logs.query(LogQuery(name, "openfaas-fn")) == []
    assert not logs.known(name, "openfaas-fn")
    logs.drop(name, "openfaas-fn")


def test_dropped_logs_are_gone_and_may_begin_again(logs: FunctionLogs, tmp_path: Path) -> None:
    fill(logs, 1)

    logs.drop(*NAME)

    assert not logs.known(*NAME)
    assert list((tmp_path / "logs").iterdir()) == []
    fill(logs, 2)
    assert texts(logs.query(ALL)) == ["line 2"]


async def take(lines: AsyncIterator[LogLine], count: int) -> list[str]:
    async with asyncio.timeout(LIMIT_S):
        return [(await anext(lines)).text for _ in range(count)]


async def test_a_follower_gets_what_was_and_what_comes_once_each(logs: FunctionLogs) -> None:
    fill(logs, 1, 2, 3)
    lines = logs.follow(LogQuery(*NAME, tail=2))

    before = await take(lines, 2)
    fill(logs, 4, 5)
    after = await take(lines, 2)

    assert (before, after) == (["line 2", "line 3"], ["line 4", "line 5"])
    await lines.aclose()


async def test_nothing_is_lost_between_the_backlog_and_the_live_lines(logs: FunctionLogs) -> None:
    fill(logs, 1)
    lines = logs.follow(ALL)
    first = asyncio.ensure_future(anext(lines))
    await asyncio.sleep(0)  # it follows now, and its backlog is being read
    fill(logs, 2, 3)

    assert (await first).text == "line 1"
    assert await take(lines, 2) == ["line 2", "line 3"]
    await lines.aclose()


async def test_a_follower_may_come_before_the_function_prints(logs: FunctionLogs) -> None:
    lines = logs.follow(ALL)
    first = asyncio.ensure_future(anext(lines))
    await asyncio.sleep(0)

    await asyncio.to_thread(fill, logs, 1)

    assert (await first).text == "line 1"
    await lines.aclose()


async def test_followers_filter_what_comes(logs: FunctionLogs) -> None:
    lines = logs.follow(LogQuery(*NAME, instance="w2"))
    first = asyncio.ensure_future(anext(lines))
    await asyncio.sleep(0)

    fill(logs, 1, instance="w1")
    fill(logs, 2, instance="w2")

    assert (await first).text == "line 2"
    await lines.aclose()


async def test_closing_ends_the_followers(logs: FunctionLogs) -> None:
    fill(logs, 1)
    lines = logs.follow(ALL)
    await take(lines, 1)
    rest = asyncio.ensure_future(anext(lines))
    await asyncio.sleep(0)

    logs.close()

    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(rest, LIMIT_S)


async def test_a_reader_that_is_too_slow_is_told_what_it_missed(
    logs: FunctionLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FOLLOWER_LINES", 2)
    fill(logs, 0)
    lines = logs.follow(ALL)
    await take(lines, 1)

    fill(logs, 1, 2, 3, 4)
    await asyncio.sleep(0)

    assert await take(lines, 3) == [
        "gpufaas: 2 lines are left out here, because the reader was too slow", "line 3", "line 4",
    ]  # fmt: skip
    await lines.aclose()


def test_the_file_is_what_clients_read(logs: FunctionLogs, tmp_path: Path) -> None:
    fill(logs, 1)

    line = json.loads((tmp_path / "logs" / f"{ECHO}.jsonl").read_text())

    assert line.keys() == {"name", "namespace", "instance", "timestamp", "text"}


def test_lines_have_their_stream_and_call_where_these_are_known(tmp_path: Path) -> None:
    logs = FunctionLogs(tmp_path)
    logs.extend(ECHO, "w1", [Printed("loads", "stderr"), Printed("one", "stdout", "a"), Printed("two", "stdout", "b")])
    logs.extend(ECHO, "w1", [Printed("gpufaas: killed")])
    logs.close()

    again = FunctionLogs(tmp_path)

    assert [(line.text, line.stream, line.call) for line in again.query(ALL)] == [
        ("loads", "stderr", ""), ("one", "stdout", "a"), ("two", "stdout", "b"), ("gpufaas: killed", "", ""),
    ]  # fmt: skip
    assert [json.loads(line).get("callId") for line in (tmp_path / f"{ECHO}.jsonl").read_text().splitlines()] == [
        None, "a", "b", None,
    ]  # fmt: skip
    again.close()


async def test_the_lines_of_one_call_are_asked_for_and_followed(logs: FunctionLogs) -> None:
    of_a = LogQuery(*NAME, call="a")
    logs.extend(ECHO, "w1", [Printed("1", "stdout", "a"), Printed("2", "stdout", "b"), Printed("3")])
    lines = logs.follow(of_a)
    first = await take(lines, 1)

    logs.extend(ECHO, "w1", [Printed("4", "stdout", "b"), Printed("5"), Printed("6", "stderr", "a")])

    assert (texts(logs.query(of_a)), first, await take(lines, 1)) == (["1", "6"], ["1"], ["6"])
    assert texts(logs.query(LogQuery(*NAME, call="a", tail=1))) == ["6"]
    await lines.aclose()
