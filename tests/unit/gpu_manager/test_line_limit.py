"""A worker may print without end: the kept part is bounded, the rest is counted, and lines are whole."""

import pytest

from gpufaas_gpu_manager.line_limit import (
    BURST_LINES,
    BYTES_PER_S,
    LINE_BYTES,
    LINES_PER_S,
    OPEN_S,
    PATIENCE_S,
    TURN_LINES,
    LineLimit,
)

PIPE = 65536


class Printer:
    """Prints *line* without end into a pipe that is read as `LineLimit` says. Time is a number."""

    def __init__(self, line: bytes) -> None:
        self.limit = LineLimit(0.0)
        self.now = 0.0
        self.read = 0
        self.most_in_a_turn = 0
        self._pipe = line * (PIPE // len(line)) if len(line) < PIPE else line

    def run(self, seconds: float) -> list[str]:
        """Return what was kept meanwhile, notes included."""
        kept: list[str] = []
        end = self.now + seconds
        while self.now < end:
            if not self.limit.waiting:
                self.limit.feed(self._pipe)
                self.read += len(self._pipe)
            lines = self.limit.take(self.now)
            self.most_in_a_turn = max(self.most_in_a_turn, len(lines))
            kept += lines
            if note := self.limit.note(self.now):
                kept.append(note)
            self.now += self.limit.wait() or 0.0001
        return kept


def test_what_is_printed_comes_whole_and_in_order() -> None:
    limit = LineLimit(0.0)
    limit.feed(b"one\ntw")
    first = limit.take(0.0)
    limit.feed(b"o\n\nfour")

    assert (first, limit.take(0.1), limit.wait(), limit.rest()) == (["one"], ["two", ""], 0.0, ["four"])


def test_a_burst_is_kept_whole_in_small_turns() -> None:
    limit, kept, now = LineLimit(0.0), list[str](), 0.0
    limit.feed(b"".join(b"%d\n" % number for number in range(5000)))

    while limit.waiting:
        kept += limit.take(now)
        assert len(kept) <= TURN_LINES * (1.01 + now / 0.005)
        now += limit.wait()

    assert kept == [str(number) for number in range(5000)]


@pytest.mark.parametrize("line", [b"\n", b"y\n", b"a line of some length, as programs print them\n"])
def test_a_printer_without_end_is_held_up_and_then_what_is_beyond_the_rate_is_left_out(line: bytes) -> None:
    printer = Printer(line)

    patient = printer.run(PATIENCE_S)
    read = printer.read
    later = printer.run(20.0)

    text = line.decode().rstrip("\n")
    assert not [each for each in patient if each != text], "nothing is left out at first"
    assert len(patient) <= BURST_LINES + PATIENCE_S * LINES_PER_S + TURN_LINES
    assert read <= len(line) * len(patient) + 2 * PIPE
    assert len(later) <= 20 * LINES_PER_S * 1.1 + 25
    notes = [each for each in later if "left out here" in each]
    assert 15 <= len(notes) <= 21
    assert printer.most_in_a_turn <= TURN_LINES
    assert printer.read / 25.0 < 2 * BYTES_PER_S, "it is slowed to what costs nothing to read"


def test_a_line_without_end_is_cut_and_bounded() -> None:
    printer = Printer(b"x" * PIPE)

    kept = [each for each in printer.run(30.0) if "left out" not in each]

    assert {len(each) for each in kept} == {LINE_BYTES}
    assert sum(map(len, kept)) <= 35 * BYTES_PER_S
    assert printer.read <= 40 * BYTES_PER_S


def test_one_that_stops_is_told_of_what_was_left_out_and_has_its_patience_again() -> None:
    printer = Printer(b"y\n")
    printer.run(PATIENCE_S + 0.5)

    note = printer.limit.note(printer.now, idle=True)

    assert "are left out here, because it prints more than 1000 lines or 1 MiB a second" in note
    assert printer.limit.note(printer.now, idle=True) == ""
    assert set(printer.run(PATIENCE_S - 0.5)) == {"y"}


def test_of_very_much_that_is_left_at_the_end_the_last_lines_are_kept() -> None:
    printer = Printer(b"y\n")
    printer.run(PATIENCE_S - 0.5)
    printer.limit.feed(b"y\n" * 400_000 + b"the reason\n")

    rest = printer.limit.rest()

    assert rest[-1] == "the reason"
    assert len(rest) <= TURN_LINES
    assert "lines" in printer.limit.note(printer.now, idle=True)


def test_single_characters_cost_no_more_reads_than_lines_do() -> None:
    """One that flushes every character cost half a core: its line grew slowly, and nothing else was counted."""
    limit, now, reads, taken = LineLimit(0.0), 0.0, 0, 0
    while now < 10.0:
        limit.feed(b".")
        reads += 1
        taken += sum(map(len, limit.take(now)))
        now += limit.wait() or 0.00001

    assert BURST_LINES <= reads < BURST_LINES + 11 * LINES_PER_S
    assert taken + sum(map(len, limit.rest())) == reads, "and nothing is lost"


def test_a_line_without_an_end_is_taken_once_a_second_and_its_end_alone_is_no_line() -> None:
    limit, kept = LineLimit(0.0), list[tuple[float, str]]()

    def turn(now: float, data: bytes = b"") -> None:
        limit.feed(data)
        kept.extend((now, each) for each in limit.take(now))

    turn(0.0, b"Loading")
    assert limit.open_since == 0.0
    turn(0.5, b".")
    turn(1.0)
    assert limit.open_since is None, "nothing more is there to be shown"
    turn(9.0, b"..")
    turn(9.5, b" done\nnext")
    turn(10.5)
    turn(20.0, b"\n\nlast")

    assert kept == [(1.0, "Loading."), (9.5, ".. done"), (10.5, "next"), (20.0, "")]
    assert limit.rest() == ["last"]


def test_the_rest_of_a_line_has_the_mark_of_its_beginning() -> None:
    limit, of_one = LineLimit(0.0), b"\x1esecretone\x1f"
    limit.feed(of_one + b"10%")
    limit.take(0.0)
    shown = limit.take(OPEN_S)

    limit.feed(b"\r20%")
    limit.take(2.0)

    assert shown + limit.take(2.0 + OPEN_S) == ["\x1esecretone\x1f10%", "\x1esecretone\x1f\r20%"]
    assert limit.rest() == [], "a mark alone is no line"


def test_a_character_is_not_taken_in_two_parts() -> None:
    """A program whose output is buffered writes every 4 KiB, whatever is there."""
    limit, kept = LineLimit(0.0), list[str]()
    for second, data in enumerate(
        (b"\x1esone\x1f\xe3", b"\x81", b"", b"\x82\xf0\x9f\x8e\x89 \xe3\x81", b"", b"", b"\x84\n")
    ):
        limit.feed(data)
        kept += limit.take(second * OPEN_S)

    assert "".join(kept).replace("\x1esone\x1f", "") == "あ🎉 い"
    assert limit.open_since is None

    limit.feed(b"caf\xe9")
    assert limit.take(9.0) + limit.take(9.0 + OPEN_S) == ["caf"]
    limit.feed(b"\n")
    assert limit.take(20.0) == ["\ufffd"], "what is not UTF-8 is not lost"


def test_a_progress_bar_is_taken_once_a_second_and_at_its_end() -> None:
    """tqdm writes ten times a second: its line was shown when it ended, which is after an hour."""
    limit, kept = LineLimit(0.0), list[str]()
    for tenth in range(100):
        limit.feed(b"\r%d%%" % tenth)
        kept += limit.take(tenth / 10)
    limit.feed(b"\r100%\n")
    kept += limit.take(10.0)

    assert 9 <= len(kept) <= 11
    assert kept[-1].endswith("\r100%")
