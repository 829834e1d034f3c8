"""Differences, watching, completion, and Go's way to write switches."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.conftest import Run
from tests.unit.cli.wire_log import Reply, WireLog

from gpufaas_cli import flags
from gpufaas_cli.source_files import NOT_HANDLER, Ignored, is_cache
from gpufaas_cli.stack import Stack, StackFunction, read_stack
from gpufaas_cli.stack_text import BadStack
from gpufaas_cli.watching import changes, concerned

GPUFAAS = str(Path(sys.executable).with_name("gpufaas"))
STACK = """\
provider: {name: openfaas}
functions:
  a:
    image: me/a:1
    fprocess: ./a
    environment: {B: "2", A: "1"}
    secrets: [api.key]
    labels: {team: x}
    annotations: {topic: t}
    limits: {memory: 64Mi}
    constraints: ["gpu=true"]
    readonly_root_filesystem: true
  b: {image: me/b, namespace: dev}
"""


# --- watching with one client ---


@pytest.mark.parametrize("command", ["up", "deploy"])
def test_a_watch_keeps_its_client_from_one_build_to_the_next(
    run: Run, wire: WireLog, here: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (here / "stack.yaml").write_text("provider: {name: openfaas}\nfunctions: {a: {image: me/a:1}}\n")
    made, client_of = [], flags.client_of
    monkeypatch.setattr(flags, "client_of", lambda *args, **more: made.append(args) or client_of(*args, **more))
    twice = lambda read, act: [act(*read()) for _ in range(2)]  # noqa: E731
    monkeypatch.setattr("gpufaas_cli.commands.up.watch", twice)

    assert run(command, "--watch").exit_code == 0

    assert (len(made), wire.requests().count(("PUT", "/system/functions"))) == (1, 2)


# --- diff ---

DEPLOYED = {
    "name": "a", "image": "me/a:1", "namespace": "openfaas-fn", "envProcess": "./a",
    "envVars": {"A": "1", "B": "2"}, "secrets": ["api.key"], "constraints": ["gpu=true"],
    "labels": {"team": "x", "faas_function": "a"}, "annotations": {"topic": "t", "gpufaas.bundle": "f" * 64},
    "limits": {"memory": "64Mi"}, "readOnlyRootFilesystem": True, "replicas": 1,
}  # fmt: skip


def test_what_is_deployed_as_the_stack_file_says_has_no_differences(run: Run, wire: WireLog, here: Path) -> None:
    (here / "stack.yml").write_text(STACK)
    wire.answer("GET", "/system/functions", [DEPLOYED])

    result = run("diff", "a")

    assert (result.exit_code, result.stdout) == (0, "No differences found\n")
    assert wire.requests() == [("GET", "/system/functions")]


def test_differences_are_shown_side_by_side_and_are_exit_code_1(run: Run, wire: WireLog, here: Path) -> None:
    (here / "stack.yml").write_text(STACK)
    changed = {**DEPLOYED, "image": "me/a:0", "envVars": {"A": "0", "C": "3"}, "labels": {"x": "y"}, "secrets": []}
    wire.answer("GET", "/system/functions", [changed])

    result = run("diff", "a")

    assert result.exit_code == 1
    assert [" ".join(line.split()) for line in result.stdout.splitlines()] == [
        "a:",
        "stack.yml deployed",
        "- image: me/a:1 + image: me/a:0",
        "- envVars.A: 1 + envVars.A: 0",
        "- envVars.B: 2",
        "- labels.team: x",
        "+ labels.x: y",
        "- secrets: api.key",
        "",
        "Differences found",
    ]
    assert "envVars.C" in run("diff", "a", "--env", "all").stdout
    assert "envVars.B" not in run("diff", "a", "--env", "remote").stdout
    assert {"field": "image", "stack": "me/a:1", "deployed": "me/a:0"} in json.loads(run("diff", "a", "-j").stdout)["a"]


def test_what_is_not_deployed_is_a_difference_in_its_own_namespace(run: Run, wire: WireLog, here: Path) -> None:
    (here / "stack.yml").write_text(STACK)
    wire.answer("GET", "/system/functions", [DEPLOYED], [])

    result = run("diff")

    assert result.exit_code == 1
    assert "- function: b" in result.stdout
    assert wire.requests() == [("GET", "/system/functions"), ("GET", "/system/functions?namespace=dev")]


# --- calls that fail ---


@pytest.mark.parametrize("error", ["load-failed", "worker-crashed"])
def test_a_function_whose_worker_failed_is_said_where_its_words_are(run: Run, wire: WireLog, error: str) -> None:
    wire.answer("POST", "/function/a.dev", Reply(502, b"it did not load", {"X-Gpufaas-Error": error}))

    result = run("invoke", "a", "-n", "dev", data="x")

    assert result.exit_code == 1
    assert result.stderr.endswith("a answered 502 Bad Gateway: 'gpufaas logs a -n dev' shows what it printed\n")


# --- watching ---


def test_changes_are_told_once_and_those_made_together_together(tmp_path: Path) -> None:
    (tmp_path / "fn/build").mkdir(parents=True)
    (tmp_path / "fn/old").write_text("x")
    steps: list[Callable[[], object]] = [
        lambda: None,
        lambda: (tmp_path / "fn/a").write_text("1"),
        lambda: (tmp_path / "fn/b").write_text("2"),
        lambda: None,
        lambda: (tmp_path / "fn/build/made").write_text("not the author's"),
        lambda: (tmp_path / "fn/old").unlink(),
        lambda: None,
    ]

    paths = [(tmp_path / "fn", Ignored(tmp_path / "fn", NOT_HANDLER)), (tmp_path / "stack.yaml", is_cache)]
    seen = changes(lambda: paths, sleep=lambda _: steps.pop(0)() and None)

    assert next(seen) == {tmp_path / "fn/a", tmp_path / "fn/b"}
    assert next(seen) == {tmp_path / "fn/old"}
    assert not steps


def test_what_is_written_before_the_first_look_back_is_a_change_too(tmp_path: Path) -> None:
    seen = changes(lambda: [(tmp_path, is_cache)], sleep=lambda _: None)

    (tmp_path / "handler.py").write_text("while the first build runs")

    assert next(seen) == {tmp_path / "handler.py"}


def test_a_change_concerns_the_function_whose_folder_it_is_in_and_elsewhere_all() -> None:
    a, b = (StackFunction(name, "x", lang="l", handler=Path(name)) for name in ("a", "b"))

    stack = Stack(Path("stack.yaml"), None, {})
    assert concerned(stack, [a, b], {Path("a/handler.py")}) == [a]
    assert concerned(stack, [a, b], {Path("a/x"), Path("b/y")}) == [a, b]
    assert concerned(stack, [a, b], {Path("a/x"), Path("stack.yaml")}) == [a, b]
    around = StackFunction("c", "x", lang="l", handler=Path())
    assert concerned(stack, [a, around], {Path("stack.yaml")}) == [a, around]


@pytest.mark.slow
def test_up_watch_deploys_again_what_has_changed_and_outlives_mistakes(run: Run, wire: WireLog, here: Path) -> None:
    for name in ("a", "b"):
        assert run("new", name, "--lang", "python3-http").exit_code == 0
    wire.answer("HEAD", "/", 404)

    def deployed() -> list[str]:
        return [each.json["service"] for each in wire.sent if each.method == "PUT" and "functions" in each.path]

    def wait_for(names: list[str]) -> None:
        deadline = time.monotonic() + 30
        while deployed() != names:
            assert time.monotonic() < deadline, deployed()
            time.sleep(0.02)

    with subprocess.Popen([GPUFAAS, "up", "--watch"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            wait_for(["a", "b"])
            _read_until(process.stderr, b"Watching")
            (here / "b/handler.py").write_text("def handle(:\n")
            _read_until(process.stderr, b"b: b/handler.py:1")
            _read_until(process.stderr, b"Watching")
            (here / "b/handler.py").write_text("def handle(event, context):\n    return 'new'\n")
            wait_for(["a", "b", "b"])
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(15) == 0


def _read_until(stream: Any, text: bytes) -> None:
    for line in stream:
        if text in line:
            return
    raise AssertionError(f"{text!r} was never said")


# --- the stack file from elsewhere ---


def test_a_stack_file_may_be_a_url(run: Run, wire: WireLog) -> None:
    wire.answer("GET", "/dir/stack.yml", Reply(body=STACK.replace("me/a:1", "me/a:${TAG:-1}").encode()))

    result = run("deploy", "-f", f"{wire.url}/dir/stack.yml", "a")

    assert result.exit_code == 0, result.output
    assert wire.sent[-1].json["image"] == "me/a:1"


def test_a_url_that_has_none_is_wrong_usage(run: Run, wire: WireLog) -> None:
    wire.answer("GET", "/stack.yml", 404)

    result = run("deploy", "-f", f"{wire.url}/stack.yml")

    assert result.exit_code == 2
    assert f"{wire.url}/stack.yml: it answers 404" in result.stderr
    nobody = run("deploy", "-f", "http://127.0.0.1:9/stack.yml")
    assert (nobody.exit_code, "/stack.yml: it cannot be reached" in nobody.stderr) == (2, True)


def test_keys_of_old_are_passed_over(here: Path) -> None:
    (here / "stack.yml").write_text(
        "provider: {name: openfaas, gateway: x, network: func_functions}\n"
        "functions:\n  a: {image: x, network: n, registry_auth: y}\n"
    )

    assert list(read_stack(here / "stack.yml").functions) == ["a"]
    (here / "stack.yml").write_text("provider: {name: openfaas}\nfunctions: {a: {image: x, netwrk: n}}\n")
    with pytest.raises(BadStack, match="did you mean 'network'"):
        read_stack(here / "stack.yml")


# --- new ---


def test_new_takes_a_prefix_and_a_folder(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("new", "a", "--lang", "python3-http", "-p", "ghcr.io/me/", "--handler", "./src/a").exit_code == 0
    monkeypatch.setenv("OPENFAAS_PREFIX", "docker.io/you")
    assert run("new", "b", "--lang", "python3-http").exit_code == 0

    functions = read_stack(here / "stack.yaml").functions
    assert [(each.image, each.handler) for each in functions.values()] == [
        ("ghcr.io/me/a:latest", here / "src/a"), ("docker.io/you/b:latest", here / "b"),
    ]  # fmt: skip
    assert (here / "src/a/handler.py").is_file()
    assert run("new", "c", "--lang", "python3-http", "--handler", "../c").exit_code == 2


def test_new_writes_a_dockerfile_that_can_be_built(run: Run, here: Path) -> None:
    result = run("new", "any", "--lang", "dockerfile")

    assert result.exit_code == 0, result.output
    assert "python3" in (here / "any/Dockerfile").read_text()
    compile((here / "any/server.py").read_text(), "server.py", "exec")
    assert run("build", "--shrinkwrap").exit_code == 0
    assert (here / "build/any/server.py").is_file()
    assert run("new", "any", "--lang", "dockerfile").exit_code == 2


# --- small things ---


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_that_shell(run: Run, shell: str) -> None:
    shown = run("completion", "--shell", shell).stdout

    assert "_GPUFAAS_COMPLETE" in shown
    assert f"{shell}_complete" in shown


def test_commands_and_options_are_completed(here: Path) -> None:
    env = {**os.environ, "_GPUFAAS_COMPLETE": "bash_complete", "COMP_WORDS": "gpufaas secret cr", "COMP_CWORD": "2"}

    shown = subprocess.run([GPUFAAS], env=env, cwd=here, capture_output=True, text=True, check=True)

    assert shown.stdout == "plain,create\n"


def test_what_looks_like_a_switch_but_is_a_value_stays(run: Run, wire: WireLog) -> None:
    run("invoke", "a", "-H", "X: y", "--", "--json=true")
    run("deploy", "--image", "x", "--name", "a", "-e", "K=true")

    assert wire.sent[-1].json["envVars"] == {"K": "true"}


def test_explanations_are_shown_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    from gpufaas_cli.commands import explain

    options = [{"option": "load", "where": "n1/cpu:0", "estimate_s": 2.5}]
    explain.show(
        {
            "call": "a#1", "function": "f@1", "policy": "least-wait", "state": "running", "at": 12.0, "waited_s": 0.5,
            "device": "n1/cpu:0", "hit": False, "via": "global", "batch": ["c", "d"], "victims": ["g@1"],
            "rule": "it costs least", "options": options, "passed_over": ["b"], "passed_over_count": 21,
            "overtaken_by": [], "overtaken_by_count": 0,
            "service": {
                "kind": "cpu", "estimate_s": 0.4, "p50_s": 0.31, "p90_s": 0.92, "calls": 123, "size": 512.0,
            },
        },
        "a",
    )  # fmt: skip

    shown = capsys.readouterr().out
    assert "running: a miss on n1/cpu:0 at 12.000 s" in shown
    assert "load n1/cpu:0" in shown
    assert "21: b, and 20 more" in shown
    assert "400 ms (p50 310 ms, p90 920 ms, 123 calls on cpu, for a size of 512)" in shown
    assert "2: c, d" in shown
    assert "no call" in shown
