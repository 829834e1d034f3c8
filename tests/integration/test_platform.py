"""The platform in good weather: misses and hits, memory, queues and limits, deployments, what it costs idle."""

import concurrent.futures
import contextlib
import ctypes
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from tests.integration.conftest import (
    ECHO,
    ECHO_MODEL,
    GATED,
    GATED_MODEL,
    HTTP,
    LIMIT_S,
    TORCH,
    Platform,
    Sampler,
    all_ended,
    free_port,
    pss_bytes,
    until,
)

from gpufaas import Refused
from gpufaas_functions.staged import HUGE
from gpufaas_gpu_manager.huge_pages import collapse

Make = Callable[..., Platform]
MiB = 1024 * 1024
BIG = """
    import torch

    def load(device):
        return torch.ones(55 * 1024 * 1024, device=device)  # 220 MiB

    def handle(ones, event, context):
        return {"last": float(ones[-1]), "said": event.text}
"""


def started(answer: httpx.Response) -> str:
    return str(answer.headers["x-gpufaas-start"])


def test_two_functions_of_more_than_half_a_device_each_called_in_turn_miss_every_time(platform: Platform) -> None:
    """And the memory of the one is given back before the other's is there: never both, never over the budget."""
    paths = [platform.deploy(name, BIG, memory="240Mi") for name in ("one", "two")]
    before = platform.status()["devices"][0]["evictions"]

    with Sampler(platform) as seen:
        answers = [platform.call(paths[turn % 2], b"%d" % turn) for turn in range(8)]

    said = [answer.json() for answer in answers]
    assert [(each["last"], each["said"]) for each in said] == [(1.0, str(turn)) for turn in range(8)]
    assert [started(answer) for answer in answers] == ["disk"] * 8
    assert {answer.headers["x-gpufaas-device"] for answer in answers} == {"local/cpu:0"}
    assert seen.most_workers == 1, "a model is loaded when the one before is gone"
    assert 200 * MiB < seen.most_bytes <= 400 * MiB
    assert platform.status()["devices"][0]["evictions"] - before == 7


def test_two_functions_that_fit_together_miss_once_each(platform: Platform) -> None:
    paths = [platform.deploy(name, ECHO_MODEL) for name in ("one", "two")]

    answers = [platform.call(path) for path in paths * 3]

    assert [started(answer) for answer in answers] == ["disk"] * 2 + ["hit"] * 4


def test_nothing_is_resident_after_a_deploy_and_the_first_call_says_that_it_missed(platform: Platform) -> None:
    path = platform.deploy("cold", ECHO_MODEL)

    assert platform.residents() == []
    until(lambda: platform.workers() == [])  # that of the check ends
    assert started(platform.call(path)) == "disk"
    assert started(platform.call(path)) == "hit"


def test_a_minimum_of_copies_is_resident_after_the_deploy_and_the_first_call_hits(platform: Platform) -> None:
    path = platform.deploy("ready", ECHO_MODEL, labels={"com.openfaas.scale.min": "1"})

    until(lambda: platform.residents() == ["ready"])

    assert started(platform.call(path)) == "hit"


def test_a_minimum_of_copies_comes_back_when_its_worker_dies(platform: Platform) -> None:
    path = platform.deploy("ready", GATED_MODEL, labels={"com.openfaas.scale.min": "1"})

    def copies() -> list[int]:
        """Their numbers: a later copy has a higher one."""
        return [each["copy"] for each in platform.status()["devices"][0]["resident"] if not each["loading"]]

    until(copies)
    (first,) = copies()
    pid = platform.call(path).text

    os.kill(int(pid), signal.SIGKILL)

    until(lambda: max(copies(), default=0) > first)
    answer = platform.call(path)
    assert (started(answer), answer.text != pid) == ("hit", True)


def test_a_function_calls_another_on_the_same_and_only_device_while_it_runs(platform: Platform) -> None:
    model = platform.deploy("model", ECHO_MODEL)
    caller = platform.deploy(
        "caller",
        f"""
        import urllib.request

        def handle(event, context):
            with urllib.request.urlopen("{platform.url}{model}", data=event.body, timeout=60) as answer:
                return {{"said": answer.read().decode(), "start": answer.headers["X-Gpufaas-Start"]}}
        """,
        HTTP,
    )

    first, second = (platform.call(caller, b"hello") for _ in range(2))

    assert first.json() == {"said": "hello", "start": "disk"}
    assert second.json() == {"said": "hello", "start": "hit"}
    assert sorted(platform.residents()) == ["caller", "model"]


def test_more_nested_calls_than_slots_all_end(platform: Platform) -> None:
    """Twelve callers at once, eight slots, one model: no deadlock."""
    model = platform.deploy("model", ECHO_MODEL)
    caller = platform.deploy(
        "caller",
        f"""
        import urllib.request

        def handle(event, context):
            with urllib.request.urlopen("{platform.url}{model}", data=event.body, timeout=60) as answer:
                return answer.read()
        """,
        HTTP,
        slots="8",
    )

    answers = [each.result() for each in [platform.begin(caller, b"%d" % n) for n in range(12)]]

    assert [answer.content for answer in answers] == [b"%d" % n for n in range(12)]


# --- queues and limits ---


def test_a_full_queue_answers_429_with_retry_after(platform: Platform) -> None:
    path = platform.deploy("busy", GATED_MODEL, queue="2")
    gate = platform.gate()
    calls = [platform.begin(path, gate.body)]
    until(gate.reached)
    calls += [platform.begin(path, gate.body) for _ in range(2)]
    until(lambda: platform.queued() == 2)

    refused = platform.call(path, gate.body)

    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "busy" in refused.text
    assert refused.headers["x-openfaas-internal"] == "gateway"
    gate.open()
    assert [call.result().status_code for call in calls] == [200] * 3


def test_a_call_that_runs_over_its_time_limit_is_answered_504_and_the_device_is_used_again(platform: Platform) -> None:
    path = platform.deploy("slow", GATED_MODEL, timeout="500ms")
    gate = platform.gate()
    until(lambda: platform.call(path).status_code == 200, "it is loaded")

    calls = []

    def runs_over() -> bool:
        calls.append(platform.call(path, gate.body))
        return gate.reached()

    until(runs_over, "it began within its time")
    gate.open()
    late = calls[-1]

    assert late.status_code == 504
    assert "0.5 s" in late.text
    assert "gpufaas.timeout" in late.text
    until(lambda: platform.call(path).status_code == 200, "the device is used again")


def test_a_call_that_waits_over_its_time_limit_is_answered_504(platform: Platform) -> None:
    holder = platform.deploy("holder", GATED_MODEL)
    path = platform.deploy("late", ECHO_MODEL, timeout="300ms")
    gate = platform.gate()
    holding = platform.begin(holder, gate.body)
    until(gate.reached)

    late = platform.call(path)

    assert late.status_code == 504
    assert "queue" in late.text or "0.3 s" in late.text
    assert platform.queued() == 0
    gate.open()
    assert holding.result().status_code == 200
    until(lambda: platform.call(path).status_code == 200, "the device is used again")


@pytest.mark.parametrize(("source", "lang"), [(ECHO_MODEL, TORCH), (ECHO, HTTP)])
def test_a_body_over_the_limit_is_answered_413(platform: Platform, source: str, lang: str) -> None:
    path = platform.deploy("small", source, lang, max_body="64Ki")

    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 4096

    known = platform.call(path, b"x" * 100_000)
    chunked = platform.call(path, chunks())

    assert [known.status_code, chunked.status_code] == [413, 413]
    assert "64" in known.text
    assert "gpufaas.max-body" in known.text
    assert platform.call(path, b"x" * 65536).content == b"x" * 65536


@pytest.mark.parametrize(("source", "lang"), [(ECHO_MODEL, TORCH), (ECHO, HTTP)])
@pytest.mark.parametrize("size", [0, 1, 70_000, 1024 * 1024 + 1, 5 * 1024 * 1024])
def test_a_body_of_any_size_arrives_whole_and_leaves_nothing(
    platform: Platform, source: str, lang: str, size: int
) -> None:
    # Of its own for each size: the reservation is what was measured of the same bundle, and with smaller bodies.
    path = platform.deploy("echo", f"{source}\n    # {size}\n", lang, memory="96Mi")
    body = bytes(range(251)) * (size // 251 + 1)
    body = body[:size]

    answer = platform.call(path, body)

    assert answer.content == body
    until(lambda: platform.spooled() == [], "it is removed once the answer is on its way")


# --- deployments ---


def test_an_update_under_load_loses_no_call_and_the_new_version_answers(platform: Platform) -> None:
    source = "def load(device): return 1\ndef handle(model, event, context): return 'version 1'"
    path = platform.deploy("app", source)
    over = threading.Event()

    def keep_calling() -> list[tuple[int, str]]:
        said = [(0, "")]
        with httpx.Client(base_url=platform.url, timeout=LIMIT_S, trust_env=False) as http:
            while said[-1][1] != "version 4" and not over.is_set():
                answer = http.post(path, content=b"x")
                said.append((answer.status_code, answer.text))
        return said[1:]

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        callers = [pool.submit(keep_calling) for _ in range(6)]
        try:
            for version in (2, 3, 4):
                platform.deploy("app", source.replace("version 1", f"version {version}"))
            concurrent.futures.wait(callers, LIMIT_S)
        finally:
            over.set()
        said = [each.result() for each in callers]

    assert {status for each in said for status, _ in each} == {200}, [x for each in said for x in each if x[0] != 200]
    assert all(each[-1] == (200, "version 4") for each in said)
    until(lambda: len(platform.workers()) == 1, "the old versions' workers are gone")


def test_a_body_that_was_on_its_way_during_an_update_is_answered_by_the_new_version(platform: Platform) -> None:
    path = platform.deploy("app", "def load(device): pass\ndef handle(m, event, c): return 'old ' + event.text")
    with platform.socket() as caller:
        caller.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbo".encode())
        until(lambda: platform.status()["functions"]["app.openfaas-fn"]["inflight"] == 1)

        platform.deploy("app", "def load(device): pass\ndef handle(m, event, c): return 'new ' + event.text")
        caller.sendall(b"dy")
        answer = b"".join(iter(lambda: caller.recv(65536), b""))

    assert answer.endswith(b"\r\n\r\nnew body"), answer


def test_a_removed_function_is_gone_with_its_worker(platform: Platform) -> None:
    path = platform.deploy("gone", ECHO_MODEL)
    platform.call(path)
    worker = platform.workers()[0]

    platform.remove("gone")

    assert platform.call(path).status_code == 404
    all_ended([worker])
    assert platform.http.get("/system/functions").json() == []


def test_a_handler_that_does_not_import_is_refused_and_the_log_has_all_of_it(platform: Platform) -> None:
    with pytest.raises(Refused, match="ModuleNotFoundError: No module named 'no_such_module'") as refused:
        platform.deploy("broken", "import no_such_module\ndef handle(event, context): return 'x'", HTTP)

    assert refused.value.status == 400
    until(lambda: "Traceback" in platform.log("broken"))
    assert platform.call("/function/broken").status_code == 404


def test_an_update_that_is_refused_leaves_the_old_version_answering(platform: Platform) -> None:
    path = platform.deploy("app", "def handle(event, context): return 'old'", HTTP)

    with pytest.raises(Refused):
        platform.deploy("app", "import no_such_module\ndef handle(event, context): return 'new'", HTTP)

    assert platform.call(path).text == "old"


def test_a_model_larger_than_any_device_is_refused_at_deploy_with_the_sizes(platform: Platform) -> None:
    sizes = r"needs 10(\.0)? GiB .*largest device \(local/cpu:0\) has 400(\.0)? MiB"

    # Code that no other test deploys: what was measured of a bundle counts more than what is declared.
    never_measured = ECHO_MODEL + "\n    GIANT = True\n"

    with pytest.raises(Refused, match=sizes) as refused:
        platform.deploy("giant", never_measured, memory="10Gi")

    assert refused.value.status == 400
    assert platform.call("/function/giant").status_code == 404


# --- what it costs ---


def test_an_idle_platform_is_small_and_its_serving_process_has_no_torch(make_platform: Make) -> None:
    platform = make_platform().start()
    fork_server = platform.fork_server()
    until(lambda: has_standby(platform), "the fork server has done all that it does before its first child")
    maps = Path(f"/proc/{platform.pid}/maps").read_text()

    assert not re.search(r"torch|numpy", maps)
    assert pss_bytes(platform.pid) < 90 * MiB
    assert pss_bytes(fork_server.pid) < 250 * MiB
    assert fork_server.num_threads() == 1
    assert platform.workers() == []


def test_the_platform_is_in_huge_pages(make_platform: Make) -> None:
    """Each page is an entry that a fork copies, and that the end of a worker clears."""
    if not collapse_one():
        pytest.skip("the kernel has no MADV_COLLAPSE (Linux 6.1)")
    platform = make_platform().start()

    until(lambda: has_standby(platform), "the first child")

    for pid, share in ((platform.fork_server().pid, 0.5), (platform.pid, 0.25)):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        every, huge = (int(re.findall(rf"^{name}: +(\d+)", rollup, re.M)[0]) for name in ("Anonymous", "AnonHugePages"))
        assert huge > share * every


def has_standby(platform: Platform) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(each.name() == "standby" for each in platform.fork_server().children())
    return False


def collapse_one() -> bool:
    memory = (ctypes.c_char * (2 * HUGE))()
    ctypes.memset(memory, 1, len(memory))
    return collapse(-(-ctypes.addressof(memory) // HUGE) * HUGE)


def test_an_idle_platform_uses_no_processor(platform: Platform) -> None:
    path = platform.deploy("echo", ECHO_MODEL)
    platform.call(path)
    processes = [psutil.Process(platform.pid), platform.fork_server(), *platform.workers()]

    def used_s() -> float:
        return sum(sum(each.cpu_times()[:2]) for each in processes)

    def is_idle_for_a_second() -> bool:
        """Not so while it still saves what the call changed; what polls is never idle."""
        before = used_s()
        time.sleep(1.0)
        return used_s() - before <= 0.05

    until(is_idle_for_a_second, "a second without work")


TALKS = """
    import logging
    import os
    import subprocess
    import time

    print("imported")

    def handle(event, context):
        print("begins", event.text)
        while not os.path.exists(event.query["gate"]):
            time.sleep(0.01)
        logging.warning("logged %s", event.text)
        os.write(1, b"below\\n")
        subprocess.run(["sh", "-c", "echo beside >&2"])
        print("ends", event.text, end="")
        raise RuntimeError(event.text)
"""


def test_lines_of_the_log_say_which_call_wrote_them_and_to_which_stream(platform: Platform) -> None:
    path = platform.deploy("talks", TALKS, HTTP)
    gates = [platform.gate() for _ in range(2)]

    def lines(**more: str) -> list[dict[str, str]]:
        answer = platform.http.get("/system/logs", params={"name": "talks", **more})
        return [json.loads(line) for line in answer.text.splitlines()]

    answers = []
    for word, gate in zip(("one", "two"), gates, strict=True):
        answers.append(platform.begin(path, word.encode(), params={"gate": gate.body.decode()}))
        until(lambda word=word: f"begins {word}" in platform.log("talks"))  # type: ignore[misc]
    for gate in reversed(gates):
        gate.open()
    ids = [answer.result().headers["x-call-id"] for answer in answers]
    last = ("RuntimeError: ", "beside", "ends ", "below")  # stdout and stderr come on ways of their own
    until(lambda: all(platform.log("talks").count(each) == 2 for each in last))

    for word, call in zip(("one", "two"), ids, strict=True):
        said = [(line["stream"], line["text"]) for line in lines(callId=call)]
        assert [text for stream, text in said if stream == "stdout"] == [f"begins {word}", f"ends {word}"]
        errors = [text for stream, text in said if stream == "stderr"]
        assert errors[0] == f"WARNING:root:logged {word}"
        assert (errors[1], errors[-1]) == ("Traceback (most recent call last):", f"RuntimeError: {word}")
    of_none = [(line["stream"], line["text"]) for line in lines() if "callId" not in line]
    assert sorted(set(of_none)) == [("stderr", "beside"), ("stdout", "below"), ("stdout", "imported")]
    assert of_none.count(("stdout", "below")) == of_none.count(("stderr", "beside")) == 2


def test_cpu_functions_answer_as_many_at_once_as_they_have_slots(platform: Platform) -> None:
    path = platform.deploy("busy", GATED, HTTP, slots="3")
    gate = platform.gate()
    assert platform.call(path).status_code == 200

    calls = [platform.begin(path, gate.body) for _ in range(4)]
    until(lambda: platform.running() == 3 and platform.queued() == 1)
    gate.open()

    assert {call.result().status_code for call in calls} == {200}


def test_the_usage_of_a_function_is_what_its_workers_take(platform: Platform) -> None:
    source = """
        import os

        HELD = bytearray(os.urandom(1)) * 20_000_000

        def handle(event, context):
            open(event.text + ".began", "w").close()
            while not os.path.exists(event.text):
                pass
    """
    platform.deploy("busy", source, HTTP)
    gate = platform.gate()
    idle = platform.http.get("/system/function/busy?usage=1").json()
    call = platform.begin("/function/busy", gate.body)
    until(gate.reached)

    def usage() -> dict[str, float]:
        found: dict[str, float] = platform.http.get("/system/function/busy?usage=1").json()["usage"]
        return found

    until(lambda: usage()["cpu"] > 10, "one thread that never rests, on a machine that may be busy")
    used = usage()

    gate.open()
    assert call.result().is_success
    assert "usage" not in idle
    assert "usage" not in platform.http.get("/system/function/busy").json()
    assert used["cpu"] < 1100, "it is one thread"
    assert 20_000_000 < used["totalMemoryBytes"] < 200 * MiB


def test_a_second_platform_on_the_same_data_says_so_in_one_line(platform: Platform, make_platform: Make) -> None:
    path = platform.deploy("echo", ECHO_MODEL)
    gate = platform.gate()
    spool = platform.data / "spool" / "body-of-a-running-call"
    spool.write_bytes(gate.body)
    second = make_platform("--device", "cpu:0=400MiB", data=platform.data)

    second.launch()

    assert second.wait() == 1
    assert re.fullmatch(r"gpufaas: another gpufaas serves from .*--data\n", second.said())
    assert spool.exists()
    spool.unlink()
    assert platform.call(path, b"still here").content == b"still here"


def test_a_taken_port_is_said_in_one_line(platform: Platform, make_platform: Make) -> None:
    second = make_platform("--device", "cpu:0=400MiB")
    second.port = platform.port

    second.launch()

    assert second.wait() == 1
    assert re.fullmatch(rf"gpufaas: cannot listen on 127.0.0.1:{platform.port} .*--port\n", second.said())
    assert free_port() != platform.port


def test_a_host_tier_larger_than_the_memory_is_said_in_one_line(make_platform: Make) -> None:
    platform = make_platform("--device", "cpu:0=400MiB", "--host-cache", "900TiB")

    platform.launch()

    assert platform.wait() == 2
    *warnings, said = platform.said().splitlines()
    assert re.fullmatch(r"gpufaas: --host-cache 921600.0 GiB: there are .*: give it less .*", said)
    assert all(" WARNING " in each for each in warnings), "how to log in is said by a platform that starts"


def test_port_0_is_any_that_is_free_and_the_first_line_says_which(make_platform: Make) -> None:
    platform = make_platform("--device", "cpu:0=400MiB")
    platform.port = 0
    platform.launch()

    said = r"(?m)^✓ gateway +(http://127.0.0.1:[1-9]\d*)\s"  # before it there are warnings alone
    until(lambda: re.search(said, platform.said()), platform.said)

    (url,) = re.findall(said, platform.said())
    assert httpx.get(url + "/healthz", trust_env=False, timeout=LIMIT_S).status_code == 200
    assert platform.stop() == 0


def test_what_no_function_used_for_a_day_is_collected_at_the_next_start(make_platform: Make) -> None:
    platform = make_platform("--device", "cpu:0=400MiB", "--history-size", "0").start()
    path = platform.deploy("echo", ECHO, HTTP)
    old = platform.build("echo", ECHO, HTTP)
    assert platform.call(path, b"x").status_code == 200
    platform.deploy("echo", GATED, HTTP)
    used = platform.build("echo", GATED, HTTP)
    platform.stop()
    store = platform.data / "artifacts" / "sha256"
    then = time.time() - 2 * 86_400
    for record in store.glob("??/*.json"):
        os.utime(record, (then, then))

    platform.start()

    def record(digest: str) -> Path:
        return store / digest[:2] / f"{digest}.json"

    until(lambda: record(used.digest).stat().st_mtime > then, "what is used was looked at")
    until(lambda: not (store / old.digest[:2] / old.digest).exists())
    assert not (platform.data / "bundles" / old.digest).exists()
    assert (store / used.digest[:2] / used.digest).exists()
    assert (platform.data / "bundles" / used.digest).exists()
