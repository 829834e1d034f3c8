"""The program that serves a handler in a container, as a process: what its image does, without the image."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.etcd_process import free_port
from tests.waiting import LIMIT_S, until

from gpufaas_core.errors import InvalidSpec
from gpufaas_functions.http_server import ContainerSettings
from gpufaas_templates import find_template


class Server:
    def __init__(self, folder: Path, **env: str) -> None:
        self.port = free_port()
        self.log = folder.parent / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "gpufaas_functions.http_server", str(folder)],
                env={**os.environ, "PORT": str(self.port), **env}, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=LIMIT_S)

    def get(self, path: str) -> int:
        try:
            return self.http.get(path).status_code
        except httpx.TransportError:
            return 0

    def until(self, path: str, status: int) -> "Server":
        def answers() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return self.get(path) == status

        until(answers, self.log.read_text)
        return self

    def begin(self, path: str = "/") -> socket.socket:
        """Send a call. What is sent after it, on a connection of its own, is read after it."""
        connection = socket.create_connection(("127.0.0.1", self.port), LIMIT_S)
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        return connection

    def call(self, path: str = "/", content: bytes = b"", **headers: str) -> httpx.Response:
        return self.http.post(path, content=content, headers=headers)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)


def answer_on(connection: socket.socket) -> str:
    """Return the body of the answer to `Server.begin`."""
    with connection:
        return b"".join(iter(lambda: connection.recv(65_536), b"")).partition(b"\r\n\r\n")[2].decode()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(handler: str = "", folder: Path | None = None, **env: str) -> Server:
        if folder is None:
            folder = tmp_path / "function"
            folder.mkdir()
            (folder / "handler.py").write_text(textwrap.dedent(handler))
        servers.append(Server(folder, **env))
        return servers[-1]

    yield start
    for each in servers:
        each.http.close()
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


class Gate:
    """A named pipe: who reads it waits until it is opened here."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self.wait = f"open({str(path)!r}).read()"

    def open(self) -> None:
        self.path.write_text("go")


def test_it_listens_at_once_and_is_ready_when_the_model_is_loaded(serve: Callable[..., Server], tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    server = serve(f"""
        def load(device):
            {gate.wait}
            return {{"device": device}}

        def handle(model, event, context):
            return model
    """).until("/_/health", 200)

    early = server.begin()
    assert server.get("/_/ready") == 503
    gate.open()
    assert json.loads(answer_on(early)) == {"device": "cpu"}
    assert server.get("/_/ready") == 200
    until(lambda: "is ready" in server.log.read_text())


def test_the_templates_handler_answers_as_in_a_worker_process(serve: Callable[..., Server], tmp_path: Path) -> None:
    template = find_template("python3-torch-image")
    assert template.skeleton == find_template("python3-torch").skeleton
    folder = tmp_path / "function"
    folder.mkdir()
    (folder / "handler.py").write_bytes((template.skeleton / "handler.py").read_bytes())
    server = serve(folder=folder).until("/_/ready", 200)

    answer = server.call(content=b"hello")

    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert (answer.json()["bytes"], answer.json()["device"]) == (5, "cpu")
    assert sum(answer.json()["scores"]) == pytest.approx(1, abs=1e-4)


def test_its_modules_its_main_module_and_its_end_are_as_in_a_worker_process(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    folder = tmp_path / "function"
    folder.mkdir()
    (folder / "handler.py").write_text(
        "import atexit, pickle\nfrom .helper import Net\nimport helper, function.helper\n"
        "assert helper is function.helper and pickle.loads(b'c__main__\\nNet\\n.') is Net\n"
        "atexit.register(print, 'it ends')\n"
        "def handle(event, context): return 'done'\n"
    )
    (folder / "helper.py").write_text("class Net: pass\n")
    server = serve(folder=folder).until("/_/ready", 200)

    assert server.call().text == "done"
    assert server.stop() == 0
    assert server.log.read_text().endswith("it ends\n")


def test_the_event_the_context_and_every_kind_of_answer_are_the_authors_api(serve: Callable[..., Server]) -> None:
    server = serve(
        """
        import os

        def handle(event, context):
            match event.path:
                case "/seen":
                    return {
                        "method": event.method, "query": event.query.getlist("a"), "header": event.headers["X-Mine"],
                        "body": event.text, "call": context.call_id, "function": context.function,
                        "secrets": os.environ["secret_mount_path"], "raw": event.raw_path,
                    }
                case "/status":
                    headers = {"X-One": ["1", "2"], "Content-Length": "7"}
                    return {"statusCode": 418, "body": "teapot", "headers": headers}
                case "/empty":
                    return {"statusCode": 204, "body": None}
                case "/stream":
                    return (f"{number}," for number in range(3))
                case "/spaced name":
                    return event.raw_path
        """,
        OPENFAAS_NAME="mine", OPENFAAS_NAMESPACE="dev",
    ).until("/_/ready", 200)  # fmt: skip

    seen = server.call("/seen?a=1&a=2", b"body", **{"X-Mine": "yes", "X-Call-Id": "c-1"}).json()
    assert seen == {
        "method": "POST", "query": ["1", "2"], "header": "yes", "body": "body", "call": "c-1", "function": "mine.dev",
        "secrets": "/var/openfaas/secrets", "raw": "/seen",
    }  # fmt: skip
    status = server.call("/status")
    assert (status.status_code, status.text, status.headers.get_list("x-one")) == (418, "teapot", ["1", "2"])
    assert (server.call("/empty").status_code, server.call("/nothing").content) == (204, b"")
    assert server.call("/stream").text == "0,1,2,"
    assert server.call("/spaced%20name").text == "/spaced%20name"


@pytest.mark.parametrize("own", [False, True])
def test_a_preflight_is_a_call_of_the_handler_only_where_the_function_asks_for_it(
    serve: Callable[..., Server], own: bool
) -> None:
    server = serve(
        """
        def handle(event, context):
            return {"statusCode": 200, "headers": {"connection": "x-leg", "x-leg": "1", "x-whole": "1"}}
        """,
        **({"GPUFAAS_PREFLIGHTS": "1"} if own else {}),
    ).until("/_/ready", 200)
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}

    assert server.http.options("/", headers=asked).status_code == (200 if own else 204)
    called = server.http.options("/")
    assert called.status_code == 200, "OPTIONS that is no preflight is a call"
    assert "x-whole" in called.headers
    assert "x-leg" not in called.headers, "the handler says that it is for its own connection"


def test_a_body_in_chunks_and_a_large_answer_arrive_whole(serve: Callable[..., Server]) -> None:
    server = serve("def handle(event, context): return event.body * 4").until("/_/ready", 200)

    answer = server.http.post("/", content=(b"x" * 65_536 for _ in range(64)))

    assert len(answer.content) == 16 * 2**20


def test_calls_are_served_one_at_a_time_unless_there_are_slots(serve: Callable[..., Server], tmp_path: Path) -> None:
    begun, gate = Gate(tmp_path / "begun"), Gate(tmp_path / "gate")
    one = serve(f"""
        import threading

        def handle(event, context):
            if event.path == "/first":
                open({str(begun.path)!r}, "w").write("begun")
                {gate.wait}
            return threading.current_thread().name
    """).until("/_/ready", 200)
    (tmp_path / "two" / "function").mkdir(parents=True)
    (tmp_path / "two" / "function" / "handler.py").write_text(
        textwrap.dedent("""
        import threading

        both = threading.Barrier(2)

        def handle(event, context):
            both.wait(60)
    """)
    )
    two = serve(folder=tmp_path / "two" / "function", GPUFAAS_SLOTS="2").until("/_/ready", 200)

    first = one.begin("/first")
    assert begun.path.read_text() == "begun"
    others = [one.begin() for _ in range(3)]
    assert one.get("/_/health") == 200
    gate.open()
    assert {answer_on(each) for each in (first, *others)} == {"slot_0"}, "the same thread: none of them ran beside it"
    with ThreadPoolExecutor(4) as pool:
        assert {each.status_code for each in pool.map(lambda _: two.call(), range(4))} == {200}, "two met, twice"


@pytest.mark.parametrize(("kind", "other"), [("def", "found()"), ("async def", "await asyncio.to_thread(found)")])
def test_what_load_sets_for_its_thread_holds_in_every_call(serve: Callable[..., Server], kind: str, other: str) -> None:
    server = serve(f"""
        import asyncio, contextvars, decimal, threading, torch

        ours = contextvars.ContextVar("ours", default="nothing")
        meet = threading.Barrier(3)

        def load(device):
            torch.set_grad_enabled(False)
            decimal.getcontext().prec = 5
            ours.set("loaded")
            assert asyncio.get_event_loop() is asyncio.get_event_loop()

        def found():
            return [torch.is_grad_enabled(), decimal.getcontext().prec, ours.get()]

        {kind} handle(model, event, context):
            if {kind == "def"}:
                meet.wait(60)
                assert asyncio.get_event_loop() is asyncio.get_event_loop()
            here = found() + {other}
            ours.set("a call")
            return here
    """, GPUFAAS_SLOTS="3").until("/_/ready", 200)  # fmt: skip

    with ThreadPoolExecutor(3) as pool:
        found = [each.json() for each in pool.map(lambda _: server.call(), range(6))]

    assert found == [[False, 5, "loaded"] * 2] * 6


def test_a_handler_that_raises_is_500_with_its_words_and_the_next_call_is_served(serve: Callable[..., Server]) -> None:
    server = serve("""
        def handle(event, context):
            if event.path == "/exit":
                raise SystemExit("away")
            if event.path == "/memory":
                raise MemoryError("no room")
            return {"a": 1}[event.text]
    """).until("/_/ready", 200)

    failed = server.call(content=b"b")

    assert (failed.status_code, failed.text) == (500, "KeyError: 'b'")
    assert "Traceback" in server.log.read_text()
    assert server.call("/exit").text == "SystemExit: away"
    told = server.call("/memory")
    assert told.text.startswith("out of memory on cpu (MemoryError: no room)")
    assert (told.status_code, told.headers["x-gpufaas-error"]) == (507, "out-of-memory")
    assert server.call(content=b"a").text == "1"


def test_a_body_that_cannot_be_read_is_its_callers_fault_and_not_in_the_log(serve: Callable[..., Server]) -> None:
    server = serve("""
        def handle(event, context):
            return event.json() if event.path == "/json" else event.text
    """).until("/_/ready", 200)

    assert [server.call(path, b'{"a":"caf\xe9"}').status_code for path in ("/json", "/text")] == [400, 400]
    assert server.call("/text", b"a", **{"content-type": "text/plain; charset=klingon"}).status_code == 415
    assert server.call("/text", b"caf\xe9", **{"content-type": "text/plain; charset=latin-1"}).text == "café"
    assert "Traceback" not in server.log.read_text()


def test_an_answer_that_breaks_off_does_not_look_whole(serve: Callable[..., Server]) -> None:
    server = serve("""
        def handle(event, context):
            def pieces():
                yield "half"
                raise ValueError("then this")
            return pieces()
    """).until("/_/ready", 200)

    with pytest.raises(httpx.RemoteProtocolError):
        server.call()

    assert "ValueError: then this" in server.log.read_text()
    assert server.get("/_/ready") == 200


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_fails_before_its_first_piece_is_answered_as_what_does_not_stream(
    serve: Callable[..., Server], tmp_path: Path, kind: str
) -> None:
    gate = Gate(tmp_path / "gate")
    server = serve(f"""
        def read():
            {gate.wait}

        {kind} handle(event, context):
            return {{"statusCode": 203, "headers": {{"x-mine": "yes"}}, "body": pieces(event)}}

        {kind} pieces(event):
            match event.path:
                case "/raise":
                    raise ValueError("no piece")
                case "/memory":
                    raise MemoryError("no room")
                case "/json":
                    yield event.json()
                case "/quiet":
                    yield b""
                    read()
                    yield "spoken"
    """).until("/_/ready", 200)

    for path, status, says in (
        ("/raise", 500, "ValueError: no piece"),
        ("/json", 400, "the body is not JSON"),
        ("/memory", 507, "out of memory"),
    ):
        failed = server.call(path, b"{")
        assert (failed.status_code, failed.text[: len(says)]) == (status, says)
        assert "x-mine" not in failed.headers
    assert "BadBody" not in server.log.read_text(), "that is the caller's fault"
    empty = server.call("/none")
    assert (empty.status_code, empty.content, empty.headers["x-mine"]) == (203, b"", "yes")
    with server.http.stream("POST", "/quiet") as answer:
        assert (answer.status_code, answer.headers["x-mine"]) == (203, "yes")
        gate.open()
        assert answer.read() == b"spoken"


def test_a_caller_who_leaves_closes_the_generator_and_frees_the_slot(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "closed")
    server = serve(f"""
        def handle(event, context):
            if event.path != "/endless":
                return "next"
            def pieces():
                try:
                    while True:
                        yield "x" * 1000
                finally:
                    open({str(gate.path)!r}, "w").write("closed")
            return pieces()
    """).until("/_/ready", 200)

    with server.http.stream("POST", "/endless") as answer:
        next(answer.iter_bytes())

    assert gate.path.read_text() == "closed"
    assert server.call().text == "next"


ASYNC = """
    import asyncio, threading

    begun, ended = 0, []

    async def handle(event, context):
        global begun
        match event.path:
            case "/meet":
                return {"statusCode": 201, "body": meet(int(event.text))}
            case "/wait":
                begun += 1
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    ended.append("cancelled")
                    raise
            case "/seen":
                return {"begun": begun, "ended": ended}
            case "/block":
                open(event.text, "w").write("begun")
                open(event.text).read()
            case "/raise":
                raise KeyError(event.text)
            case "/cancelled":
                raise asyncio.CancelledError("by itself")
            case "/break":
                return breaks()
        return event.body

    async def meet(calls):
        global begun
        begun += 1
        yield "begun "
        while begun < calls:
            await asyncio.sleep(0.005)
        yield threading.current_thread().name

    async def breaks():
        yield "half"
        raise ValueError("then this")
"""


def test_an_async_handler_streams_side_by_side_on_a_loop_of_its_own(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    server = serve(ASYNC, GPUFAAS_SLOTS="3").until("/_/ready", 200)

    with ThreadPoolExecutor(3) as pool:
        meeting = list(pool.map(lambda _: server.call("/meet", content=b"3"), range(3)))
        assert {(each.status_code, each.text) for each in meeting} == {(201, "begun handlers")}
        blocks = pool.submit(server.call, "/block", content=str(gate.path).encode())
        assert gate.path.read_text() == "begun"
        assert server.get("/_/health") == 200
        gate.open()
        assert blocks.result().text == str(gate.path)

    failed = server.call("/raise", content=b"b")
    assert (failed.status_code, failed.text) == (500, "KeyError: 'b'")
    assert server.call("/cancelled").text.endswith("CancelledError: by itself")
    with pytest.raises(httpx.RemoteProtocolError):
        server.call("/break")
    assert "ValueError: then this" in server.log.read_text()


def test_a_caller_who_leaves_cancels_the_call_of_an_async_handler(serve: Callable[..., Server]) -> None:
    server = serve(ASYNC, GPUFAAS_SLOTS="2").until("/_/ready", 200)
    with server.begin("/wait"):
        until(lambda: server.call("/seen").json() == {"begun": 1, "ended": []})

    until(lambda: server.call("/seen").json() == {"begun": 1, "ended": ["cancelled"]})


def test_sigterm_lets_what_runs_end(serve: Callable[..., Server], tmp_path: Path) -> None:
    begun, gate = Gate(tmp_path / "begun"), Gate(tmp_path / "gate")
    server = serve(f"""
        def handle(event, context):
            open({str(begun.path)!r}, "w").write("begun")
            {gate.wait}
            return "whole"
    """).until("/_/ready", 200)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.call)
        assert begun.path.read_text() == "begun"

        server.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(server.port))
        gate.open()

        assert running.result().text == "whole"
    assert server.process.wait(LIMIT_S) == 0


def refuses(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) != 0


def test_sigterm_during_the_load_ends_it_at_once(serve: Callable[..., Server], tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    server = serve(f"""
        def load(device):
            {gate.wait}

        def handle(model, event, context): ...
    """).until("/_/health", 200)

    assert server.stop() == 0


@pytest.mark.parametrize(
    ("handler", "env", "says"),
    [
        ("import no_such_module", {}, "No module named 'no_such_module'"),
        ("def load(device): raise ValueError('bad weights')\ndef handle(m, e, c): ...", {}, "ValueError: bad weights"),
        ("load = 1", {}, "handler.py defines no function handle()"),
        ("def handle(e, c): ...", {"GPUFAAS_SLOTS": "many"}, "GPUFAAS_SLOTS: 'many' is not a whole number"),
    ],
)
def test_what_cannot_serve_ends_and_says_why(
    serve: Callable[..., Server], handler: str, env: dict[str, str], says: str
) -> None:
    server = serve(handler, **env)

    assert server.process.wait(LIMIT_S) == 1
    assert says in server.log.read_text()


def test_a_container_that_was_given_a_gpu_which_torch_does_not_find_says_so(serve: Callable[..., Server]) -> None:
    server = serve("def load(d): ...\ndef handle(m, e, c): ...", GPUFAAS_DEVICE="cuda:0", CUDA_VISIBLE_DEVICES="")

    assert server.process.wait(LIMIT_S) == 1
    assert "the container was given a GPU, and torch" in server.log.read_text()


def test_settings_are_read_from_the_environment() -> None:
    env = {"PORT": "80", "GPUFAAS_DEVICE": "cuda:0", "GPUFAAS_DEVICE_MEMORY": "1024", "write_timeout": "1m"}
    assert ContainerSettings.of([], {}).port == 8080
    read = ContainerSettings.of(["/f"], env)
    assert (read.folder, read.port, read.device, read.device_memory, read.drain_s) == (
        Path("/f"),
        80,
        "cuda:0",
        1024,
        60,
    )
    assert ContainerSettings.of([], {"write_timeout": "5"}).drain_s == 5.0
    for wrong in ({"PORT": "0"}, {"PORT": "70000"}, {"PORT": "-1"}, {"write_timeout": "soon"}, {"GPUFAAS_SLOTS": "0"}):
        with pytest.raises(InvalidSpec, match=next(iter(wrong))):
            ContainerSettings.of([], wrong)
