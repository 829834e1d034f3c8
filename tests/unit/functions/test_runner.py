"""How the runner reports exceptions, and which of them it takes for an out of memory."""

import errno
import tracemalloc
from pathlib import Path

import pytest

from gpufaas_core.errors import LoadFailed
from gpufaas_functions.answers import KEPT as LOGGED
from gpufaas_functions.answers import LINES, SAID, failure, in_one_line, traceback_of
from gpufaas_functions.memory import CpuMemory, is_out_of_memory

LONG = 1_000_000


class OutOfMemoryError(RuntimeError):
    """Torch's is called so."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
        RuntimeError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
        ImportError("libx.so: failed to map segment from shared object"),
    ],
    ids=str,
)
def test_these_are_out_of_memory_also_as_causes(error: Exception) -> None:
    assert is_out_of_memory(error)
    wrapped = ValueError("the weights cannot be loaded")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


def test_the_text_of_an_exception_is_not_made_more_often_than_it_is_shown() -> None:
    """That of a list of millions takes a second."""
    made = []

    class Slow(Exception):
        def __str__(self) -> str:
            made.append(self)
            return "slow"

    assert failure(Slow(), CpuMemory(1)).status == 500
    assert 0 < len(made) <= 3


@pytest.mark.parametrize("text", [LONG * "x", "one line\n" * LONG, "x\n" * LINES], ids=["line", "lines", "short lines"])
def test_of_a_long_traceback_the_begin_and_the_end_are_logged(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    def handle() -> None:
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            error = ValueError(text)
            error.add_note("the note")
            raise error from cause

    with pytest.raises(ValueError, match=r"x|one line") as raised:
        handle()

    answer = failure(raised.value, CpuMemory(1))

    said = capsys.readouterr().err
    assert len(said) < LOGGED + 200
    assert said.count("\n") <= LINES + 3
    assert "in handle" in said
    assert "KeyError: 'the cause'" in said
    assert said.endswith("the note\n")
    assert said.count("gpufaas: its middle is left out") == 1
    assert answer.status == 500
    assert answer.body is not None
    assert len(answer.body) <= SAID


def test_a_text_of_many_lines_is_shown_without_taking_many_times_its_memory() -> None:
    error = ExceptionGroup("several", [ValueError("x\n" * LONG)])
    error.__cause__ = ValueError("y\n" * LONG)
    error.add_note("z\n" * LONG)
    tracemalloc.start()
    try:
        traceback_of(error)
        in_one_line(error)
        assert tracemalloc.get_traced_memory()[1] < 10 * LONG
    finally:
        tracemalloc.stop()


def test_an_exception_that_python_cannot_show_has_its_place_shown() -> None:
    class Wrapped(ValueError):
        def __getattr__(self, name: str) -> object:
            raise KeyError(name)

    def handle() -> None:
        raise Wrapped("x")

    with pytest.raises(Wrapped) as raised:
        handle()

    assert "in handle" in traceback_of(raised.value)
    assert "Wrapped" in in_one_line(raised.value)


def test_of_a_syntax_error_in_a_very_long_line_the_caller_gets_the_reason() -> None:
    with pytest.raises(SyntaxError) as raised:
        compile("x" * LONG + " )", "handler.py", "exec")

    assert in_one_line(raised.value) == "SyntaxError: unmatched ')'"


class Untold(ValueError):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "error", [ValueError("no"), BlockingIOError(11, "Resource temporarily unavailable"), Untold()], ids=repr
)
def test_these_are_not(error: Exception) -> None:
    assert not is_out_of_memory(error)


def _noted() -> Exception:
    error = ValueError("no such breed")
    error.add_note("seen in row 7")
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("CUDA error: an illegal access\nCompile with `TORCH_USE_CUDA_DSA` to see more.\n"),
            "RuntimeError: CUDA error: an illegal access Compile with `TORCH_USE_CUDA_DSA` to see more.",
        ),
        (
            RuntimeError("Error(s) in loading state_dict for Net:\n\tMissing key(s): a.weight.\n\tsize mismatch for b"),
            "RuntimeError: Error(s) in loading state_dict for Net: Missing key(s): a.weight. size mismatch for b",
        ),
        (_noted(), "ValueError: no such breed seen in row 7"),
        (SyntaxError("invalid syntax", ("handler.py", 3, 5, "def (:", 3, 6)), "SyntaxError: invalid syntax"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (
            LoadFailed("w.safetensors is damaged: build it again"),
            "LoadFailed: w.safetensors is damaged: build it again",
        ),
        (FileNotFoundError("b\udcff"), "FileNotFoundError: b\\udcff"),
        (ValueError("x" * 9000), "ValueError: " + "x" * 1988),
    ],
)
def test_all_words_of_an_exception_are_in_one_line_with_its_type(error: BaseException, said: str) -> None:
    assert in_one_line(error) == said


def test_a_write_that_is_refused_is_reported_wherever_the_authors_code_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    answer = failure(PermissionError(errno.EACCES, "Permission denied", "out.txt"), CpuMemory(1))

    assert (answer.status, answer.body) == (500, b"PermissionError: [Errno 13] Permission denied: 'out.txt'")
