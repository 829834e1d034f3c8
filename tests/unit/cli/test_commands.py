"""
The commands against a real gateway's management routes, served over loopback, with the shipped fakes behind them; the
invocation route is a stand-in here, since no worker runs.
"""

import asyncio
import base64
import hashlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn
from rich.console import Console
from tests.unit.cli.conftest import invoke as run
from tests.unit.gateway.fakes import FakeScheduler, FakeWorkers, MemoryArtifacts, MemorySecrets, MemoryStore

from gpufaas_cli.commands import top
from gpufaas_cli.commands.invoke import describe_timing
from gpufaas_cli.main import COMMANDS, module_of
from gpufaas_cli.stack import read_stack
from gpufaas_core import compiled
from gpufaas_core.logs import FunctionLogs, Printed
from gpufaas_core.model import (
    Device,
    DeviceId,
    DeviceStatus,
    EngineStatus,
    Failing,
    FunctionId,
    ParkedStatus,
    Profile,
    ResidentStatus,
)
from gpufaas_core.reservations import reservation
from gpufaas_core.revision import git_revision
from gpufaas_core.units import GiB, MiB
from gpufaas_gateway.api import management_app
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.metrics import Metrics
from gpufaas_scheduler.policies.spec import Chosen, PolicySpec

DEVICE = Device(DeviceId("n1/cpu:0"), "cpu", 2 * GiB)
GPUFAAS = str(Path(sys.executable).with_name("gpufaas"))
Scope = dict[str, Any]


class Gateway:
    """A gateway on a port of its own, in a thread. Every request that it saw is in `seen`."""

    def __init__(self, root: Path) -> None:
        self.artifacts = MemoryArtifacts()
        self.workers = FakeWorkers(DEVICE)
        self.scheduler = FakeScheduler(DEVICE)
        self.logs = FunctionLogs(root / "gateway-logs")
        metrics = Metrics(self.scheduler.status)
        secrets = MemorySecrets()
        self.deployer = Deployer(MemoryStore(), self.artifacts, self.workers, self.scheduler, secrets=secrets)
        self.catalogue = self.deployer.catalogue
        self.management = management_app(
            self.deployer, self.scheduler, self.logs, self.artifacts, metrics, secrets, version="0.1.0", commit="abc",
            standbys=lambda: self.blank,
        )  # fmt: skip
        self.blank: dict[str, int] = {}
        """Its node's processes that wait to become workers."""
        self.seen: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.answer_all: int | None = None
        """With a status: the answer to everything."""
        self.starting = 0
        """So many requests are answered as by a gateway that has not read its functions yet."""
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(self.app, interface="asgi3", lifespan="off", log_config=None))
        self._thread = threading.Thread(target=self._run)

    async def app(self, scope: Scope, receive: Any, send: Any) -> None:
        self.seen.append((scope["method"], scope["path"]))
        if self.starting:
            self.starting -= 1
            await self._send(send, 503, b"starting", ("Retry-After", "0"))
        elif self.answer_all is not None:
            await self._send(send, self.answer_all, b"so it is\n")
        elif scope["path"].startswith("/function/"):
            await self._function(scope, receive, send)
        else:
            if scope["method"] == "PUT" and scope["path"] == "/system/functions":
                for digest in self.artifacts.content:
                    self.workers.bundle(digest)
            await self.management(scope, receive, send)

    async def _function(self, scope: Scope, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        self.headers.append({key.decode(): value.decode() for key, value in scope["headers"]})
        if "fails" in scope["path"]:
            await self._send(send, 500, b"ValueError: no such digit")
        elif "breaks" in scope["path"]:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-call-id", b"c-1")]})
            await send({"type": "http.response.body", "body": b"data: 1\n", "more_body": True})
        elif "none" in scope["path"]:
            await self._send(send, 404, b"not deployed\n", ("X-OpenFaaS-Internal", "gateway"))
        else:
            timing = "queue;dur=0.21, load;dur=1903.5, run;dur=58"
            start = [("Server-Timing", timing), ("X-Gpufaas-Start", "disk"), ("X-Gpufaas-Device", "n1/cpu:0")]
            await self._send(send, 200, body[::-1] + scope["query_string"] + b"\xff", *start)

    async def _send(self, send: Any, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        pairs = [(key.lower().encode(), value.encode()) for key, value in headers]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})

    def _run(self) -> None:
        async def serve() -> None:
            await self.deployer.load()
            await self._server.serve(sockets=[self._socket])

        asyncio.run(serve())

    def __enter__(self) -> "Gateway":
        self._thread.start()
        self._socket.listen()  # from here on connections wait until the server is up
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        self.logs.close()


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def gateway(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    with Gateway(here / ".gateway") as running:
        monkeypatch.setenv("OPENFAAS_URL", running.url)
        yield running


def stack_of(*names: str, lang: str = "python3-http") -> None:
    for name in names:
        assert run("new", name, "--lang", lang).exit_code == 0


def deployed(gateway: Gateway) -> FunctionId:
    """Deploy a function of a new stack file."""
    stack_of("a")
    run("up")
    (function,) = gateway.catalogue.everywhere()
    return function.function_id


# --- help and usage ---


def test_help_and_stack_files_need_neither_torch_nor_fastapi_nor_httpx() -> None:
    code = (
        "import sys; from gpufaas_cli.main import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "assert not {'torch', 'fastapi', 'starlette', 'httpx', 'numpy', 'rich'} & set(sys.modules)\n"
        "ours = {each.partition('.')[0] for each in sys.modules if each.startswith('gpufaas')}\n"
        "assert ours <= {'gpufaas', 'gpufaas_cli', 'gpufaas_core', 'gpufaas_templates'}, ours\n"
    )

    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_no_command_imports_torch_or_fastapi() -> None:
    code = (
        f"import importlib, sys\nfor name in {[module_of(each) for each in COMMANDS if each != 'serve']}:\n"
        "    importlib.import_module(name)\n"
        "    assert not {'torch', 'fastapi', 'starlette', 'numpy'} & set(sys.modules), name\n"
    )

    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["lst"], "gpufaas: no such command 'lst': did you mean 'list'? (see 'gpufaas --help')"),
        (["invoke", "a", "-H", "no colon"], "'no colon' is not 'NAME: VALUE'"),
        (["invoke", "a", "-H", "a: b\r\nc: d"], "line break"),
        (["invoke", "a", "--query", "x"], "'x' is not KEY=VALUE"),
        (["invoke", "a", "-m", "BREW"], "'BREW' is not one of"),
        (["logs", "a", "--since", "soon"], "'soon' is not a duration"),
        (["logs", "a", "--since-time", "noon"], "'noon' is not a time"),
        (["logs", "a", "--tail", "0"], "gpufaas: invalid value for '-t'"),
        (["up", "-e", "novalue"], "'novalue' is not KEY=VALUE"),
        (["serve", "--policy", "best"], "no policy is called 'best'"),
        (["serve", "--gateway-workers", "2"], "gpufaas gateway --gateway-workers N"),
        (["serve", "--max-body", "big"], "'big' is not a memory size"),
        (["serve", "--port", "70000"], "70000 is not in the range"),
        (["new"], "name the function"),
        (["new", "a"], "say what a is made from"),
        (["new", "a", "--lang", "python3-htp"], "did you mean python3-http?"),
        (["new", "Bad_Name", "--lang", "python3-http"], "cannot be the name of a function"),
        (["new", "x-ray", "--lang", "python3-http"], "keys that begin with x- are your own"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(args: list[str], message: str) -> None:
    result = run(*args)

    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["up", "build", "deploy", "remove"])
def test_no_stack_file_is_exit_code_2_and_says_how_to_get_one(command: str) -> None:
    result = run(command)

    assert result.exit_code == 2
    assert "no stack.yaml or stack.yml here" in result.stderr
    assert "gpufaas new" in result.stderr


@pytest.mark.parametrize("command", ["up", "build", "deploy", "remove"])
def test_a_bad_stack_file_is_exit_code_2_with_its_line(command: str, here: Path) -> None:
    (here / "stack.yml").write_text("version: 1.0\nprovider: {name: openfaas}\nfunctions:\n  a: {imag: x}\n")

    result = run(command)

    assert result.exit_code == 2
    assert result.stderr.startswith("gpufaas: stack.yml:4: unknown key 'imag' in function a: did you mean 'image'?")


@pytest.mark.slow
def test_our_exit_codes_are_those_of_the_process(here: Path) -> None:
    """CliRunner runs in this process; a shell sees the same."""
    env = {**os.environ, "OPENFAAS_URL": "http://127.0.0.1:9"}

    codes = {
        command: subprocess.run([GPUFAAS, *command.split()], env=env, capture_output=True, cwd=here).returncode
        for command in ("version --short-version", "build", "list", "new a --lang python3-http", "new a --lang nope")
    }

    assert codes == {
        "version --short-version": 0,
        "build": 2,
        "list": 3,
        "new a --lang python3-http": 0,
        "new a --lang nope": 2,
    }


# --- the gateway is not there, or not for us ---


def test_up_says_that_nobody_is_there_before_it_builds(here: Path) -> None:
    stack_of("a")

    result = run("up", "-g", "http://127.0.0.1:9")

    assert result.exit_code == 3
    assert not (here / "build").exists()


def test_a_password_in_the_url_is_sent_and_never_shown(gateway: Gateway) -> None:
    url = gateway.url.replace("//", "//admin:hunter2@")
    gateway.answer_all = 401

    assert "hunter2" not in run("list", "-g", url).output


@pytest.mark.parametrize("args", [["list"], ["top", "--once"]], ids=" ".join)
@pytest.mark.parametrize("status", [200, 302, 404])
def test_something_else_at_that_address_is_exit_code_3(gateway: Gateway, args: list[str], status: int) -> None:
    gateway.answer_all = status

    result = run(*args)

    assert result.exit_code == 3
    assert "name yours with -g URL" in result.stderr or "name that with -g URL" in result.stderr


def test_a_url_that_is_none_is_exit_code_3() -> None:
    assert run("list", "-g", "ftp://x").exit_code == 3


def test_a_gateway_that_fails_is_exit_code_1_with_its_words(gateway: Gateway) -> None:
    gateway.answer_all = 500

    result = run("list")

    assert (result.exit_code, result.stderr) == (1, "gpufaas: so it is\n")


def test_a_gateway_that_is_starting_is_waited_for(gateway: Gateway) -> None:
    gateway.starting = 2

    assert run("list").exit_code == 0
    assert gateway.seen == [("GET", "/system/functions")] * 3


def test_a_reader_that_leaves_is_no_traceback(gateway: Gateway) -> None:
    script = f"{GPUFAAS} version | true; head -c 4000000 /dev/zero | {GPUFAAS} invoke a | head -c 1 > /dev/null"

    shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True)

    assert gateway.bodies
    assert shown.stderr == ""


# --- new, build, up ---


def test_new_writes_a_function_and_a_stack_file_and_extends_it(here: Path) -> None:
    first = run("new", "a", "--lang", "python3-http")
    (here / "stack.yaml").write_text((here / "stack.yaml").read_text() + "# my note\n")
    second = run("new", "b", "--lang", "python3-torch")

    text = (here / "stack.yaml").read_text()
    assert "Stack file written: stack.yaml" in first.output
    assert "Stack file updated: stack.yaml" in second.output
    assert (here / "a" / "handler.py").is_file()
    assert (here / "b" / "handler.py").is_file()
    assert text.index("  a:") < text.index("  b:") < text.index("# my note")
    assert (here / ".gitignore").read_text() == "/template/\n/build/\n/.secrets/\n"


def test_new_adds_to_gitignore_what_is_not_in_it(here: Path) -> None:
    (here / ".gitignore").write_text("*.pyc\n/build")

    run("new", "a", "--lang", "python3-http")

    assert (here / ".gitignore").read_text() == "*.pyc\n/build\n/template/\n/.secrets/\n"


def test_new_writes_limits_and_the_gateway(here: Path) -> None:
    first = ["--memory-limit", "128Mi", "--cpu-request", "100m", "-g", "http://gw:8080"]
    assert run("new", "a", "--lang", "python3-http", *first).exit_code == 0
    assert run("new", "b", "--lang", "python3-http", "--memory-limit", "1Gi", "--cpu-limit", "1").exit_code == 0

    stack = read_stack(here / "stack.yaml")
    assert stack.gateway == "http://gw:8080"
    assert (stack.functions["a"].limits, stack.functions["a"].requests) == ({"memory": "128Mi"}, {"cpu": "100m"})
    assert stack.functions["b"].limits == {"memory": "1Gi", "cpu": "1"}
    assert run("new", "c", "--lang", "python3-http", "--memory-limit", "1, x: y").exit_code == 2


def test_new_writes_what_the_template_needs_and_what_is_given_goes_before_it(here: Path) -> None:
    """As scaffolded, the image template's model had 192 MiB and was killed while it imported torch."""
    run("new", "a", "--lang", "python3-torch-image")
    run("new", "b", "--lang", "python3-torch-image", "--memory-limit", "2Gi")

    first, second = read_stack(here / "stack.yaml", env={}).functions.values()
    assert (first.limits, second.limits) == ({"memory": "1Gi"}, {"memory": "2Gi"})


def test_new_of_a_name_that_is_there_changes_nothing(here: Path) -> None:
    stack_of("a")
    before = (here / "stack.yaml").read_text()
    (here / "b").mkdir()

    assert run("new", "a", "--lang", "python3-http").exit_code == 2
    assert "exists already" in run("new", "b", "--lang", "python3-http").stderr
    assert (here / "stack.yaml").read_text() == before


def test_new_appends_to_the_file_that_is_named(here: Path) -> None:
    assert run("new", "a", "--lang", "python3-http", "--append", "other.yaml").exit_code == 0

    assert (here / "other.yaml").is_file()
    assert not (here / "stack.yaml").exists()


def test_templates_are_listed() -> None:
    assert "python3-torch" in run("new", "--list").output
    assert "python3-torch" in [each["name"] for each in json.loads(run("template", "list", "--json").output)]


def test_what_has_not_changed_is_not_built_again(here: Path) -> None:
    stack_of("a")

    first, second = (json.loads(run("build", "--json").stdout)[0] for _ in range(2))
    (here / "a" / "handler.py").write_text("def handle(event, context):\n    return 'new'\n")
    third = json.loads(run("build", "--json").stdout)[0]

    assert [each["up_to_date"] for each in (first, second, third)] == [False, True, False]
    assert first["digest"] == second["digest"] != third["digest"]


def test_up_builds_uploads_and_deploys(gateway: Gateway, here: Path) -> None:
    stack_of("a")
    text = (here / "stack.yaml").read_text()
    (here / "stack.yaml").write_text(text + "    labels: {from: file, other: file}\n    environment: {ON: yes}\n")

    result = run("up", "-l", "from=flag", "-e", "A=b=c", "--annotation", "gpufaas.timeout=5s")

    assert result.exit_code == 0, result.output
    assert "Deploying: a.\n\nDeployed. 202 Accepted.\n" in result.stdout
    assert f"URL: {gateway.url}/function/a\n" in result.stdout
    digest, content = next(iter(gateway.artifacts.content.items()))
    assert hashlib.sha256(content).hexdigest() == digest
    found = json.loads(run("describe", "a", "--json").stdout)
    assert found["labels"].items() >= {"from": "flag", "other": "file"}.items()
    assert found["envVars"] == {"ON": "yes", "A": "b=c"}
    assert found["annotations"] == {"gpufaas.timeout": "5s", "gpufaas.bundle": digest}


def test_a_second_up_updates_and_sends_nothing_again(gateway: Gateway) -> None:
    stack_of("a")
    run("up")
    gateway.seen.clear()

    result = json.loads(run("deploy", "--json", "-l", "n=2").stdout)

    digest = result[0]["digest"]
    assert result[0]["status"] == 200
    assert result[0]["uploaded_bytes"] == 0
    assert gateway.seen == [
        ("GET", "/system/info"),
        ("HEAD", f"/system/artifacts/{digest}"),
        ("PUT", "/system/functions"),
        ("GET", "/system/function/a"),
    ]
    assert result[0]["revision"] == json.loads(run("history", "a", "--json").stdout)[0]["revision"]


def test_weights_are_uploaded_by_their_own_digest(gateway: Gateway, here: Path) -> None:
    stack_of("a", lang="python3-torch")
    weights = os.urandom(3 * MiB)
    (here / "a" / "w.safetensors").write_bytes(weights)

    assert run("up").exit_code == 0
    assert gateway.artifacts.content[hashlib.sha256(weights).hexdigest()] == weights


def test_a_failure_of_one_does_not_stop_the_others(gateway: Gateway, here: Path) -> None:
    stack_of("a", "b", "c")
    (here / "b" / "handler.py").write_text("def handle(:\n")

    result = run("up")

    assert result.exit_code == 1
    assert [each["name"] for each in json.loads(run("list", "--json").stdout)] == ["a", "c"]
    assert "gpufaas: b: b/handler.py:1: " in result.stderr
    assert result.stderr.splitlines()[-1] == "gpufaas: 1 of 3 functions not deployed: b"
    assert gateway.seen.count(("PUT", "/system/functions")) == 2


def test_a_handler_folder_that_is_not_there_is_named_at_build(here: Path) -> None:
    stack_of("a")
    (here / "a").rename(here / "moved")

    result = run("build")

    assert result.exit_code == 1
    assert "handler folder a of function a does not exist" in result.stderr


@pytest.mark.usefixtures("gateway")
def test_what_the_gateway_refuses_is_told() -> None:
    stack_of("a")

    result = run("up", "--annotation", "gpufaas.memori=1Gi")

    assert result.exit_code == 1
    assert "gpufaas: a: annotation gpufaas.memori is not known: did you mean gpufaas.memory?" in result.stderr


@pytest.mark.usefixtures("gateway")
def test_only_what_is_selected_is_deployed() -> None:
    stack_of("cnn-a", "cnn-b", "echo")

    assert run("up", "--filter", "cnn-*").exit_code == 0
    assert run("list", "-q").stdout == "cnn-a\ncnn-b\n"
    assert run("up", "nope").exit_code == 2


def test_the_stack_files_gateway_counts_unless_a_flag_says_otherwise(gateway: Gateway, here: Path) -> None:
    (here / "stack.yaml").write_text(
        "provider: {name: openfaas, gateway: 'http://127.0.0.1:9'}\nfunctions: {a: {image: x}}\n"
    )

    assert run("list").exit_code == 3
    assert run("list", "-g", gateway.url).exit_code == 0


# --- reading ---


@pytest.mark.usefixtures("gateway")
def test_list_has_faas_clis_layout() -> None:
    stack_of("a")
    run("up")

    plain, verbose = run("list").stdout.splitlines(), run("ls", "-v").stdout.splitlines()

    assert plain[0] == f"{'Function':<30}\t{'Invocations':<15}\t{'Replicas':<5}\tState"
    assert plain[1].split() == ["a", "0", "1", "idle"]
    assert verbose[0].split() == ["Function", "Image", "Invocations", "Replicas", "CreatedAt", "State"]
    assert "a:latest" in verbose[1]
    assert re.search(r"\t\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\tidle$", verbose[1])


def test_list_and_describe_say_what_fails_and_why(gateway: Gateway) -> None:
    function = deployed(gateway)
    failing = {function: Failing("the last load, on n1/cpu:0: no such file", 4, 60.0, 2.5)}
    gateway.scheduler.now = EngineStatus("lalb-o3", (), {}, {}, {}, failing)

    listed, shown = run("list").stdout.splitlines()[1], run("describe", "a").stdout

    assert re.search(r"\tfailed since \d{4}-.*: the last load, on n1/cpu:0: no such file$", listed)
    assert re.search(r"^Status: +Not Ready: failed since 2.* after 4 loads; it is tried again in 2 s, or", shown, re.M)
    assert re.search(r"Failed: +the last load, on n1/cpu:0: no such file", shown)


def test_describe_says_where_there_are_several_copies(gateway: Gateway) -> None:
    function = deployed(gateway)
    copies = tuple(ResidentStatus(function, MiB, 0, False, False, 1.0, copy=copy) for copy in range(3))
    device = DeviceStatus(DEVICE, 3 * MiB, False, copies, 0, 0, 0, 0, 0, 0.0)
    gateway.scheduler.now = EngineStatus("lalb-o3", (device,), {}, {}, {function: 3})

    shown = run("describe", "a").stdout

    assert "Available Replicas: 3\n" in shown
    assert "n1/cpu:0 (3 copies)" in shown


def test_describe_of_a_function_at_zero_says_why_it_is_available(gateway: Gateway) -> None:
    function = deployed(gateway)
    gateway.scheduler.now = EngineStatus("lalb-o3", (), {}, {}, {function: 0})

    shown = run("describe", "a").stdout

    assert re.search(r"Status: +Ready\nReplicas: +0\nAvailable Replicas: +1 \(loaded by the next call\)\n", shown)


def test_describe_says_where_a_copy_is_parked_and_how_many_standbys_wait(gateway: Gateway) -> None:
    function = deployed(gateway)
    device = DeviceStatus(DEVICE, 0, False, (), 0, 0, 0, 0, 0, 0.0, parked=(ParkedStatus(function, 3, MiB),))
    gateway.scheduler.now = EngineStatus("lalb-o3", (device,), {}, {})
    gateway.blank = {"ready": 2, "memory": 8 * MiB}

    shown = run("describe", "a").stdout

    assert re.search(r"Resident on: +no device: the next call wakes or loads it\n", shown)
    assert re.search(r"Parked on: +n1/cpu:0\n", shown)
    assert re.search(r"Standbys: +2 processes wait for any function\n", shown)
    assert json.loads(run("describe", "a", "--json").stdout)["gpufaas"]["parked"] == ["n1/cpu:0"]


def test_list_and_describe_say_why_copies_are_missing(gateway: Gateway) -> None:
    function = deployed(gateway)
    copy = ResidentStatus(function, MiB, 0, False, False, 1.0)
    device = DeviceStatus(DEVICE, MiB, False, (copy,), 0, 0, 0, 0, 0, 0.0)
    why = "a needs 30 % of the compute of n1/cpu:0, which has 20 % spare"
    gateway.scheduler.now = EngineStatus("lalb-o3", (device,), {}, {}, {function: 2}, lacking={function: why})

    listed, shown = run("list").stdout.splitlines()[1], run("describe", "a").stdout

    assert listed.endswith(f"\tresident on n1/cpu:0 (1 of 2 copies: {why})")
    assert re.search(f"Copies: +fewer than it should have: {why}\n", shown)


def test_what_of_a_share_is_not_enforced_is_said_at_deploy_and_by_describe(gateway: Gateway) -> None:
    stack_of("a", lang="python3-torch")
    labels = {**DEVICE.labels, "compute.enforcement": "none"}
    device = DeviceStatus(msgspec.structs.replace(DEVICE, labels=labels), 0, False, (), 0, 0, 0, 0, 0, 0.0)
    gateway.scheduler.now = EngineStatus("lalb-o3", (device,), {}, {})

    said = run("up", "--annotation", "gpufaas.sharing=share", "--annotation", "gpufaas.compute=30").stdout

    assert "Note: its share of 30 per cent is not enforced on n1/cpu:0, so it may use more: give such a device" in said
    described = run("describe", "a").stdout
    assert re.search(r"Share enforced: +not: a copy may use more than its share\n", described)
    assert re.search(r"Note: +its share of 30 per cent is not enforced on n1/cpu:0", described)


def test_what_other_copies_keep_out_is_said_at_deploy_and_by_describe(gateway: Gateway) -> None:
    stack_of("a", lang="python3-torch")
    run("up")
    why = "there is no room for function a: it needs 100 % of the compute of n1/cpu:0 (60 % of 100 % are held)"

    class OfAll(dict[FunctionId, str]):
        def get(self, *_: object) -> str:  # type: ignore[override]  # an update has a new id
            return why

    gateway.scheduler.now = EngineStatus("lalb-o3", (), {}, {}, kept_out=OfAll())

    assert f"Note: its calls are refused for now: {why}.\n" in run("up").stdout
    assert re.search(rf"Calls refused: +{re.escape(why)}\n", run("describe", "a").stdout)


def test_describe_says_which_batches_there_may_be_and_were(gateway: Gateway) -> None:
    stack_of("a", lang="python3-torch")
    named = {"batch-max": "8", "batch-wait": "5ms", "batch-adaptive": "true", "latency-goal": "200ms"}
    run("up", *(part for name, text in named.items() for part in ("--annotation", f"gpufaas.{name}={text}")))
    stats = gateway.catalogue.all("openfaas-fn")[0].stats
    batches = r"Batches: +up to 8 calls together, which wait up to 5.0 ms for others, fewer to keep the latency goal"

    assert re.search(rf"{batches}\n", run("describe", "a").stdout)
    for size in (1, 4, 4, 4, 4):
        stats.begun += 1
        stats.observe(200, 0.1, hit=True)
        if size > 1:
            stats.observe_batch(size)

    assert re.search(rf"{batches}; 2.5 so far \(31% full\)\n", run("describe", "a").stdout)


def test_describe_shows_state_settings_and_platform(gateway: Gateway) -> None:
    stack_of("a")
    run("up", "-e", "B=2", "-e", "A=1", "-e", "exec_timeout=3s")

    shown = run("describe", "a").stdout

    assert re.search(r"Timeout: +60 s; of the run 3 s\n", shown)
    assert "Name:               a\nStatus:             Ready\n" in shown
    assert f"URL:                {gateway.url}/function/a\n" in shown
    assert re.search(r"Environment:\n A: +1\n B: +2\n exec_timeout: +3s\n", shown)
    assert "Resident on:" in shown
    assert "no device: the next call loads it" in shown
    assert "Secrets" not in shown
    assert "Secrets: <none>" in run("describe", "a", "-v").stdout


def test_describe_says_measured_only_of_what_was(gateway: Gateway) -> None:
    """A model that was loaded for a call that failed had a call time "(measured)" without a measurement."""
    stack_of("a")
    run("up")
    profiles = gateway.catalogue.all("openfaas-fn")[0].profiles

    profiles["cpu"] = Profile(1.0, 0.25, 300 * MiB, measured=True, estimated=("call",))
    assert (
        " cpu: load 1.00 s, call 250 ms, memory 300 MiB (measured; still estimated: call)"
        in run("describe", "a").stdout
    )
    profiles["cpu"] = Profile(1.0, 0.25, 300 * MiB, measured=True)
    assert "memory 300 MiB (measured)\n" in run("describe", "a").stdout


def test_describe_shows_on_which_devices_it_may_run_and_why(gateway: Gateway) -> None:
    gpu = Device(DeviceId("n1/cuda:0"), "Test GPU", 8 * GiB, {"gpu": "true", "zone": "a"})
    gateway.workers.joined = [DEVICE, gpu]
    gateway.scheduler.now = FakeScheduler(DEVICE, gpu).now
    stack_of("a")
    run("up", "--constraint", "gpu=true", "--annotation", "com.openfaas.profile=gpu")

    shown = run("describe", "a").stdout

    assert "Constraints:\n - gpu=true\n" in shown
    assert re.search(r"May run on: +n1/cuda:0: gpu=true \(profile gpu\), gpu=true \(constraints\)\n", shown)


def test_top_shows_the_labels_that_an_operator_gave(gateway: Gateway) -> None:
    labelled = Device(DeviceId("n1/cpu:1"), "cpu", GiB, {"gpu": "false", "device.id": "n1/cpu:1", "zone": "a"})
    gateway.scheduler.now = FakeScheduler(DEVICE, labelled).now

    heading, _, first, second = run("top", "--once").stdout.splitlines()[2:6]

    assert heading.split()[-1] == "LABELS"
    assert second.split()[-1] == "zone=a"
    assert first.split()[-1] == "0"


@pytest.mark.usefixtures("gateway")
@pytest.mark.parametrize("args", [["describe", "nope"], ["logs", "nope"]], ids=" ".join)
def test_an_unknown_function_is_exit_code_1_and_says_where_to_look(args: list[str]) -> None:
    result = run(*args)

    assert result.exit_code == 1
    assert "gpufaas list" in result.stderr


@pytest.mark.usefixtures("gateway")
def test_remove_by_name_or_by_stack_file() -> None:
    stack_of("a", "b")
    run("up")

    named = run("rm", "a")
    rest = run("delete")

    assert named.stdout == "Deleting: a.\nRemoving old function.\n"
    assert rest.stdout == ("Deleting: a.\nNo existing function to remove.\nDeleting: b.\nRemoving old function.\n")
    assert (named.exit_code, rest.exit_code) == (0, 0)
    assert run("list", "-q").stdout == ""


def test_what_cannot_be_removed_does_not_stop_the_rest(gateway: Gateway) -> None:
    gateway.answer_all = 500

    result = run("remove", "a", "b")

    assert result.exit_code == 1
    assert result.stderr == (
        "gpufaas: a: so it is\ngpufaas: b: so it is\ngpufaas: 2 of 2 functions not removed: a, b\n"
    )


@pytest.mark.usefixtures("gateway")
def test_remove_all_asks_first_and_then_removes_every_function() -> None:
    stack_of("a", "b")
    run("up")

    refused = run("remove", "--all", data=b"n\n")
    unasked = run("remove", "--all")
    kept = run("list", "-q").stdout.split()
    removed = run("remove", "--all", data=b"y\n")

    assert "Remove 2 of openfaas-fn: a, b? (--yes does not ask)" in refused.stderr
    assert (refused.exit_code, unasked.exit_code, kept) == (130, 130, ["a", "b"])
    assert removed.exit_code == 0
    assert run("list", "-q").stdout == ""
    assert run("rm", "--all").exit_code == 0  # there is nothing to ask about
    assert run("remove", "--all", "a", "--yes").exit_code == 2


def test_of_a_long_log_the_last_hundred_lines_are_shown_unless_others_are_asked_for(gateway: Gateway) -> None:
    stack_of("a")
    run("up")
    gateway.logs.extend("a.openfaas-fn", "w1", [Printed(f"line {number}") for number in range(150)])

    shown = run("logs", "a")
    every = [run("logs", "a", *given).stdout.splitlines() for given in (["--tail", "-1"], ["--since", "1h"])]

    assert [line.split(" ", 1)[1] for line in shown.stdout.splitlines()] == [f"line {n}" for n in range(50, 150)]
    assert shown.stderr == "gpufaas: the last 100 lines; --tail -1 shows all that are kept\n"
    assert [len(lines) for lines in every] == [150, 150]


def test_what_a_function_should_declare_is_said_by_describe_top_and_the_next_up(gateway: Gateway) -> None:
    stack_of("a")
    run("up", "--annotation", "gpufaas.memory=2GiB")
    found = gateway.catalogue.all("openfaas-fn")[0]
    found.stats.finished = 10
    found.profiles["cpu"] = Profile(1.0, 0.25, reservation(312 * MiB), measured=True)
    gateway.deployer._store.save_profile(found.spec.profiled, "cpu", found.profiles["cpu"])  # as the keeper does

    advice = "Uses at most 312 MiB of the 2.0 GiB that it declares: gpufaas.memory: 400MiB frees 1.6 GiB."
    assert re.search(rf"Right memory: +{re.escape(advice)}\n", run("describe", "a").stdout)
    assert f"a.openfaas-fn: {advice}\n" in run("top", "--once").stdout
    assert f"\n{advice}\n" in run("up", "--annotation", "gpufaas.memory=2GiB").stdout


def test_logs_are_lines_of_text_or_json(gateway: Gateway) -> None:
    stack_of("a")
    run("up")
    for number in range(3):
        gateway.logs.extend("a.openfaas-fn", "w1", [Printed(f"line {number}")])

    plain = run("logs", "a", "--tail", "2").stdout.splitlines()
    objects = [json.loads(line) for line in run("logs", "a", "--json", "--since", "1h").stdout.splitlines()]

    assert [line.split(" ", 1)[1] for line in plain] == ["line 1", "line 2"]
    assert [each["text"] for each in objects] == ["line 0", "line 1", "line 2"]
    assert run("logs", "a", "--lines", "1", "--instance", "--name").stdout.endswith("Z a (w1) line 2\n")
    assert run("logs", "a", "--lines", "1", "--instance", "--time-format", "").stdout == "(w1) line 2\n"
    assert re.fullmatch(r"\d\d:\d\d line 2\n", run("logs", "a", "--lines", "1", "--time-format", "%H:%M").stdout)
    assert run("logs", "a", "--from-instance", "w2").stdout == ""
    assert 'text="line 2"' in run("logs", "a", "-o", "keyvalue").stdout


def test_logs_show_the_call_and_the_stream_of_a_line_and_those_of_one_call(gateway: Gateway) -> None:
    stack_of("a")
    run("up")
    said = [Printed("loads", "stderr"), Printed("one", "stdout", "id-1"), Printed("two", "stdout", "id-2")]
    gateway.logs.extend("a.openfaas-fn", "w1", said)
    shown = ("logs", "a", "--time-format", "")

    assert run(*shown, "--show-call", "--show-stream").stdout == (
        "stderr loads\nstdout [id-1] one\nstdout [id-2] two\n"
    )
    assert run(*shown, "--call", "id-2").stdout == "two\n"
    assert [json.loads(line).get("callId") for line in run("logs", "a", "--json").stdout.splitlines()] == [
        None, "id-1", "id-2",
    ]  # fmt: skip
    assert run(*shown, "-o", "keyvalue", "--show-call", "--show-stream", "--tail", "1").stdout == (
        'timestamp="" stream="stdout" callId="id-2" text="two"\n'
    )
    none = run("logs", "a", "--call", "id-3")
    assert (none.stdout, none.exit_code) == ("", 0)
    assert none.stderr.startswith("gpufaas: call id-3 has left no lines in the log of a.")


def test_debugging_shows_requests_without_who_we_are(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAAS_DEBUG", "1")

    shown = run("list", "-g", gateway.url.replace("//", "//me:s3cret@"))

    assert f"> GET {gateway.url}/system/functions\n" in shown.stderr
    assert "> authorization: <redacted>\n" in shown.stderr
    assert "< 200 OK\n" in shown.stderr
    assert "s3cret" not in shown.output
    assert base64.b64encode(b"me:s3cret").decode() not in shown.output


def test_version_shows_both_ends(gateway: Gateway) -> None:
    shown = run("version")

    assert "CLI:" in shown.stdout
    assert git_revision() in shown.stdout
    assert compiled.said() in shown.stdout
    assert gateway.url in shown.stdout
    assert "processes" in shown.stdout
    assert json.loads(run("version", "--json").stdout)["info"]["provider"]["provider"] == "gpufaas"


def test_version_needs_no_gateway() -> None:
    result = run("version", "-g", "http://127.0.0.1:9")

    assert result.exit_code == 0
    assert "no gateway answers" in result.stderr


def test_top_shows_devices_residents_and_queues(gateway: Gateway) -> None:
    model, other = FunctionId("digits.openfaas-fn@3"), FunctionId("vgg16.openfaas-fn@1")
    resident = ResidentStatus(model, 300 * MiB, running=1, loading=False, pinned=True, last_used=1.0)
    device = DeviceStatus(
        device=DEVICE, used=300 * MiB, busy=True, resident=(resident,), local_queue=2, served=12, hits=9, misses=3,
        evictions=1, estimated_finish_s=0.4,
    )  # fmt: skip
    gateway.scheduler.now = EngineStatus("lalb-o3", (device,), {model: 2, other: 5}, {model: 1})

    shown = run("top", "--once").stdout

    assert "policy lalb-o3" in shown
    assert "n1/cpu:0" in shown
    assert "300 MiB / 2.0 GiB" in shown
    assert "digits.openfaas-fn" in shown
    assert "queued, resident nowhere: vgg16.openfaas-fn 5" in shown
    assert json.loads(run("top", "--json").stdout)["devices"][0]["evictions"] == 1


def test_top_shows_the_shares_of_copies_and_how_much_of_a_device_is_held(gateway: Gateway) -> None:
    ours, other = FunctionId("ours.openfaas-fn@3"), FunctionId("other.openfaas-fn@1")
    copies = (
        ResidentStatus(ours, MiB, running=1, loading=False, pinned=False, last_used=1.0, share=30),
        ResidentStatus(other, MiB, running=0, loading=False, pinned=False, last_used=1.0),
    )
    plain = DeviceStatus(DEVICE, 2 * MiB, False, copies[1:], 0, 0, 0, 0, 0, 0.0)
    shared = msgspec.structs.replace(plain, resident=copies, reserved=30)

    def rows(*devices: DeviceStatus) -> dict[str, list[str]]:
        gateway.scheduler.now = EngineStatus("lalb-o3", devices, {}, {})
        return {line.split()[0]: line.split() for line in run("top", "--once").stdout.splitlines() if line.strip()}

    shown = rows(shared)
    assert "COMPUTE" in shown["DEVICE"]
    assert " ".join(shown["n1/cpu:0"]).endswith("30 / 100 %")
    assert shown["COPY"][3] == "SHARE"
    assert (shown["ours.openfaas-fn"][4:6], shown["other.openfaas-fn"][4]) == (["30", "%"], "-")
    without = rows(plain)
    assert "COMPUTE" not in without["DEVICE"]
    assert "SHARE" not in without["COPY"]


def test_top_shows_how_large_and_full_batches_were(gateway: Gateway) -> None:
    stack_of("a", "b", "c")
    run("up", "--filter", "b")
    run("up", "--filter", "[ac]", "--annotation", "gpufaas.batch-max=8")
    functions = {each.name: each for each in gateway.catalogue.all("openfaas-fn")}
    copies = tuple(
        ResidentStatus(functions[name].function_id, MiB, 0, loading=False, pinned=False, last_used=1.0)
        for name in "abc"
    )
    gateway.scheduler.now = EngineStatus("lalb", (DeviceStatus(DEVICE, 0, False, copies, 0, 0, 0, 0, 0, 0.0),), {}, {})
    for size in (1, 4, 4, 4, 4):
        functions["a"].stats.observe(200, 0.1, hit=True)
        functions["a"].stats.observe_batch(size)

    rows = [line.split() for line in run("top", "--once").stdout.splitlines() if "openfaas-fn" in line]

    assert [row[6:] for row in rows] == [["up", "to", "8", "0"], ["-", "0"], ["2.5/8", "31%", "0"]]


def test_top_leaves_out_what_does_not_fit_into_a_narrow_terminal() -> None:
    def status(*nodes: str) -> dict[str, Any]:
        ours = ResidentStatus(FunctionId("a-long-name.openfaas-fn@1"), MiB, 0, False, True, 1.0, share=30)
        device = msgspec.structs.replace(DEVICE, kind="cpu-0.6", labels={**DEVICE.labels, "tier": "gold"})
        devices = [msgspec.structs.replace(device, id=DeviceId(f"{node}/cpu:0")) for node in nodes]
        counted = [DeviceStatus(each, MiB, True, (ours,), 0, 12345, 12345, 123, 123, 1.5, 9.0, 100) for each in devices]
        return msgspec.to_builtins(EngineStatus("least-wait", tuple(counted), {}, {}))

    def shown(width: int, *nodes: str) -> list[str]:
        terminal = Console(width=width, file=io.StringIO())
        terminal.print(top.render_for(terminal, status(*nodes), "http://gateway"))
        return terminal.file.getvalue().splitlines()  # type: ignore[attr-defined]

    wide, narrow, two = shown(120, "n1"), shown(80, "n1"), shown(80, "n1", "n2")
    assert not any("…" in line for lines in (wide, narrow, two) for line in lines)
    assert "tier=gold" in wide[4]
    assert wide[-1].split()[:2] == ["a-long-name.openfaas-fn", "n1/cpu:0"]
    assert " ".join(narrow[5].split()) == "cpu:0 1 MiB / 2.0 GiB busy 1.5 s 0 12345 123 123 100 %"
    assert " ".join(narrow[-1].split()) == "a-long-name cpu:0 1 MiB 30 % pinned 0 0"
    assert two[-1].split()[:3] == ["a-long-name", "2/2", "n2/cpu:0"]


def test_top_shows_each_copy_of_a_function_and_its_queue_once(gateway: Gateway) -> None:
    echo = FunctionId("echo.openfaas-fn@3")
    copies = tuple(
        ResidentStatus(echo, 20 * MiB, running=8, loading=False, pinned=True, last_used=1.0, copy=copy)
        for copy in range(3)
    )
    device = DeviceStatus(
        device=DEVICE, used=60 * MiB, busy=False, resident=copies, local_queue=0, served=24, hits=24, misses=0,
        evictions=0, estimated_finish_s=0.0,
    )  # fmt: skip
    gateway.scheduler.now = EngineStatus("lalb-o3", (device,), {echo: 77}, {echo: 24})

    rows = [line.split() for line in run("top", "--once").stdout.splitlines() if line.startswith("echo")]

    assert [row[:2] for row in rows] == [["echo.openfaas-fn", f"{number}/3"] for number in (1, 2, 3)]
    assert [row[-1] for row in rows] == ["77", "-", "-"], "they wait for any of its copies"
    assert [copy["copy"] for copy in json.loads(run("top", "--json").stdout)["devices"][0]["resident"]] == [0, 1, 2]


# --- secrets and namespaces, on the gateway's own routes ---


@pytest.mark.usefixtures("gateway")
def test_a_secret_is_made_changed_listed_and_removed() -> None:
    steps = [
        run("secret", "create", "key", "--from-literal", "hunter2"),
        run("secret", "create", "key", "--from-literal", "hunter2", "--replace"),
        run("secret", "update", "key", data="hunter3"),
        run("secret", "list"),
        run("secret", "remove", "key"),
    ]

    assert [each.exit_code for each in steps] == [0] * 5, [each.output for each in steps]
    assert steps[0].stdout == "Creating secret: key.\nCreated: 201 Created\n"
    assert steps[3].stdout == "\nNAME\nkey\n\n"
    assert not any("hunter" in each.output for each in steps)
    assert run("secret", "remove", "key").exit_code == 1
    assert run("secret", "list").stdout == "No secrets found.\n"


@pytest.mark.usefixtures("gateway")
def test_a_namespace_is_made_changed_shown_and_removed() -> None:
    assert run("namespace", "create", "dev", "-l", "team=a").stdout == "Namespace: dev created\n"
    assert run("namespaces").stdout == "Namespaces:\n - dev\n - openfaas-fn\n"
    assert run("namespace", "update", "dev", "-l", "team=b").exit_code == 0
    assert json.loads(run("namespace", "get", "dev", "--json").stdout)["labels"]["team"] == "b"
    assert "Labels:\n openfaas: 1\n team:     b\n" in run("ns", "get", "dev").stdout
    assert run("namespace", "create", "dev").exit_code == 1
    assert run("namespace", "remove", "dev").exit_code == 0
    assert run("namespace", "get", "dev").exit_code == 1


@pytest.mark.usefixtures("gateway")
def test_a_quota_is_shown_set_limit_by_limit_and_cleared() -> None:
    run("namespace", "create", "dev")
    first = run("namespace", "quota", "dev", "--functions", "2", "--memory", "8Gi", "--in-flight", "64")
    second = run("namespace", "quota", "dev", "--functions", "3", "--memory", "none", "--json")
    shown = run("namespace", "quota", "dev")
    cleared = run("namespace", "quota", "dev", "--clear", "--json")

    assert [line.split() for line in first.stdout.splitlines()] == [
        ["dev", "Used", "Limit"],
        ["functions", "0", "2"],
        ["memory", "0", "B", "8.0", "GiB"],
        ["calls", "in", "flight", "0", "64"],
        ["calls", "waiting", "0", "none"],
    ]
    limits = json.loads(second.stdout)
    assert {key: limits[key] for key in limits if key.startswith("max")} == {"maxFunctions": 3, "maxInFlight": 64}
    assert [line.split()[-1] for line in shown.stdout.splitlines()] == ["Limit", "3", "none", "64", "none"]
    assert json.loads(cleared.stdout) == {"namespace": "dev", "used": {"functions": 0, "memory": 0}}


@pytest.mark.usefixtures("gateway")
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("none",), 1, "there is no namespace none"),
        (("openfaas-fn", "--functions", "-1"), 2, "'-1' is no whole number: write for example 10, or none"),
        (("openfaas-fn", "--memory", "much"), 2, "'much'"),
        (("openfaas-fn", "--clear", "--waiting", "1"), 2, "--clear removes all limits"),
    ],
)
def test_what_is_no_quota_is_said(arguments: tuple[str, ...], status: int, message: str) -> None:
    result = run("namespace", "quota", *arguments)

    assert (result.exit_code, message in result.output) == (status, True), result.output


def test_a_deployment_over_the_quota_is_told_so_and_not_to_log_in(gateway: Gateway) -> None:
    run("namespace", "quota", "openfaas-fn", "--functions", "0")

    result = run("deploy", "--image", "x", "--name", "hello", "-g", gateway.url)

    assert result.exit_code == 1
    assert "namespace openfaas-fn is at its quota of functions (0 of 0)" in result.output
    assert "log in" not in result.output


# --- invoke ---


def test_invoke_sends_stdin_and_writes_the_answer_as_it_is(gateway: Gateway) -> None:
    result = run("invoke", "a/some path/x", "--query", "k=v w", "-H", "X-Foo: bar", data=b"\x00abc")

    assert result.exit_code == 0
    assert result.stdout_bytes == b"cba\x00k=v+w\xff"
    assert gateway.seen == [("POST", "/function/a/some path/x")]
    assert gateway.headers[0]["x-foo"] == "bar"
    assert gateway.headers[0]["content-type"] == "text/plain"
    assert result.stderr == ""


def test_invoke_streams_a_large_file_with_its_length(gateway: Gateway, here: Path) -> None:
    body = os.urandom(3 * MiB + 7)
    (here / "big").write_bytes(body)
    with (here / "big").open("rb") as stdin:
        subprocess.run([GPUFAAS, "invoke", "a", "-m", "PUT"], stdin=stdin, check=True, capture_output=True)
    subprocess.run([GPUFAAS, "invoke", "a", "-m", "PUT"], input=body, check=True, capture_output=True)

    assert gateway.bodies == [body, body]
    assert gateway.headers[0]["content-length"] == str(len(body))
    assert gateway.headers[1]["transfer-encoding"] == "chunked"


def test_invoke_takes_its_body_from_an_option_and_namespaces_go_into_the_path(gateway: Gateway) -> None:
    run("invoke", "a", "-d", "hello", "-n", "dev", "--content-type", "application/json")

    assert gateway.seen == [("POST", "/function/a.dev")]
    assert gateway.bodies == [b"hello"]
    assert gateway.headers[0]["content-type"] == "application/json"


def test_invoke_leaves_a_terminal_alone(gateway: Gateway) -> None:
    """A person who calls a function without input must not have to press Ctrl-D."""
    controller, terminal = os.openpty()
    try:
        subprocess.run([GPUFAAS, "invoke", "a"], stdin=terminal, check=True, capture_output=True, timeout=30)
    finally:
        os.close(controller)
        os.close(terminal)

    assert gateway.bodies == [b""]


@pytest.mark.usefixtures("gateway")
def test_a_function_that_fails_is_exit_code_1_with_its_body_and_status() -> None:
    result = run("invoke", "fails", data="x")

    assert result.exit_code == 1
    assert result.stdout == "ValueError: no such digit"
    assert result.stderr == "gpufaas: fails answered 500 Internal Server Error\n"


@pytest.mark.usefixtures("gateway")
def test_a_function_that_is_not_there_is_exit_code_1_and_says_where_to_look() -> None:
    result = run("invoke", "none")

    assert result.exit_code == 1
    assert "none answered 404 Not Found: 'gpufaas list' shows" in result.stderr


@pytest.mark.usefixtures("gateway")
def test_an_answer_that_breaks_off_is_exit_code_1_and_points_to_the_logs() -> None:
    """It was 3, as if there was no gateway."""
    result = run("invoke", "breaks/now", "-n", "dev", "--timing", data="x")

    assert result.exit_code == 1
    assert result.stdout == "data: 1\n"
    timing, told = result.stderr.splitlines()
    assert timing.startswith("no word from the platform about its start: ")
    assert told.startswith("gpufaas: the answer of breaks/now broke off after it had begun, call c-1: ")
    assert told.endswith(": 'gpufaas logs breaks -n dev' says why")


@pytest.mark.usefixtures("gateway")
def test_timing_of_an_error_of_the_platform_says_whose_answer_it_is() -> None:
    result = run("invoke", "none", "--timing", data="x")

    assert result.exit_code == 1
    assert result.stderr.startswith("answered by the platform, not by the function: ")


@pytest.mark.usefixtures("gateway")
def test_timing_is_told_on_stderr() -> None:
    result = run("invoke", "a", "--timing", data="x")

    assert result.stdout_bytes == b"x\xff"
    assert result.stderr.startswith("disk (its worker was started) on n1/cpu:0: ")
    assert "queue 0.2 ms + load 1.90 s + run 58 ms" in result.stderr


def test_timing_says_what_share_a_call_had_and_how_many_ran_with_it() -> None:
    headers = {"Server-Timing": "queue;dur=9, load;dur=0, run;dur=8.0, queue-batch;dur=5", "X-Gpufaas-Start": "hit"}
    more = {"X-Gpufaas-Device": "n1/cpu:0", "X-Gpufaas-Share": "30", "X-Gpufaas-Batch": "4"}

    said = describe_timing({**headers, **more}, 0.018, 0.018)

    assert said.startswith("hit (its worker was there) on n1/cpu:0 (a share of 30 %) in a batch of 4 calls: 18 ms = ")
    assert "= queue 9.0 ms (batch 5.0 ms) + load 0.0 ms + run 8.0 ms + rest 1.0 ms" in said


def test_timing_splits_the_whole_into_phases_and_the_rest() -> None:
    headers = {"Server-Timing": "queue;dur=0, load;dur=0, run;dur=8.0", "X-Gpufaas-Start": "hit"}

    assert describe_timing(headers, total_s=0.5, first_s=0.0095) == (
        "hit (its worker was there): 500 ms = queue 0.0 ms + load 0.0 ms + run 8.0 ms + rest 1.5 ms + answer 490 ms"
    )
    headers = {"Server-Timing": "queue;dur=1, load;dur=20, run;dur=2, load-process;dur=15, load-room;dur=0.01"}
    assert "load 20 ms (process 15 ms) + run 2.0 ms + rest 1.0 ms" in describe_timing(headers, 0.024, 0.024)
    assert describe_timing({}, 0.02, 0.01) == "no word from the platform about its start: 20 ms"


# --- serve ---


def test_serve_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    from gpufaas_apps import serve
    from gpufaas_apps.options import ServeOptions

    asked: list[ServeOptions] = []
    monkeypatch.setattr(serve, "run", asked.append)

    first = run("serve")
    second = run(
        "serve", "--port", "9", "--host", "0.0.0.0",
        "--auth", "on", "--auth-dir", "s", "--data", "d", "--device", "cpu:0=1GiB", "--device", "cuda:0",
        "--policy", "lalb-o3:o3_limit=7+replacement=cost-aware", "--journal", "j", "--max-queue", "5",
        "--max-body", "1MiB",
    )  # fmt: skip

    assert (first.exit_code, second.exit_code) == (0, 0)
    assert asked[0] == ServeOptions(data=here / "home" / ".local" / "share" / "gpufaas")
    assert asked[1] == ServeOptions(
        port=9, host="0.0.0.0",
        auth="on", auth_dir=Path("s"), data=here / "d", devices=("cpu:0=1GiB", "cuda:0"),
        policy=PolicySpec("lalb-o3", {"o3_limit": 7}, {"replacement": Chosen("cost-aware")}),
        journal=Path("j"), max_queue=5, max_body=MiB,
    )  # fmt: skip


@pytest.mark.usefixtures("gateway")
def test_a_history_is_shown_newest_first_and_a_rollback_goes_back() -> None:
    stack_of("a")
    run("up")
    run("up", "-e", "N=2")
    newest, oldest = json.loads(run("history", "a", "--json").stdout)

    result = run("rollback", "a")

    first = oldest["revision"]
    tries = f"Its first call loads it; if that fails, revision {first} serves again."
    assert result.stdout == f"Deployed: a as in revision {first}. {tries}\n"
    shown = run("history", "a").stdout.splitlines()
    assert [line.split()[0] for line in shown[2:]] == [newest["revision"], oldest["revision"]]
    assert shown[1].endswith("serving")
    unknown = run("rollback", "a", "--to", "r0")
    assert unknown.exit_code == 1
    assert "function a has no revision 'r0' among its last 10" in unknown.stderr


@pytest.mark.usefixtures("gateway")
def test_scale_sets_the_number_of_copies() -> None:
    stack_of("a")
    run("up")

    assert run("scale", "a", "2").stdout == "Scaling: a to 2.\n"

    assert json.loads(run("describe", "a", "--json").stdout)["replicas"] == 2
