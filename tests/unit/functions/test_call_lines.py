"""Each line that a function prints says which call wrote it, and lines of threads do not mix."""

import asyncio
import io
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpufaas_core.log_marks import lines_in
from gpufaas_functions import call_lines
from gpufaas_functions.call_lines import CallLines

SECRET = "5ec2e7"


class Printer:
    """A stream of ours on a pipe."""

    def __init__(self) -> None:
        self._read, self.fd = os.pipe()
        self.lines = CallLines(self.fd, "<stdout>")
        self.out = io.TextIOWrapper(self.lines, "utf-8", newline="\n", write_through=True)

    def print(self, *words: str, end: str = "\n", flush: bool = False) -> None:
        print(*words, end=end, flush=flush, file=self.out)

    def said(self) -> list[tuple[str, str]]:
        """Return call and text of each line; nothing can be printed afterwards."""
        os.close(self.fd)
        return self.read()

    def read(self) -> list[tuple[str, str]]:
        with open(self._read, "rb") as file:
            data = file.read()
        lines = data.removesuffix(b"\n").split(b"\n") if data else []
        return [each for line in lines for each in lines_in(line.decode(), SECRET)]


@pytest.fixture
def printer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Printer]:
    printer = Printer()
    monkeypatch.setattr(call_lines, "_streams", [printer.lines])
    call_lines.mark_with(SECRET)
    yield printer
    call_lines.mark_with("")


def test_lines_within_a_call_are_its_own_and_others_of_none(printer: Printer) -> None:
    printer.print("loads")
    call_lines.begin("one", alone=False)
    printer.print("works", "on it")
    printer.print()
    call_lines.end("one", alone=False)
    printer.print("waits")

    assert printer.said() == [("", "loads"), ("one", "works on it"), ("one", ""), ("", "waits")]


def test_lines_of_calls_that_overlap_do_not_mix(printer: Printer) -> None:
    """Each `print` of two words is four writes."""
    calls = 8
    together = threading.Barrier(calls)

    def serve(call: str) -> None:
        call_lines.begin(call, alone=False)
        together.wait()
        for number in range(200):
            printer.print(call, str(number))
        call_lines.end(call, alone=False)

    with ThreadPoolExecutor(calls) as pool:
        list(pool.map(serve, (f"call-{number}" for number in range(calls))))

    said = printer.said()
    for call in {call for call, _ in said}:
        assert [text for of, text in said if of == call] == [f"{call} {number}" for number in range(200)]
    assert len(said) == calls * 200


def test_tasks_write_for_the_call_that_began_them(printer: Printer) -> None:
    async def handle() -> None:
        await asyncio.gather(*(asyncio.to_thread(printer.print, word) for word in ("one", "two")))

    call_lines.begin("a", alone=False)
    asyncio.run(handle())
    call_lines.end("a", alone=False)

    assert sorted(printer.said()) == [("a", "one"), ("a", "two")]


@pytest.mark.parametrize(("alone", "call"), [(True, "a"), (False, "")])
def test_a_thread_of_its_own_is_known_only_where_one_call_runs_at_a_time(
    printer: Printer, alone: bool, call: str
) -> None:
    call_lines.begin("a", alone=alone)
    thread = threading.Thread(target=printer.print, args=("from a thread",))
    thread.start()
    thread.join()
    call_lines.end("a", alone=alone)
    printer.print("after")

    assert printer.said() == [(call, "from a thread"), ("", "after")]


def test_a_line_without_an_end_ends_with_its_call(printer: Printer) -> None:
    call_lines.begin("a", alone=False)
    printer.print("half", end="")
    call_lines.end("a", alone=False)
    call_lines.begin("b", alone=False)
    printer.print("flushed", end="", flush=True)
    call_lines.end("b", alone=False)
    printer.print("after")

    assert printer.said() == [("a", "half"), ("b", "flushed"), ("", "after")]


def test_a_carriage_return_writes_what_is_before_it_as_a_terminal_would(printer: Printer) -> None:
    """`print(done, end="\\r")` is not followed by a flush."""
    if (pid := os.fork()) == 0:
        call_lines.begin("a", alone=True)
        printer.print("10%", end="\r")
        printer.print("\r20%", end="")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)

    assert printer.said() == [("a", "10%")]


def test_what_was_flushed_is_there_though_its_worker_is_killed(printer: Printer) -> None:
    if (pid := os.fork()) == 0:
        call_lines.begin("a", alone=True)
        printer.print("about to", end=" ", flush=True)
        printer.print("die", end="", flush=True)
        printer.print(" unheard", end="")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)

    assert printer.said() == [("a", "about to die")]


def test_another_ends_a_line_that_was_flushed_and_not_ended(printer: Printer) -> None:
    call_lines.begin("a", alone=False)
    printer.print("50%", end="", flush=True)
    thread = threading.Thread(target=printer.print, args=("of none",))
    thread.start()
    thread.join()
    printer.print(" 100%")
    call_lines.end("a", alone=False)

    assert printer.said() == [("a", "50%"), ("", "of none"), ("a", " 100%")]


def test_a_very_long_line_is_cut_and_every_part_has_its_call(printer: Printer) -> None:
    """A pipe is smaller than the line, so a thread reads it."""
    text = "x" * 200_000
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(printer.read)
        call_lines.begin("a", alone=False)
        printer.print(text)
        call_lines.end("a", alone=False)
        os.close(printer.fd)
        said = reading.result()

    assert {call for call, _ in said} == {"a"}
    assert "".join(part for _, part in said) == text
    assert max(len(part) for _, part in said) < 64 * 1024


def test_a_caller_cannot_have_a_line_pass_for_another_calls(printer: Printer) -> None:
    call_lines.begin("mine", alone=False)
    printer.print("\x1eguessedyours\x1fI was here")
    call_lines.end("mine", alone=False)
    call_lines.begin("\x1eyours\x1f", alone=False)
    printer.print("an id that is none")
    call_lines.end("\x1eyours\x1f", alone=False)

    assert printer.said() == [("mine", "\x1eguessedyours\x1fI was here"), ("", "an id that is none")]


def test_without_a_secret_lines_are_as_they_were_written(printer: Printer) -> None:
    call_lines.mark_with("")
    call_lines.begin("a", alone=False)
    printer.print("plain")
    call_lines.end("a", alone=False)

    assert printer.said() == [("", "plain")]
