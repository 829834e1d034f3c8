"""When things break: workers, loads, callers, disks, the platform. Nothing is left behind, and the next call works."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from pathlib import Path

import psutil
import pytest
from tests import files
from tests.integration.conftest import (
    ECHO,
    ECHO_MODEL,
    GATED,
    GATED_MODEL,
    HTTP,
    TORCH,
    Platform,
    Sampler,
    all_ended,
    until,
)

from gpufaas import Refused
from gpufaas_core.files import remove_tree
from gpufaas_core.messages import Finished
from gpufaas_scheduler.journal import read

Make = Callable[..., Platform]
MiB = 1024 * 1024


def request(path: str, body: bytes, more: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


# --- workers ---


@pytest.mark.parametrize("lang", [TORCH, HTTP])
def test_a_worker_killed_in_mid_call_gives_502_with_its_last_words_and_the_next_call_works(
    platform: Platform, lang: str
) -> None:
    source = GATED_MODEL if lang == TORCH else GATED
    source = source.replace("open(event", "print('I was in the middle of', event.text, flush=True)\n        open(event")
    path = platform.deploy("killed", source, lang)
    gate = platform.gate()
    call = platform.begin(path, gate.body)
    until(gate.reached)

    platform.workers()[0].send_signal(signal.SIGKILL)

    answer = call.result()
    assert answer.status_code == 502
    assert "SIGKILL" in answer.text
    assert f"I was in the middle of {gate.body.decode()}" in answer.text
    until(platform.is_empty)
    gate.open()
    again = platform.call(path)
    assert (again.status_code, again.headers["x-gpufaas-start"]) == (200, "disk")


def test_an_idle_worker_that_is_killed_is_missed_by_the_next_call_only(platform: Platform) -> None:
    path = platform.deploy("killed", GATED_MODEL)
    for _ in range(20):
        answer = platform.call(path)
        assert answer.status_code == 200
        os.kill(int(answer.text), signal.SIGKILL)
        # Whether the call meets a worker that is already known to be dead, or not yet, is a race; both are right.
        assert platform.call(path).status_code in (200, 502)
        until(lambda: platform.call(path).status_code == 200)


def test_a_handler_that_exits_its_process_gives_502(platform: Platform) -> None:
    path = platform.deploy("exits", "import os\ndef handle(event, context): os._exit(7)", HTTP)

    answer = platform.call(path)

    assert answer.status_code == 502
    assert "exit status 7" in answer.text


def test_a_killed_fork_server_costs_its_workers_and_is_started_again(make_platform: Make) -> None:
    platform = make_platform("--device", "cpu:0=400MiB").start()
    path = platform.deploy("model", ECHO_MODEL)
    platform.call(path)
    tree = platform.tree()

    platform.fork_server().send_signal(signal.SIGKILL)

    all_ended(tree)
    answer = platform.call(path, b"back")
    assert (answer.text, answer.headers["x-gpufaas-start"]) == ("back", "disk")
    assert platform.stop() == 0


def test_what_a_worker_started_itself_ends_with_it(platform: Platform) -> None:
    path = platform.deploy(
        "parent",
        "import subprocess\n"
        "def handle(event, context): return str(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid)",
        HTTP,
    )
    child = psutil.Process(int(platform.call(path).text))

    platform.workers()[0].send_signal(signal.SIGKILL)

    all_ended([child])


@pytest.mark.parametrize("lang", [TORCH, HTTP])
def test_a_removed_function_ends_the_call_that_it_has_begun_and_those_that_wait_are_told(
    platform: Platform, lang: str
) -> None:
    path = platform.deploy("doomed", GATED_MODEL if lang == TORCH else GATED, lang, slots="1")
    gate = platform.gate()
    runs = platform.begin(path, gate.body)
    until(gate.reached)
    wait = [platform.begin(path, gate.body) for _ in range(3)]
    until(lambda: platform.queued() == 3)

    platform.remove("doomed")
    answers = [call.result() for call in wait]

    assert [each.status_code for each in answers] == [404] * 3
    assert all("removed" in each.text for each in answers)
    assert platform.http.get("/system/functions").json() == []
    assert platform.call(platform.deploy("doomed", "def handle(event, context): return 'new'", HTTP)).text == "new"
    assert not runs.done()
    gate.open()
    assert runs.result().status_code == 200
    until(lambda: str(runs.result().text) not in {str(each.pid) for each in platform.workers()}, "its worker ends")
    platform.remove("doomed")


def test_calls_of_many_functions_while_workers_are_killed_all_end_and_all_functions_answer_afterwards(
    make_platform: Make,
) -> None:
    """
    Seven functions on two devices that hold half of them; a worker dies at every moment of its life. One for some
    calls that end, not every so many milliseconds: else none might ever load on a slow machine.
    """
    platform = make_platform("--device", "cpu:0=110MiB", "--device", "cpu:1=110MiB").start()
    # 4 ms: so many kills meet a call that runs, not only starts, which are done again without a word.
    took = "import time\n\n    def handle(%s):\n        time.sleep(0.004)"
    model, plain = (
        source.replace(f"def handle({arguments}):", took % arguments)
        for source, arguments in ((ECHO_MODEL, "model, event, context"), (ECHO, "event, context"))
    )
    paths = [platform.deploy(f"model-{n}", model) for n in range(5)]
    paths += [platform.deploy(f"plain-{n}", plain, HTTP, memory="48Mi") for n in range(2)]
    chance = random.Random(20)
    statuses: set[int] = set()

    def calls_beside_kills() -> None:
        calls = {platform.begin(chance.choice(paths), b"%d" % n): n for n in range(300)}
        for call in as_completed(calls):
            answer = call.result()
            statuses.add(answer.status_code)
            assert answer.status_code == 502 or (answer.status_code, answer.text) == (200, str(calls[call])), (
                answer.text
            )
            if chance.random() < 0.15 and (workers := platform.workers()):
                time.sleep(chance.uniform(0.0, 0.02))
                with contextlib.suppress(psutil.NoSuchProcess):
                    chance.choice(workers).kill()

    until(lambda: calls_beside_kills() or statuses == {200, 502}, "some have met a call")
    until(platform.is_idle)
    for path in paths:
        # After three loads in a row that were killed, the next one waits for a second or more.
        until(lambda path=path: platform.call(path, b"after").status_code == 200)  # type: ignore[misc]
    platform.remove_all()
    until(platform.is_empty)
    assert platform.stop() == 0


# --- memory ---


def test_a_handler_that_takes_twice_its_device_gets_an_error_and_the_neighbour_answers_on(platform: Platform) -> None:
    greedy = platform.deploy(
        "greedy",
        """
        import torch

        def load(device):
            return device

        def handle(model, event, context):
            return {"sum": float(torch.ones(int(event.text or 1) * 1024 * 1024 // 4).sum())}
        """,
        memory="120Mi",
    )
    neighbour = platform.deploy("neighbour", ECHO, HTTP)
    assert platform.call(greedy).status_code == 200
    assert platform.call(neighbour, b"before").text == "before"

    with Sampler(platform) as seen:
        answer = platform.call(greedy, b"800")
        after = platform.call(neighbour, b"after")

    assert (answer.status_code, answer.headers["x-gpufaas-error"]) == (507, "out-of-memory")
    assert "out of memory" in answer.text
    assert "gpufaas.memory" in answer.text
    assert (after.text, after.headers["x-gpufaas-start"]) == ("after", "hit")
    assert seen.most_bytes <= 400 * MiB
    assert platform.call(greedy, b"1").json() == {"sum": 262144.0}


def test_a_model_whose_need_only_shows_at_load_is_refused_after_three_loads_for_a_while(
    platform: Platform,
) -> None:
    source = "def load(device): return bytearray(1024 * 1024 * 1024)\ndef handle(m, e, c): return 'here'"
    path = platform.deploy("giant", source)
    neighbour = platform.deploy("neighbour", ECHO_MODEL)

    failures = [platform.call(path) for _ in range(3)]
    answers = [platform.call(path)]
    # It loads again if more than a second has passed.
    until(lambda: answers[-1].status_code != 507 or answers.append(platform.call(path)), "it is not even tried")
    refused = answers[-1]

    assert [each.status_code for each in failures] == [507] * 3
    assert all("MemoryError" in each.text and re.search(r"\d MiB", each.text) for each in failures), failures[0].text
    assert refused.status_code == 502
    assert re.search(r"\d+ times in a row", refused.text)
    assert "MemoryError" in refused.text
    assert platform.call(neighbour, b"x").text == "x"
    platform.deploy("giant", source.replace("1024 * 1024 * 1024", "1024"))
    assert platform.call(path).text == "here"


# --- loads and handlers ---


def test_a_load_that_raises_gives_502_with_the_reason_and_the_log_has_all_of_it(platform: Platform) -> None:
    path = platform.deploy(
        "raises", "def load(device): raise RuntimeError('no such weights')\ndef handle(m, e, c): pass"
    )

    answers = [platform.call(path) for _ in range(4)]

    assert [each.status_code for each in answers] == [502] * 4
    assert all("RuntimeError: no such weights" in each.text for each in answers)
    until(lambda: "Traceback" in platform.log("raises"))
    until(platform.is_empty)


def test_a_load_that_hangs_is_killed_for_lack_of_progress(platform: Platform) -> None:
    path = platform.deploy(
        "hangs", "import time\ndef load(device): time.sleep(600)\ndef handle(m, e, c): pass", load_stall="1s"
    )
    behind = platform.deploy("behind", ECHO_MODEL)

    hung = platform.begin(path)
    until(platform.running)
    waiting = platform.begin(behind, b"at last")

    assert hung.result().status_code == 502
    assert "no progress for 1 s" in hung.result().text
    assert waiting.result().text == "at last"


@pytest.mark.parametrize("lang", [TORCH, HTTP])
def test_a_handler_that_raises_gives_500_with_its_own_words_and_its_worker_lives(platform: Platform, lang: str) -> None:
    source = """
        import os

        def answer(event):
            if event.body:
                raise ValueError("no such breed: " + event.text)
            return str(os.getpid())
    """
    handle = "handle(event, context): return answer(event)"
    if lang == TORCH:
        handle = "load(device): pass\n        def handle(model, event, context): return answer(event)"
    path = platform.deploy("raises", f"{source}\n        def {handle}\n", lang)
    pid = platform.call(path).text

    answer = platform.call(path, b"cat")

    assert (answer.status_code, answer.text) == (500, "ValueError: no such breed: cat")
    assert platform.call(path).text == pid
    until(lambda: "Traceback" in platform.log("raises"))


# --- callers ---


def endless(platform: Platform) -> str:
    return platform.deploy(
        "endless",
        """
        import itertools

        def load(device):
            return None

        def handle(model, event, context):
            return (f"{n}\\n" for n in itertools.count()) if event.body else "short"
        """,
    )


def test_an_answer_that_never_ends_ends_when_its_caller_goes_or_its_time_is_over(platform: Platform) -> None:
    path = endless(platform)
    with platform.socket() as caller:
        caller.sendall(request(path, b"x"))
        for _ in range(100):
            assert caller.recv(65536)
        assert platform.running() == 1

    until(platform.is_idle)
    assert platform.call(path).text == "short"


def test_hundreds_of_callers_who_hang_up_leave_nothing_behind(platform: Platform) -> None:
    """In the queue, while their model loads, in mid-body, in mid-answer and on a busy slot; in batches, all at once."""
    stream = endless(platform)
    gated = platform.deploy("gated", GATED_MODEL)
    upload = platform.deploy("upload", "def handle(event, context): return event.stream()", HTTP, slots="4")
    for path in (stream, gated, upload):
        assert platform.call(path).status_code == 200
    files, workers = platform.open_files(), {each.pid for each in platform.workers()}
    large = b"x" * (3 * MiB)

    def hang_up(kind: int, gate: bytes) -> None:
        with platform.socket() as sock:
            try:
                match kind % 5:
                    case 0:  # in mid-answer
                        sock.sendall(request(stream, b"x"))
                        sock.recv(1024)
                    case 1:  # in the queue, or as the one that runs
                        sock.sendall(request(gated, gate))
                    case 2:  # in mid-body, of which a part is on disk
                        sock.sendall(request(gated, large)[: 2 * MiB])
                    case 3:  # in mid-body, which streams both ways
                        sock.sendall(request(upload, large)[: 2 * MiB])
                    case 4:  # at once
                        sock.sendall(request(stream, b""))
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            except (BrokenPipeError, ConnectionResetError):
                pass
            if kind % 3:
                held.wait(0.05)

    for batch in range(6):
        gate = platform.gate()
        held = threading.Event()
        threads = [threading.Thread(target=hang_up, args=(batch + n, gate.body)) for n in range(50)]
        for thread in threads:
            thread.start()
        gate.open()
        for thread in threads:
            thread.join()

    until(platform.is_idle)
    until(lambda: not platform.spooled(), "no spooled body is left")
    until(lambda: platform.open_files() <= files + 3, lambda: f"{platform.open_files()} of {files} files are open")
    until(lambda: all(each["inflight"] == 0 for each in platform.status()["functions"].values()))
    assert {each.pid for each in platform.workers()} <= workers
    for path in (stream, gated, upload):
        answer = platform.call(path)
        assert (answer.status_code, answer.headers["x-gpufaas-start"]) == (200, "hit")


def test_a_caller_who_hangs_up_in_the_queue_gives_his_place_up(platform: Platform) -> None:
    path = platform.deploy("gated", GATED_MODEL)
    gate, unused = platform.gate(), platform.gate()
    holder = platform.begin(path, gate.body)
    until(gate.reached)
    waiting = [platform.socket() for _ in range(5)]
    for sock in waiting:
        sock.sendall(request(path, unused.body))
    until(lambda: platform.queued() == 5)

    for sock in waiting:
        sock.close()

    until(lambda: platform.queued() == 0)
    gate.open()
    assert holder.result().status_code == 200
    assert not unused.reached()


def test_a_caller_of_a_cpu_function_who_hangs_up_in_its_queue_gives_his_place_up(platform: Platform) -> None:
    path = platform.deploy("gated", GATED, HTTP, slots="1")
    gate, unused = platform.gate(), platform.gate()
    holder = platform.begin(path, gate.body)
    until(gate.reached)
    with platform.socket() as whole, platform.socket() as half:
        whole.sendall(request(path, unused.body))
        # One that says how short it is would be read before it is queued.
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        half.sendall(head.encode() + b"1388\r\n" + b"x" * 5000 + b"\r\n")
        until(lambda: platform.queued() == 2)

    until(lambda: platform.queued() == 0)
    gate.open()
    assert holder.result().status_code == 200
    assert not unused.reached()


# --- the platform itself ---


def test_nothing_outlives_a_killed_platform_and_its_successor_knows_everything(make_platform: Make) -> None:
    platform = make_platform("--device", "cpu:0=400MiB").start()
    model = platform.deploy("model", GATED_MODEL)
    function = platform.deploy("function", ECHO, HTTP)
    warm = platform.deploy("warm", ECHO_MODEL, labels={"com.openfaas.scale.min": "1"})
    platform.call(model)  # the first call is measured
    platform.call(function)
    gate = platform.gate()
    running = platform.begin(model, gate.body)
    until(gate.reached)
    (platform.data / "spool" / "body-left").write_bytes(b"of a call that was cut off")

    digest = platform.build("model", GATED_MODEL).digest

    def kept() -> bool:
        with sqlite3.connect(f"file:{platform.data / 'gpufaas.db'}?mode=ro", uri=True) as db:
            found = {of: json.loads(profile) for of, profile in db.execute("SELECT digest, profile FROM profiles")}
        db.close()
        return len(found) == 3 and found[digest]["occupation"] < 48 * MiB

    until(kept, "profiles are saved every 5 s")
    until(lambda: len(platform.tree()) == 5, "the fork server, its workers, a standby")

    all_ended(platform.kill())
    assert running.exception() is not None
    platform.start()
    assert platform.spooled() == []
    assert {each["name"] for each in platform.http.get("/system/functions").json()} == {"model", "function", "warm"}
    profile = platform.http.get("/system/function/model").json()["gpufaas"]["profiles"]["cpu"]
    assert profile["measured"]
    assert profile["occupation"] < 48 * MiB
    until(lambda: "warm" in platform.residents())
    assert platform.call(warm, b"x").headers["x-gpufaas-start"] == "hit"
    assert platform.call(model).status_code == 200
    assert platform.call(function, b"again").text == "again"
    assert platform.stop() == 0


def test_what_was_half_written_when_the_platform_was_killed_is_gone_when_it_is_back(make_platform: Make) -> None:
    platform = make_platform("--device", "cpu:0=400MiB").start()
    with platform.socket() as sock:
        head = f"PUT /system/artifacts/{'0' * 64} HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n"
        head += f"Authorization: {platform.login.header()}\r\n\r\n"
        sock.sendall(head.encode() + b"x" * 3 * MiB)
        incoming = platform.data / "artifacts" / "incoming"
        until(lambda: list(incoming.iterdir()))
        platform.kill()

    platform.start()

    assert not list(incoming.iterdir())
    assert platform.http.head(f"/system/artifacts/{'0' * 64}").status_code == 404
    assert platform.stop() == 0


def test_sigterm_lets_running_calls_end_and_leaves_no_process(make_platform: Make) -> None:
    platform = make_platform("--device", "cpu:0=400MiB").start()
    path = platform.deploy("gated", GATED_MODEL)
    gate = platform.gate()
    call = platform.begin(path, gate.body)
    until(gate.reached)
    tree = platform.tree()
    with platform.socket() as follower:
        head = "GET /system/logs?name=gated&follow=1 HTTP/1.1\r\nHost: x\r\n"
        follower.sendall(f"{head}Authorization: {platform.login.header()}\r\n\r\n".encode())
        assert follower.recv(1024).startswith(b"HTTP/1.1 200 ")

        platform.signal(signal.SIGTERM)
        until(lambda: refuses(platform), "no new connection is taken")
        gate.open()

        assert call.result().status_code == 200
        assert platform.wait() == 0
    assert len(tree) >= 2, "the fork server, the worker, and a standby if it is there already"
    all_ended(tree)
    assert platform.said().count("\n") < 10, platform.said()


def refuses(platform: Platform) -> bool:
    try:
        with platform.socket():
            return False
    except ConnectionRefusedError:
        return True


def test_sigterm_while_the_fork_server_still_starts_ends_at_once(make_platform: Make) -> None:
    platform = make_platform("--device", "cpu:0=400MiB")
    platform.launch()
    until(platform.healthy)

    assert platform.stop() == 0
    assert platform.said().count("Traceback") == 0


# --- disks ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    with files.small_disk(tmp_path / "disk", "24m") as disk:
        yield disk


def test_a_full_disk_is_said_nothing_is_half_written_and_with_room_all_goes_on(
    make_platform: Make, small_disk: Path
) -> None:
    platform = make_platform("--device", "cpu:0=400MiB", data=small_disk / "data").start()
    before = platform.deploy("before", ECHO_MODEL, memory="96Mi")
    assert platform.call(before, b"x").text == "x"
    built = platform.build("after", ECHO_MODEL + "\n    # " + "x" * 100_000)
    filler = small_disk / "filler"
    with filler.open("wb") as file, pytest.raises(OSError):
        file.write(b"x" * 64 * MiB)

    upload = platform.http.put(f"/system/artifacts/{built.digest}", content=built.bundle_tar.read_bytes())
    large = platform.call(before, b"x" * 17 * MiB)  # a smaller one needs no file
    small = platform.call(before, b"small")

    assert upload.status_code == 507
    assert "No space left on device" in upload.text
    assert large.status_code == 507
    assert "No space left on device" in large.text
    assert small.text == "small"
    assert not list((platform.data / "artifacts" / "incoming").iterdir())
    assert platform.spooled() == []
    with pytest.raises(Refused) as refused:
        platform.deploy("after", ECHO_MODEL + "\n    # " + "x" * 100_000)
    assert refused.value.status == 507
    assert [each["name"] for each in platform.http.get("/system/functions").json()] == ["before"]

    filler.unlink()

    after = platform.deploy("after", ECHO_MODEL + "\n    # " + "x" * 100_000, memory="96Mi")
    assert platform.call(after, b"room").text == "room"
    assert platform.call(before, b"x" * 4 * MiB).content == b"x" * 4 * MiB
    assert platform.stop() == 0


def test_a_read_only_data_directory_is_said_in_one_line(make_platform: Make, small_disk: Path) -> None:
    data = small_disk / "data"
    data.mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    platform = make_platform("--device", "cpu:0=400MiB", data=data)

    platform.launch()

    assert platform.wait() == 1
    assert re.fullmatch(r"gpufaas: the data directory .*Read-only file system.*--data\n", platform.said())


def test_a_data_directory_that_is_a_file_is_said_in_one_line(make_platform: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    platform = make_platform("--device", "cpu:0=400MiB", data=tmp_path / "file" / "data")

    platform.launch()

    assert platform.wait() == 1
    assert re.fullmatch(r"gpufaas: the data directory .*Not a directory.*--data\n", platform.said())


def test_a_damaged_bundle_makes_its_function_unavailable_and_a_deploy_mends_it(make_platform: Make) -> None:
    platform = make_platform("--device", "cpu:0=400MiB").start()
    hurt, well = platform.deploy("hurt", ECHO_MODEL), platform.deploy("well", ECHO, HTTP)
    assert platform.call(hurt, b"x").text == "x"
    assert platform.stop() == 0
    digest = platform.build("hurt", ECHO_MODEL).digest
    artifact = platform.data / "artifacts" / "sha256" / digest[:2] / digest
    if not artifact.exists():
        artifact = next(path for path in (platform.data / "artifacts").rglob(digest))
    files.opened_up(artifact).write_bytes(b"damaged")
    for installed in (platform.data / "bundles").rglob(f"{digest}*"):
        remove_tree(installed)

    platform.start()

    answer = platform.call(hurt, b"x")
    assert answer.status_code == 503
    assert digest[:12] in answer.text
    assert platform.call(well, b"x").text == "x"
    assert json.loads(platform.http.get("/system/function/hurt").text)["availableReplicas"] == 0
    platform.deploy("hurt", ECHO_MODEL)
    assert platform.call(hurt, b"mended").text == "mended"
    assert platform.stop() == 0


def test_what_a_handler_started_itself_does_not_outlive_the_platform(make_platform: Make) -> None:
    platform = make_platform("--device", "cpu:0=200MiB").start()
    path = platform.deploy(
        "parent",
        """
        import subprocess
        def handle(event, context):
            return str(subprocess.Popen(["sleep", "600"]).pid)
        """,
        HTTP,
    )
    child = psutil.Process(int(platform.call(path).text))

    platform.kill()

    all_ended([child])


def test_the_journal_of_a_killed_platform_has_its_last_events(make_platform: Make, tmp_path: Path) -> None:
    """It is flushed by time, not only when it has gathered enough."""
    journal = tmp_path / "journal.jsonl"
    platform = make_platform("--device", "cpu:0=200MiB", "--journal", str(journal)).start()
    path = platform.deploy("plain", ECHO, HTTP)
    for _ in range(3):
        platform.call(path, b"x")
    until(lambda: journal.read_text().count('"Finished"') == 3)

    platform.kill()

    _, events = read(journal)
    assert sum(isinstance(event, Finished) for event, _ in events) == 3
