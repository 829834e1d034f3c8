"""Pipes of workers are read in turns: one that prints without end takes no more of the loop than others."""

import asyncio
import contextlib
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator

import pytest
from tests.waiting import LIMIT_S, eventually

from gpufaas_core.log_marks import mark
from gpufaas_core.logs import Printed
from gpufaas_gpu_manager import line_limit
from gpufaas_gpu_manager import output as output_module
from gpufaas_gpu_manager.line_limit import BURST_LINES
from gpufaas_gpu_manager.output import Output


class Lines:
    def __init__(self) -> None:
        self.printed: list[Printed] = []
        self.batches = 0

    @property
    def lines(self) -> list[str]:
        return [each.text for each in self.printed]

    def extend(self, function: str, instance: str, printed: Iterable[Printed]) -> None:  # noqa: ARG002 - the port's
        self.printed.extend(printed)
        self.batches += 1


def piped(output: Output) -> tuple[int, int]:
    """Return ends of stdout's and stderr's pipe that outlive `Output.piped`, as a worker's do."""
    with output.piped() as (stdout, stderr):
        return os.dup(stdout), os.dup(stderr)


@contextlib.contextmanager
def printing(fd: int, data: bytes) -> Iterator[None]:
    """Write *data* again and again, as fast as it is taken, until the pipe's other end closes."""

    def write() -> None:
        with contextlib.suppress(OSError):
            while True:
                os.write(fd, data)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    yield
    thread.join(LIMIT_S)
    os.close(fd)


async def test_the_loop_turns_while_a_worker_prints_without_end() -> None:
    logs = Lines()
    output = Output(logs, "f.openfaas-fn", "cpu:0-1")
    write, other = piped(output)
    os.close(other)
    most = 0
    with printing(write, b"y\n" * 2048):
        while len(logs.printed) < BURST_LINES:
            before = logs.batches
            await asyncio.sleep(0)
            most = max(most, logs.batches - before)
        output.close()

    assert most == 1, "one read in a turn"
    assert {line for line in logs.lines if "left out here" not in line} <= {"y", ""}
    assert logs.batches < len(logs.lines) / 20, "many lines go into one write"


async def test_the_last_words_of_one_that_printed_too_much_are_known() -> None:
    logs = Lines()
    output = Output(logs, "f.openfaas-fn", "cpu:0-1")
    write, other = piped(output)
    os.close(other)
    os.write(write, b"y\n" * 20_000 + b"the reason\n")  # more than a burst, before the loop has had a turn
    os.close(write)

    output.close()

    assert output.tail().endswith("the reason")
    assert logs.lines[-1] == "the reason"
    assert "10001 lines" in logs.lines[0]


async def test_a_pipe_that_a_grandchild_holds_open_ends_with_its_worker() -> None:
    output = Output(Lines(), "f.openfaas-fn", "cpu:0-1")
    ends = piped(output)
    os.write(ends[0], b"said\n")

    output.close()

    assert output.tail().endswith("said")
    for end in ends:
        os.close(end)


async def test_a_line_has_its_stream_and_the_call_of_its_mark() -> None:
    logs = Lines()
    output = Output(logs, "f.openfaas-fn", "cpu:0-1")
    stdout, stderr = piped(output)
    of_one = mark(output.secret, "one")
    os.write(stdout, b"loaded\n" + of_one + b"answered\nof C code\nhalf a line" + of_one + b"and one of Python\n")
    os.write(stderr, mark(output.secret, "two") + b"failed\n" + mark("secret", "two") + b"forged\n")
    os.close(stdout)
    os.close(stderr)

    output.say("gpufaas: said")
    output.close()

    assert logs.printed == [
        Printed("gpufaas: said"),
        Printed("loaded", "stdout"),
        Printed("answered", "stdout", "one"),
        Printed("of C code", "stdout"),
        Printed("half a line", "stdout"),
        Printed("and one of Python", "stdout", "one"),
        Printed("failed", "stderr", "two"),
        Printed("\x1esecrettwo\x1fforged", "stderr"),
    ]
    assert output.tail().endswith("half a line\nand one of Python\nfailed\n\x1esecrettwo\x1fforged")


async def test_the_last_lines_for_a_caller_are_those_of_its_call_and_later_ones_of_no_call() -> None:
    output = Output(Lines(), "f.openfaas-fn", "cpu:0-1")
    output.extend(
        ["old", mark(output.secret, "one").decode() + "of one", mark(output.secret, "two").decode() + "of two"]
    )
    began = time.monotonic()
    output.extend(["new", mark(output.secret, "one").decode() + "of one again"])

    assert output.tail("one", began).splitlines()[2:] == ["of one", "new", "of one again"]
    assert output.tail("two", math.inf).splitlines()[2:] == ["of two"]
    assert output.tail("three", math.inf) == ""


async def test_a_progress_bar_is_seen_while_it_runs_as_it_stands_last_and_with_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (line_limit, output_module):
        monkeypatch.setattr(module, "OPEN_S", 0.02)
    logs = Lines()
    output = Output(logs, "f.openfaas-fn", "cpu:0-1")
    stdout, stderr = piped(output)
    of_one = mark(output.secret, "one")

    os.write(stderr, of_one + b"\r 10%|#   |\r 20%|##  |")
    os.write(stdout, b"Continue? ")
    await eventually(lambda: len(logs.printed) == 2)
    os.write(stderr, b"\r 30%|### |")
    await eventually(lambda: len(logs.printed) == 3)
    os.write(stderr, b"\r100%|####|\r         \r\n" + of_one + b"done\r\n")
    os.close(stdout)
    os.close(stderr)
    await eventually(lambda: len(logs.printed) == 5)
    output.close()

    assert sorted(logs.printed) == sorted([
        Printed(" 20%|##  |", "stderr", "one"),
        Printed("Continue? ", "stdout"),
        Printed(" 30%|### |", "stderr", "one"),
        Printed("100%|####|", "stderr", "one"),
        Printed("done", "stderr", "one"),
    ])  # fmt: skip
    assert output.tail().endswith("100%|####|\ndone")


async def test_what_two_streams_print_has_the_bounds_of_one() -> None:
    logs = Lines()
    output = Output(logs, "f.openfaas-fn", "cpu:0-1")
    stdout, stderr = piped(output)
    with printing(stdout, b"out\n" * 1024), printing(stderr, b"err\n" * 1024):
        began = time.monotonic()
        await eventually(lambda: len(logs.printed) >= BURST_LINES)
        await asyncio.sleep(1.0)
        took = time.monotonic() - began
        seen = len(logs.lines)
        output.close()

    assert seen <= BURST_LINES + 1000 * took + 400
    assert {each.stream for each in logs.printed} == {"stdout", "stderr"}
