"""What functions and gateways say is shown by a terminal, and not obeyed: titles, clipboards, cursors, hidden text."""

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.unit.cli.conftest import Run
from tests.unit.cli.wire_log import Reply, WireLog

from gpufaas_cli import output

RED = "\x1b[1;31mred\x1b[0m"
EVIL = f"{RED} \x1b]52;c;ZXZpbA==\x07 \x1b[2J\x9b2J over\rwritten \x1b\x1b[0m[8m\tä\n"


@pytest.mark.parametrize(
    "say",
    [
        output.show,
        output.note,
        lambda text: output.table(["NAME", "STATE"], [[text, text]]),
        lambda text: output.aligned([(text, text)]),
        lambda text: output.section(text, [text]),
        lambda text: output.section(text, {text: text}),
        lambda text: output.console().print(text, markup=False),
        lambda text: output.console(err=True).print(text, markup=False),
    ],
)
def test_control_characters_of_others_reach_no_terminal(
    say: Callable[[str], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.click.utils, "should_strip_ansi", lambda *_: False, raising=False)  # as on a terminal

    say(EVIL)

    said = "".join(capsys.readouterr())
    assert not [each for each in said if each != "\n" and each != "\t" and not each.isprintable()]
    assert r"\x1b]52;c;ZXZpbA==" in said


def test_text_stays_as_it_is_but_for_what_a_terminal_obeys() -> None:
    assert output.plain("ä\tb\r\nc\n") == "ä\tb\r\nc\n"
    assert output.plain("\udcff \x1b[\u0663m", colours=True).startswith("\\udcff \\x1b[")
    assert output.plain(EVIL) == "red \\x1b]52;c;ZXZpbA==\\x07 \\x9b2J over\\rwritten \\x1b[8m\tä\n"
    assert output.plain(f"{RED}\x1b[2J\x1b[>4;2m\x9b31m", colours=True) == f"{RED}\\x1b[2J\\x1b[>4;2m\\x9b31m\x1b[0m"


def on_a_terminal(*args: str) -> str:
    """Return what `gpufaas ARGS` writes to a terminal."""
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "gpufaas_cli", *args]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=its, stderr=its) as process:
        os.close(its)
        said = b""
        with contextlib.suppress(OSError), open(ours, "rb", buffering=0) as terminal:  # EIO: the other end is closed
            while part := terminal.read(65536):
                said += part
    assert process.returncode is not None
    return said.decode().replace("\r\n", "\n")


@pytest.mark.slow
def test_a_terminal_is_given_the_colours_of_logs_and_answers_and_no_more(wire: WireLog) -> None:
    line = {"name": "f", "namespace": "openfaas-fn", "instance": "i", "timestamp": "2026-11-20T22:50:53Z", "text": EVIL}
    wire.answer("GET", "/system/logs", Reply(200, json.dumps(line).encode()))
    wire.answer("POST", "/function/f", Reply(200, EVIL.encode()))
    wire.answer("GET", "/system/functions", Reply(500, f"it failed: {EVIL}".encode()))
    shown = output.plain(EVIL, colours=True)

    assert shown.startswith(rf"{RED} \x1b]52;c;ZXZpbA==\x07 \x1b[2J\x9b2J")
    assert on_a_terminal("logs", "f", "--time-format", "") == output.plain(EVIL.rstrip(), colours=True) + "\n"
    assert json.loads(on_a_terminal("logs", "f", "--json")) == line
    assert shown in on_a_terminal("invoke", "f")
    assert "it failed: red" in (refused := on_a_terminal("list"))
    assert "\x1b" not in refused


def test_elsewhere_than_on_a_terminal_an_answer_is_exact(run: Run, wire: WireLog) -> None:
    answer = EVIL.encode() + b"\xff\0"
    wire.answer("POST", "/function/f", Reply(200, answer))

    assert run("invoke", "f", data="x").stdout_bytes == answer
