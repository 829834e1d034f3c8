"""A worker's pipe is read in turns: whoever prints without end takes no more of the loop than others."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator

from gpufaas_gpu_manager.output import Output


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.batches = 0

    def extend(self, function: str, instance: str, texts: Iterable[str]) -> None:  # noqa: ARG002 - the port's
        self.lines.extend(texts)
        self.batches += 1


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
    thread.join(5.0)
    os.close(fd)


async def test_the_loop_turns_while_a_worker_prints_without_end() -> None:
    read, write = os.pipe()
    logs = Lines()
    output = Output(logs, "f.openfaas-fn", "cpu:0-1")
    turns = longest = 0.0
    with printing(write, b"y\n" * 2048):
        output.open(read)
        end = time.monotonic() + 0.5
        while (now := time.monotonic()) < end:
            await asyncio.sleep(0.001)
            longest = max(longest, time.monotonic() - now)
            turns += 1
        output.close()

    assert turns > 20
    assert longest < 0.3
    assert {line for line in logs.lines if "left out here" not in line} <= {"y", ""}
    assert logs.batches < len(logs.lines) / 20, "many lines go into one write"


async def test_the_last_words_of_one_that_printed_too_much_are_known() -> None:
    read, write = os.pipe()
    logs = Lines()
    output = Output(logs, "f.openfaas-fn", "cpu:0-1")
    output.open(read)
    os.write(write, b"y\n" * 20_000 + b"the reason\n")  # more than a burst, before the loop has had a turn
    os.close(write)

    output.close()

    assert output.tail(True).endswith("the reason")
    assert logs.lines[-1] == "the reason"
    assert "10001 lines" in logs.lines[0]


async def test_a_pipe_that_a_grandchild_holds_open_ends_with_its_worker() -> None:
    read, write = os.pipe()
    output = Output(Lines(), "f.openfaas-fn", "cpu:0-1")
    output.open(read)
    os.write(write, b"said\n")

    output.close()

    assert output.tail(True).endswith("said")
    os.close(write)
