"""Several calls at once on one copy of a model: answers that stream side by side, in threads and on an event loop."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.integration.conftest import HTTP, Platform, until

from gpufaas.errors import Refused

THREADS = """
    import threading

    def load(device):
        return {"all": threading.Barrier(3)}

    def handle(model, event, context):
        def pieces():
            yield "begun "
            model["all"].wait(60)
            yield threading.current_thread().name
        return pieces()
"""
LOOP = """
    import asyncio, os, threading, time

    def load(device):
        return {"begun": 0, "ended": [], "closed": 0}

    async def handle(model, event, context):
        match event.path:
            case "/meet":
                return {"headers": {"content-type": "text/x-meet"}, "body": meet(model, int(event.text))}
            case "/wait":
                print("it waits", flush=True)
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    model["ended"].append(context.call_id)
                    raise
            case "/endless":
                return endless(model)
            case "/ended":
                return model
            case "/block":
                open(event.text + ".began", "w").close()
                until = time.monotonic() + 60
                while not os.path.exists(event.text) and time.monotonic() < until:
                    time.sleep(0.005)
                return "it has slept"
            case "/raise":
                await asyncio.sleep(0)
                raise ValueError("no")
            case "/exit":
                raise SystemExit(3)
            case "/break":
                return breaks()
            case "/short":
                return {"headers": {"content-length": "9"}, "body": few()}
            case "/generator":
                return (each for each in "ab")
            case "/large":
                return b"x" * 1_000_000
            case "/json":
                await asyncio.sleep(0)
                return {"json": event.json(), "pid": os.getpid(), "thread": threading.current_thread().name}
        return event.body

    async def meet(model, calls):
        model["begun"] += 1
        yield "begun "
        while model["begun"] < calls:
            await asyncio.sleep(0.005)
        yield threading.current_thread().name

    async def endless(model):
        try:
            while True:
                yield "x" * 1000
        finally:
            model["closed"] += 1

    async def few():
        yield "x"

    async def breaks():
        yield "half"
        raise ValueError("it broke")
"""


def all_of(platform: Platform, path: str, body: bytes, calls: int) -> list[str]:
    with ThreadPoolExecutor(calls) as pool:
        answers = list(pool.map(lambda _: platform.call(path, body), range(calls)))
    assert {each.status_code for each in answers} == {200}, [each.text for each in answers]
    return [each.text for each in answers]


def test_generators_stream_side_by_side_in_threads(platform: Platform) -> None:
    path = platform.deploy("threads", THREADS, slots="3")

    assert sorted(all_of(platform, path, b"", 3)) == ["begun MainThread", "begun slot-1", "begun slot-2"]


def test_async_generators_stream_side_by_side_without_a_thread_each(platform: Platform) -> None:
    path = platform.deploy("loop", LOOP, slots="40")

    assert set(all_of(platform, f"{path}/meet", b"40", 40)) == {"begun MainThread"}
    assert platform.call(f"{path}/meet", b"40").headers["content-type"] == "text/x-meet"


def test_an_async_handler_answers_as_any_other(platform: Platform) -> None:
    path = platform.deploy("loop", LOOP)

    answer = platform.call(f"{path}/json", b"[1]").json()

    assert (answer["json"], answer["thread"]) == ([1], "MainThread")
    assert platform.call(path, b"\x00" * 300_000).content == b"\x00" * 300_000
    assert len(platform.call(f"{path}/large").content) == 1_000_000
    assert platform.http.head(f"{path}/large").headers["content-length"] == "1000000"
    assert platform.call(f"{path}/json", b"{").status_code == 400
    for where, says in (
        ("raise", "ValueError: no"),
        ("exit", "SystemExit: 3"),
        ("generator", "TypeError: an async handler returned a generator, "),
    ):
        failed = platform.call(f"{path}/{where}")
        assert (failed.status_code, failed.text[: len(says)]) == (500, says)
        until(lambda says=says: says in platform.log("loop"))
        if where != "generator":
            assert "async_server.py" not in platform.log("loop"), "only the author's frames are in the traceback"
    assert platform.call(f"{path}/json", b"1").json()["pid"] == answer["pid"], "its worker lives on"


def test_a_stream_of_an_async_handler_that_breaks_off_does_not_look_whole(platform: Platform) -> None:
    path = platform.deploy("loop", LOOP)

    for where, says in (("break", "it broke"), ("short", "8 bytes before its Content-Length")):
        said = platform.exchange(f"POST {path}/{where} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert said.startswith(b"HTTP/1.1 200 ")
        assert not said.endswith(b"0\r\n\r\n")
        until(lambda says=says: says in platform.log("loop"))


def test_a_caller_who_hangs_up_cancels_the_coroutine(platform: Platform) -> None:
    path = platform.deploy("loop", LOOP, slots="3")
    with platform.socket() as connection:
        connection.sendall(f"POST {path}/wait HTTP/1.1\r\nHost: x\r\nX-Call-Id: gone\r\n\r\n".encode())
        until(lambda: "it waits" in platform.log("loop"))

    def ended() -> list[str]:
        found: list[str] = platform.call(f"{path}/ended").json()["ended"]
        return found

    until(lambda: ended() == ["gone"])

    def is_late() -> bool:
        """Not if its time was up before it began."""
        late = platform.call(f"{path}/wait", headers={"X-Timeout": "200ms", "X-Call-Id": "late"})
        assert late.status_code == 504
        until(lambda: platform.running() == 0)
        return "late" in ended()

    until(is_late)
    with platform.http.stream("POST", f"{path}/endless") as answer:
        next(answer.iter_raw())

    until(lambda: platform.call(f"{path}/ended").json()["closed"] == 1, "its generator is closed")
    until(lambda: platform.running() == 0)
    assert len(platform.workers()) == 1


def test_a_handler_that_blocks_the_loop_blocks_only_its_worker(platform: Platform) -> None:
    path = platform.deploy("loop", LOOP, slots="4")
    other = platform.deploy("other", "def handle(event, context): return event.body", HTTP)
    assert platform.call(path, b"warm").text == platform.call(other, b"warm").text == "warm"

    gate = platform.gate()
    blocks = platform.begin(f"{path}/block", gate.body)
    until(gate.reached)
    beside = platform.begin(path, b"beside")
    until(lambda: platform.running() == 2)

    assert platform.call(other, b"not blocked").text == "not blocked"
    assert not beside.done()
    gate.open()
    assert (blocks.result().text, beside.result().text) == ("it has slept", "beside")


def test_a_slot_whose_thread_ends_takes_its_worker_along(platform: Platform) -> None:
    source = """
    import sys, time

    def load(device):
        return None

    def handle(model, event, context):
        if event.text == "stays":
            print("it stays", flush=True)
            time.sleep(60)
        sys.stderr.close()
        raise ValueError("which cannot be written")
"""
    path = platform.deploy("ends", source, slots="2")
    beside = platform.begin(path, b"stays")
    until(lambda: "it stays" in platform.log("ends"))

    assert "exit status 70" in platform.call(path).text
    assert beside.result().status_code == 502


@pytest.mark.long
@pytest.mark.parametrize("is_async", [False, True])
def test_a_fork_of_the_worker_that_returns_from_the_handler_answers_no_call(platform: Platform, is_async: bool) -> None:
    source = """
        import os, time

        def handle(event, context):
            if event.path == "/fork":
                return "parent" if os.fork() else "child"
            with open(event.path, "a") as file:
                file.write("run ")
            return event.text
    """
    source = source.replace("def handle", "async def handle") if is_async else source
    path = platform.deploy("forks", source, HTTP)
    for number in range(10):
        calls = [(f"{path}/fork", b"")]
        calls += [(f"{path}{platform.open}/{is_async}-{number}-{each}", b"%d" % each) for each in range(6)]
        with ThreadPoolExecutor(len(calls)) as pool:
            answers = list(pool.map(lambda call: platform.call(*call), calls))
        assert [each.text for each in answers] == ["parent", *map(str, range(6))]
        assert {(platform.open / f"{is_async}-{number}-{each}").read_text() for each in range(6)} == {"run "}
        answers = [platform.call(f"{path}{platform.open}/after", b"%d" % each) for each in range(6)]
        assert [each.text for each in answers] == [*map(str, range(6))]
    assert "died" not in platform.log("forks")
    assert "killed" not in platform.log("forks")


@pytest.mark.long  # a loop may stand still for 10 s
def test_a_loop_that_is_blocked_for_good_is_ended_while_calls_keep_coming_and_they_are_answered(
    platform: Platform,
) -> None:
    path = platform.deploy("loop", LOOP, slots="4")
    first = platform.call(f"{path}/json", b"1").json()["pid"]
    begun = platform.begin(f"{path}/wait")
    until(lambda: "it waits" in platform.log("loop"))
    gate = platform.gate()
    blocks = f"POST {path}/block HTTP/1.1\r\nHost: x\r\nContent-Length: {len(gate.body)}\r\n\r\n"
    with platform.socket() as connection:
        connection.sendall(blocks.encode() + gate.body)
        until(gate.reached)
    late = [platform.call(f"{path}/json", b"1", headers={"X-Timeout": "200ms"}) for _ in range(2)]
    last = platform.begin(f"{path}/json", b"1")

    assert [each.status_code for each in late] == [504, 504]
    assert last.result().json()["pid"] != first, "it was not begun on the old worker, and so runs on another"
    assert begun.result().status_code == 502
    assert "it stood still for 10 s" in begun.result().text


def test_what_an_async_handler_prints_belongs_to_its_call(platform: Platform) -> None:
    source = """
        import asyncio

        both = []

        async def handle(event, context):
            print("before", event.text)
            both.append(event.text)
            while len(both) < 2:
                await asyncio.sleep(0.005)
            print("after", event.text)
            return "ok"
    """
    path = platform.deploy("prints", source, HTTP)
    calls = [platform.begin(path, name, headers={"X-Call-Id": name.decode()}) for name in (b"one", b"two")]

    assert [each.result().text for each in calls] == ["ok", "ok"]
    until(lambda: platform.log("prints").count("after") == 2)

    for name in ("one", "two"):
        lines = platform.http.get("/system/logs", params={"name": "prints", "callId": name}).text
        assert (lines.count(f"before {name}"), lines.count(f"after {name}"), lines.count("before")) == (1, 1, 1)


def test_a_cpu_function_gets_a_body_that_streams_whole(platform: Platform) -> None:
    path = platform.deploy("echo", "async def handle(event, context): return event.text.upper()", HTTP)

    assert platform.call(path, iter([b"one", b" ", b"two"])).text == "ONE TWO"


def test_an_async_load_is_refused_at_deploy(platform: Platform) -> None:
    source = "async def other(device): return 1\nload = other\ndef handle(model, event, context): return ''"

    with pytest.raises(Refused, match=r"load\(\) is async, and only handle\(\) may be: write def load"):
        platform.deploy("wrong", source)
