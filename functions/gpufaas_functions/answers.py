"""The answers of calls that fail, and of handlers that stream, in threads (`call_runner`) and on an event loop."""

import contextlib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

from gpufaas_core.errors import GpufaasError
from gpufaas_functions.author import BadBody, Context, Event, HandlerAnswer
from gpufaas_functions.memory import CpuMemory, CudaMemory, is_out_of_memory

SAID: Final = 2000
"""Characters of an exception's text that the caller gets. The text may hold a whole array."""
KEPT: Final = 64 * 1024
LINES: Final = 2000
"""As much of a traceback. What is longer would go through the pipe to the log a second for each, and its call waits."""
_SERVERS: Final = (
    "answers", "async_server", "author_modules", "batches", "call_runner", "coroutines", "inbox", "reply", "runner",
    "slot_threads",
)  # fmt: skip
_OURS: Final = frozenset(
    (
        *(str(Path(__file__).with_name(f"{each}.py")) for each in _SERVERS),
        importlib.__file__,
        "<frozen importlib._bootstrap>",
        "<frozen importlib._bootstrap_external>",
    )
)
_CAUSES: Final = 8
ports_limited = False
"""This worker may connect to some TCP ports only (`runner`)."""
Memory: TypeAlias = CpuMemory | CudaMemory
Handle: TypeAlias = Callable[[Event, Context], Any]
"""The author's ``handle``, with the model."""


def failure(exc: BaseException, memory: Memory) -> HandlerAnswer:
    """
    Return an answer 500 with the text of the exception, and write the traceback to the function's log.

    A body that is not what the handler asked for is the caller's fault: 400 or 415, and nothing in the log. If memory
    ran out, the manager replaces the text, since it knows how much there is.
    """
    if not isinstance(exc, BadBody):
        print(traceback_of(from_the_author(exc)), end="", file=sys.stderr)
    answer = answer_of(exc)
    if answer.out_of_memory:
        memory.release()
    return answer


def answer_of(exc: BaseException) -> HandlerAnswer:
    """Return the answer of a call that failed with *exc*."""
    status, text = (exc.status, str(exc)) if isinstance(exc, BadBody) else (500, in_one_line(exc))
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    return HandlerAnswer(status, headers, text.encode(), None, failed=True, out_of_memory=is_out_of_memory(exc))


def declared_length(headers: list[tuple[bytes, bytes]]) -> int:
    """Return the Content-Length that a handler gave; -1: none, or not a number."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return -1


def opened(answer: HandlerAnswer, length: int) -> HandlerAnswer:
    """
    Return *answer*, which streams, with its first piece made: an error before that is known before the head is sent.
    The first piece may be empty. Without any, the answer is whole.

    :param length: the bytes of all pieces; -1: any number
    :raises ValueError: the first one has more bytes, or there is none; other errors are the author's
    """
    assert answer.chunks is not None
    first = next(answer.chunks, None)
    check_length(length, len(first or b""), is_over=first is None)
    if first is None:
        answer.body, answer.chunks = b"", None
    else:
        answer.chunks = _behind(first, answer.chunks)
    return answer


def _behind(first: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    del first
    yield from chunks


def check_length(length: int, sent: int, *, is_over: bool) -> None:
    """:raises ValueError: *sent* bytes are more than the declared *length*, or too few though the answer *is_over*"""
    if 0 <= length < sent:
        raise ValueError(f"the answer is longer than its Content-Length, {length}")
    if is_over and sent < length:
        raise ValueError(f"the answer ended {length - sent} bytes before its Content-Length, {length}")


def from_the_author(exc: BaseException) -> BaseException:
    """
    Remove the frames of the runner and of the import that come before the author's: they explain nothing. Say what to
    do about a write beside the handler, and a port that is closed to it.
    """
    with contextlib.suppress(OSError):  # the author may have gone into a directory that was removed
        if isinstance(exc, OSError) and exc.errno in (errno.EACCES, errno.EROFS) and isinstance(exc.filename, str):
            bundle = os.path.dirname(os.getcwd())
            if os.path.abspath(exc.filename).startswith(bundle + os.sep):
                exc.add_note(
                    "a function cannot write to its own files: write below $GPUFAAS_SCRATCH, which ends with the worker"
                )
    cause: BaseException | None = exc
    for _ in range(_CAUSES if ports_limited else 0):
        if isinstance(cause, OSError) and cause.errno == errno.EACCES and cause.filename is None:
            exc.add_note("if it connects: its TCP port is not among those of the annotation gpufaas.connect")
            break
        cause = cause and (cause.__cause__ or cause.__context__)
    trace = exc.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    return exc.with_traceback(trace) if trace is not None else exc


def traceback_of(exc: BaseException) -> str:
    """Return the traceback for the log: its begin and its end, where it is too long."""
    return _cut("".join(_shown(exc).format()), KEPT, "\ngpufaas: its middle is left out\n")


def _shown(exc: BaseException) -> traceback.TracebackException:
    """Return *exc* as Python shows it, long texts cut: lines of 10 MB would take a second, and all memory."""
    try:
        shown = [traceback.TracebackException.from_exception(exc, lookup_lines=False, compact=True)]
        for each in shown:
            for name, text in vars(each).items():
                if isinstance(text, str):
                    setattr(each, name, _cut(text, 2 * KEPT))
            if isinstance(each.__notes__, list):
                each.__notes__ = [_cut("\n".join(each.__notes__), 2 * KEPT)]
            shown += filter(None, (each.__cause__, each.__context__, *(each.exceptions or ())))
        return shown[0]
    except Exception as error:  # its __getattr__, say, is at fault
        text = f"{type(exc).__name__}, which cannot be shown: {type(error).__name__}"
        return traceback.TracebackException.from_exception(Exception(text).with_traceback(exc.__traceback__))


def _cut(text: str, size: int, between: str = "") -> str:
    """Return *text*; of a long one its ends with *between*: *size* characters, and `LINES` lines, at most."""
    if len(text) <= size and text.count("\n") <= LINES:
        return text
    begin, end = text[: size // 2].splitlines(keepends=True), text[-size // 2 :].splitlines(keepends=True)
    return "".join((*begin[: LINES // 2], between, *end[-LINES // 2 :]))


def in_one_line(exc: BaseException) -> str:
    """
    Return the type and the text of *exc* in one line. The last line alone would not do: it may be advice (CUDA) or a
    note. Indented lines at the beginning are the place of a syntax error, and are left out.
    """
    said = "".join(_shown(exc).format_exception_only()).removeprefix(f"{GpufaasError.__module__}.")
    lines = utf8(said).rstrip().splitlines()
    begin = next((at for at, line in enumerate(lines) if line.strip() and not line[0].isspace()), 0)
    return " ".join(" ".join(lines[begin:]).split())[:SAID] or type(exc).__name__


def utf8(text: str) -> str:
    """Escape lone surrogates, which have no UTF-8: a file name in a message may have them."""
    return text.encode(errors="backslashreplace").decode()
