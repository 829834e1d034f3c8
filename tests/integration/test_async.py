"""Asynchronous calls on the real platform: accepted, executed, tried again, delivered; also over kill -9."""

import contextlib
import http.client
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.conftest import ECHO, ECHO_MODEL, GATED, HTTP, TORCH, Platform, all_ended, until

Make = Callable[..., Platform]
LOCAL = ("--device", "cpu:0=400MiB", "--allow-local-callbacks")
RETRY = "com.openfaas.retry."
FAILING = """
    import os

    def handle(event, context):
        count = event.body.decode() + ".count"
        with open(count, "ab") as file:
            file.write(b"x")
        if os.path.exists(event.body.decode()):
            return {"statusCode": 200, "body": "fine"}
        return {"statusCode": 503, "body": "not yet"}
"""
"""Answers 503 until the file that its body names exists; counts its calls beside it."""
RECORDING = """
    import os

    FILE = os.open(os.environ["record"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def handle(event, context):
        os.write(FILE, event.body + b"\\n")
        return {"statusCode": 200, "body": event.body}
"""

RECORDING_GATED = """
    import os, time

    def handle(event, context):
        with open(os.environ["record"], "ab", buffering=0) as file:
            file.write(b"x")
        if not os.path.exists(event.text + ".began"):  # after a restart the function may have another uid
            open(event.text + ".began", "w").close()
        until = time.monotonic() + 60
        while not os.path.exists(event.text) and time.monotonic() < until:
            time.sleep(0.005)
"""


class Receiver:
    """Takes callbacks; `got` has their headers and bodies by call id. `status` is what it answers."""

    def __init__(self) -> None:
        self.got: dict[str, list[tuple[dict[str, str], bytes]]] = {}
        self.status = 200
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                status = receiver.status  # who sees this one in `got` may set another status for the next
                receiver.got.setdefault(headers["x-call-id"], []).append((headers, body))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                pass  # the platform is killed in mid-delivery

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def only(self, call: str) -> tuple[dict[str, str], bytes]:
        (found,) = self.got[call]
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    platform = Platform(tmp_path_factory.mktemp("async"), *LOCAL)
    try:
        yield platform.start()
        assert platform.stop() == 0
        assert "Traceback" not in platform.said()
    finally:
        platform.close()


def deploy(platform: Platform, name: str, source: str, lang: str = HTTP, queue: str = "", **retry: str) -> str:
    """Deploy with a retry policy; return the path for asynchronous calls."""
    built = platform.build(name, source, lang)
    platform.upload(built)
    annotations = {"gpufaas.bundle": built.digest} | {RETRY + key: value for key, value in retry.items()}
    if queue:
        annotations["com.openfaas.queue"] = queue
    if lang == TORCH:
        annotations["gpufaas.memory"] = "48Mi"
    spec = {"service": name, "image": f"{name}:latest", "annotations": annotations}
    spec["envVars"] = {"record": str(platform.record)}  # type: ignore[assignment]
    answer = platform.deploy_spec(spec)
    assert answer.is_success, answer.text
    return f"/async-function/{name}"


def send(platform: Platform, path: str, body: bytes = b"", callback: str | None = None, **headers: str) -> str:
    given = {"X-Callback-Url": callback} if callback else {}
    answer = platform.call(path, body, headers={**given, **headers})
    assert (answer.status_code, answer.content) == (202, b""), answer.text
    return answer.headers["x-call-id"]


def status(platform: Platform, call: str) -> dict[str, Any]:
    found: dict[str, Any] = platform.http.get(f"/async/{call}").json()
    return found


def becomes(platform: Platform, call: str, state: str) -> dict[str, Any]:
    until(lambda: status(platform, call)["state"] == state, lambda: f"{call} is {state}: {status(platform, call)}")
    return status(platform, call)


def accepts(platform: Platform) -> bool:
    with contextlib.suppress(OSError), platform.socket():
        return True
    return False


def queue(platform: Platform, name: str = "faas-request") -> dict[str, int]:
    found: dict[str, int] = platform.status()["asyncQueues"][name]
    return found


def dead(platform: Platform, function: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = platform.http.get("/system/async/dead", params={"function": function}).json()
    return found


# --- accepting ---


def test_a_call_is_accepted_at_once_executed_later_and_its_answer_delivered(
    serving: Platform, receiver: Receiver
) -> None:
    path = deploy(serving, "echo", ECHO)

    answer = serving.call(path + "/some/where?a=1", b"hello", headers={"X-Callback-Url": receiver.url})

    assert (answer.status_code, answer.content) == (202, b"")
    call = answer.headers["x-call-id"]
    assert answer.headers["x-start-time"].isdigit()
    assert answer.headers["x-served-by"].startswith("gpufaas/")
    until(lambda: call in receiver.got, "the callback came")
    headers, body = receiver.only(call)
    assert body == b"hello"
    assert headers["x-function-name"] == "echo"
    assert headers["x-function-status"] == "200"
    assert float(headers["x-duration-seconds"]) > 0
    assert headers["x-start-time"] == answer.headers["x-start-time"]
    assert headers["content-type"] == "application/octet-stream"
    assert headers["user-agent"].startswith("gpufaas/")
    told = becomes(serving, call, "done")
    assert (told["function"], told["attempts"], told["status"]) == ("echo.openfaas-fn", 1, 200)
    assert "hello" not in str(told)


def test_the_function_sees_path_query_headers_and_the_call_id(serving: Platform, receiver: Receiver) -> None:
    show = """
        def handle(event, context):
            seen = {name.lower(): value for name, value in event.headers.items()}
            text = f"{event.method} {event.path} {event.query} {seen['x-mine']} {seen['x-call-id']}"
            return {"statusCode": 201, "body": text}
    """
    path = deploy(serving, "show", show)

    call = send(serving, path + ".openfaas-fn/a/b?x=1", b"", receiver.url, **{"X-Mine": "yes", "X-Call-Id": "my-own"})

    assert call == "my-own"
    until(lambda: call in receiver.got)
    headers, body = receiver.only(call)
    assert body.startswith(b"POST /a/b ")
    assert body.endswith(b" yes my-own")
    assert (headers["x-function-status"], headers["x-function-name"]) == ("201", "show.openfaas-fn")


def test_a_model_function_is_called_as_any_other(serving: Platform, receiver: Receiver) -> None:
    path = deploy(serving, "model", ECHO_MODEL, TORCH)

    calls = [send(serving, path, b"%d" % number, receiver.url) for number in range(20)]

    until(lambda: all(call in receiver.got for call in calls))
    assert [receiver.only(call)[1] for call in calls] == [b"%d" % number for number in range(20)]


@pytest.mark.parametrize("size", [300_000, 5_000_000])
def test_large_bodies_and_answers_go_through_files_that_are_gone_afterwards(
    serving: Platform, receiver: Receiver, size: int
) -> None:
    path = deploy(serving, "echo", ECHO)
    body = random.Random(size).randbytes(size)

    call = send(serving, path, body, receiver.url)

    becomes(serving, call, "done")
    assert receiver.only(call)[1] == body
    until(lambda: not list((serving.data / "async" / "bodies").iterdir()))


def test_what_is_wrong_is_said_at_once(serving: Platform) -> None:
    path = deploy(serving, "echo", ECHO)

    assert serving.call("/async-function/nobody").status_code == 404
    assert serving.http.get("/async/unknown").status_code == 404
    refused = serving.http.get(path)
    assert (refused.status_code, refused.headers["allow"]) == (405, "DELETE, GET, POST")
    for url in ("not a url", "ftp://receiver/", "http://"):
        answer = serving.call(path, headers={"X-Callback-Url": url})
        assert (answer.status_code, "X-Callback-Url" in answer.text) == (400, True)
        assert answer.headers["x-openfaas-internal"]
    serving.deploy("small", ECHO, HTTP, max_body="1Ki")
    assert serving.call("/async-function/small", b"x" * 2000).status_code == 413
    assert serving.call("/async-function/small", iter([b"x" * 2000])).status_code == 413
    assert serving.status()["queued"] == {}


def test_callbacks_to_this_machine_are_refused_unless_allowed(make_platform: Make, receiver: Receiver) -> None:
    platform = make_platform("--device", "cpu:0=400MiB").start()
    path = deploy(platform, "echo", ECHO)

    for url in (receiver.url, "http://localhost/", "http://[::1]/", "http://169.254.169.254/latest/"):
        answer = platform.call(path, headers={"X-Callback-Url": url})
        assert (answer.status_code, "--allow-local-callbacks" in answer.text) == (400, True)
    # A spelling that only resolvers understand gets as far as its delivery, and no further.
    call = send(platform, path, b"x", receiver.url.replace("127.0.0.1", "127.1"))

    assert "callback to http://127.1" in becomes(platform, call, "dead")["reason"]
    assert receiver.got == {}


def test_a_full_queue_is_429_and_takes_calls_again_later(make_platform: Make) -> None:
    platform = make_platform(*LOCAL, "--max-async-queue", "3").start()
    path = deploy(platform, "gated", GATED)
    gate = platform.gate()
    calls = [send(platform, path, gate.body) for _ in range(3)]

    refused = platform.call(path, gate.body)

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
    gate.open()
    for call in calls:
        becomes(platform, call, "done")
    send(platform, path, gate.body)


# --- trying again ---


def test_a_listed_status_is_tried_again_until_it_works(serving: Platform, receiver: Receiver, open_path: Path) -> None:
    path = deploy(serving, "failing", FAILING, attempts="1000", codes="503", min_wait="10ms", max_wait="50ms")
    works = open_path / "works"
    call = send(serving, path, str(works).encode(), receiver.url)
    until(lambda: status(serving, call)["attempts"] >= 3)
    assert receiver.got == {}

    works.touch()

    until(lambda: call in receiver.got)
    headers, body = receiver.only(call)
    assert (headers["x-function-status"], body) == ("200", b"fine")
    assert int(headers["x-retry"]) == len((open_path / "works.count").read_bytes())
    assert headers["x-retry-max"] == "1000"


def test_a_status_that_is_not_listed_is_an_answer(serving: Platform, receiver: Receiver, open_path: Path) -> None:
    path = deploy(serving, "failing", FAILING, codes="500")

    call = send(serving, path, str(open_path / "never").encode(), receiver.url)

    until(lambda: call in receiver.got)
    assert receiver.only(call)[0]["x-function-status"] == "503"
    assert becomes(serving, call, "done")["attempts"] == 1


def test_after_its_last_attempt_a_call_is_a_dead_letter_that_can_be_retried_or_deleted(
    serving: Platform, receiver: Receiver, open_path: Path
) -> None:
    path = deploy(serving, "failing", FAILING, attempts="3", codes="503", min_wait="10ms", max_wait="50ms")
    works = open_path / "works"

    call = send(serving, path, str(works).encode(), receiver.url)
    other = send(serving, path, str(open_path / "other").encode())

    for each in (call, other):
        told = becomes(serving, each, "dead")
        assert (told["attempts"], told["status"]) == (3, 503)
        assert "the last of 3 attempts" in told["reason"]
    headers, body = receiver.only(call)
    assert (headers["x-retry"], headers["x-retry-max"], body) == ("3", "3", b"not yet"), "the last answer is delivered"
    assert {each["callId"] for each in dead(serving, "failing")} == {call, other}
    assert dead(serving, "echo") == []
    works.touch()
    assert serving.http.post(f"/system/async/dead/{call}/retry").status_code == 202
    becomes(serving, call, "done")
    assert serving.http.delete(f"/system/async/dead/{other}").status_code == 202
    assert dead(serving, "failing") == []
    assert serving.http.delete(f"/system/async/dead/{other}").status_code == 404
    assert serving.http.post(f"/system/async/dead/{call}/retry").status_code == 404


def test_a_receiver_in_trouble_gets_its_callback_later_and_the_call_is_not_executed_again(
    serving: Platform, receiver: Receiver, open_path: Path
) -> None:
    path = deploy(serving, "failing", FAILING)
    works = open_path / "works"
    works.touch()
    receiver.status = 500
    call = send(serving, path, str(works).encode(), receiver.url)
    until(lambda: call in receiver.got)

    receiver.status = 200

    becomes(serving, call, "done")
    assert len(receiver.got[call]) >= 2
    assert (open_path / "works.count").read_bytes() == b"x"


def test_a_call_waits_through_an_update_and_is_executed_by_the_new_revision(
    serving: Platform, receiver: Receiver
) -> None:
    path = deploy(serving, "updated", GATED)
    gate = serving.gate()
    held = [send(serving, path, gate.body, receiver.url) for _ in range(40)]
    until(gate.reached)

    deploy(serving, "updated", "def handle(event, context): return 'new'")
    later = send(serving, path, gate.body, receiver.url)
    gate.open()

    until(lambda: all(call in receiver.got for call in [*held, later]))
    assert receiver.only(later)[1] == b"new"
    assert all(receiver.only(call)[0]["x-function-status"] == "200" for call in held)
    assert receiver.only(held[-1])[1] == b"new", "it still waited in the asynchronous queue"


def test_calls_of_a_removed_function_wait_for_it_to_come_back(serving: Platform, receiver: Receiver) -> None:
    """As `faas-cli deploy --update=false --replace` does it: DELETE, then POST."""
    path = deploy(serving, "gone", GATED, min_wait="10ms", max_wait="100ms", attempts="1000")
    gate = serving.gate()
    calls = [send(serving, path, gate.body, receiver.url) for _ in range(30)]
    until(gate.reached)
    serving.remove("gone")
    gate.open()

    deploy(serving, "gone", "def handle(event, context): return 'back'", min_wait="10ms", max_wait="100ms")

    until(lambda: all(call in receiver.got for call in calls))


def test_a_slow_function_does_not_hold_up_another_nor_synchronous_calls(serving: Platform, receiver: Receiver) -> None:
    slow, quick = deploy(serving, "slow", GATED), deploy(serving, "echo", ECHO)
    gate = serving.gate()
    held = [send(serving, slow, gate.body) for _ in range(200)]
    until(gate.reached)

    call = send(serving, quick, b"quick", receiver.url)

    until(lambda: call in receiver.got)
    assert serving.call("/function/echo", b"sync").content == b"sync"
    assert serving.queued() + serving.running() <= 16
    gate.open()
    for each in held:
        becomes(serving, each, "done")


# --- taking calls back ---


def test_a_call_that_waits_and_one_that_runs_are_cancelled(serving: Platform, receiver: Receiver) -> None:
    path = deploy(serving, "slow", GATED)
    gate = serving.gate()
    running = send(serving, path, gate.body, receiver.url)
    until(gate.reached)
    gates = [serving.gate() for _ in range(15)]
    others = [send(serving, path, each.body) for each in gates]
    waiting = send(serving, path, gate.body, receiver.url)
    until(lambda: status(serving, others[-1])["state"] == "running")

    answers = [serving.http.delete(f"/async-function/{call}") for call in (waiting, running)]

    assert [(each.status_code, each.content) for each in answers] == [(202, b""), (202, b"")]
    assert [status(serving, call)["state"] for call in (waiting, running)] == ["cancelled", "cancelled"]
    assert serving.http.get(f"/async-function/{running}").json() == status(serving, running)
    for call in others:
        assert serving.http.delete(f"/async-function/{call}").is_success
    serving.remove("slow")
    for each in (gate, *gates):
        each.open()  # a handler cannot be interrupted: its worker would be ended ten seconds later
    until(serving.is_idle)
    until(lambda: sum(queue(serving)[each] for each in ("pending", "running", "delivering")) == 0, "all is over")
    assert not {waiting, running} & receiver.got.keys()


def test_what_cannot_be_cancelled_is_said(serving: Platform) -> None:
    call = send(serving, deploy(serving, "echo", ECHO), b"x")
    becomes(serving, call, "done")

    done, unknown = serving.http.delete(f"/async-function/{call}"), serving.http.delete("/async-function/nobody")

    assert (done.status_code, unknown.status_code) == (409, 404)
    assert "done" in done.text
    assert serving.http.get("/async-function/nobody").status_code == 404
    assert serving.http.put("/async-function/echo").status_code == 405


def test_a_cancelled_call_does_not_come_back_over_a_kill(make_platform: Make, open_path: Path) -> None:
    platform = make_platform(*LOCAL).start()
    path = deploy(platform, "gated", RECORDING_GATED)
    gate = platform.gate()
    calls = [send(platform, path, gate.body) for _ in range(20)]
    until(gate.reached)
    for call in calls:
        assert platform.http.delete(f"/async-function/{call}").status_code == 202

    all_ended(platform.kill())
    executed = len(platform.record.read_bytes())
    again = make_platform(*LOCAL, data=platform.data).start()

    marker = send(again, path, str(open_path / "marker").encode())
    (open_path / "marker").touch()
    becomes(again, marker, "done")
    assert {status(again, call)["state"] for call in calls} == {"cancelled"}
    assert len(platform.record.read_bytes()) == executed + 1


# --- queues ---


def test_a_flooded_queue_does_not_hold_up_another(make_platform: Make) -> None:
    platform = make_platform(*LOCAL, "--async-queue", "slow=2:30", "--async-queue", "quick=1").start()
    slow = deploy(platform, "slow", GATED, queue="slow")
    quick = deploy(platform, "echo", ECHO, queue="quick")
    gate = platform.gate()
    held = [send(platform, slow, gate.body) for _ in range(30)]
    until(gate.reached)

    refused = platform.call(slow, gate.body)
    becomes(platform, send(platform, quick, b"x"), "done")

    assert (refused.status_code, "queue slow is full: 30" in refused.text) == (429, True)
    slows = {"concurrency": 2, "limit": 30, "pending": 30, "running": 2, "delivering": 0}
    quicks = {"concurrency": 1, "limit": 1_000_000, "pending": 0, "running": 0, "delivering": 0}
    until(lambda: (queue(platform, "slow"), queue(platform, "quick")) == (slows, quicks))
    assert 'gpufaas_async_queue_pending{queue="slow"} 30.0' in platform.http.get("/metrics").text
    gate.open()
    for call in held:
        becomes(platform, call, "done")


# --- stopping and dying ---


def test_a_stop_lets_running_calls_end_and_keeps_the_others_for_the_next_start(
    make_platform: Make, receiver: Receiver
) -> None:
    platform = make_platform(*LOCAL).start()
    path = deploy(platform, "gated", RECORDING_GATED)
    gate = platform.gate()
    calls = [send(platform, path, gate.body, receiver.url) for _ in range(50)]
    until(gate.reached)

    platform.signal(signal.SIGTERM)
    until(lambda: not accepts(platform))
    gate.open()
    assert platform.wait() == 0
    before = len(platform.record.read_bytes())
    platform.start()

    until(lambda: all(call in receiver.got for call in calls))
    assert 0 < before <= 16
    assert len(platform.record.read_bytes()) == 50, "none twice"
    assert platform.stop() == 0


@pytest.mark.slow
def test_accepted_calls_survive_kills(make_platform: Make, receiver: Receiver) -> None:
    survive(make_platform(*LOCAL), receiver, calls=500, kills=2, seed=1)


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_ten_thousand_accepted_calls_survive_twenty_kills(make_platform: Make, receiver: Receiver) -> None:
    survive(make_platform(*LOCAL), receiver, calls=10_000, kills=20, seed=2)


def survive(platform: Platform, receiver: Receiver, *, calls: int, kills: int, seed: int) -> None:
    """
    Accept *calls* while the platform is killed *kills* times at random moments; each that was answered 202 must be
    executed, and its callback delivered, at least once.
    """
    rng = random.Random(seed)
    path = deploy(platform.start(), "recording", RECORDING, min_wait="50ms", max_wait="500ms", attempts="1000")
    accepted: dict[str, str] = {}
    numbers = iter(range(10**9))
    lock = threading.Lock()

    def accept(goal: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", platform.port, timeout=30)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            while len(accepted) < goal:
                with lock:
                    number = str(next(numbers))
                connection.request("POST", path, number, {"X-Callback-Url": receiver.url})
                answer = connection.getresponse()
                answer.read()
                assert answer.status == 202
                accepted[answer.headers["X-Call-Id"]] = number

    def outstanding() -> int:
        return sum(call not in receiver.got for call in list(accepted))

    interrupted = amid = 0
    with ThreadPoolExecutor(8) as threads:
        for kill in range(1, kills + 1):
            goal = calls * kill // kills
            sending = [threads.submit(accept, goal) for _ in range(8)]
            # One time soon after the start, when calls are accepted but no worker runs yet; the next in the middle of
            # executions and callbacks.
            before = len(receiver.got)
            delivered = before + (rng.randrange(1, calls // kills) if kill % 2 else 0)
            some = rng.randrange(len(accepted), goal) if len(accepted) < goal else goal
            until(lambda: len(accepted) >= some and len(receiver.got) >= delivered)  # noqa: B023
            time.sleep(rng.uniform(0.0, 0.02))
            platform.kill()
            interrupted += outstanding() > 0
            amid += before < len(receiver.got) < len(accepted)
            for each in sending:
                each.result()
            platform.start()
        while len(accepted) < calls:
            for each in [threads.submit(accept, calls) for _ in range(8)]:
                each.result()

    until(lambda: not outstanding(), lambda: f"{outstanding()} callbacks are missing", 120.0)
    executed = Counter(platform.record.read_text().split())
    assert not [number for number in accepted.values() if number not in executed]
    for call, number in accepted.items():
        assert {body for _, body in receiver.got[call]} == {number.encode()}
        assert receiver.got[call][0][0]["x-function-status"] == "200"
    assert dead(platform, "recording") == []
    assert interrupted >= kills // 2, "the kills came while there was work"
    assert amid >= kills // 4, "and some of them while it was done"
    twice = sum(count - 1 for count in executed.values())
    again = sum(len(each) - 1 for each in receiver.got.values())
    print(f"{len(accepted)} calls, {kills} kills, {interrupted} with calls open, {amid} amid executions")
    print(f"{twice} executed again, {again} callbacks delivered again")
    assert platform.stop() == 0


def test_the_kill_test_would_notice(receiver: Receiver) -> None:
    """Its receiver counts what it gets, and nothing else."""
    httpx.post(receiver.url, headers={"X-Call-Id": "1"}, content=b"x")

    assert list(receiver.got) == ["1"]
