"""Memory surprised users: declared memory was taken back, undeclared memory was never given, threads had no stacks."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.integration.conftest import ECHO, ECHO_MODEL, HTTP, Platform

from gpufaas_core.units import MiB

TAKER = """
    import torch

    def load(device):
        return device

    def handle(model, event, context):
        return str(int(torch.ones(int(event.text or 1) * 1024 * 1024 // 4).sum()))
"""


def taker(number: int) -> str:
    """What is learnt of a bundle is kept, so each test has one of its own."""
    return f"{TAKER}\n    # {number}\n"


def test_a_batch_has_the_room_that_was_declared_for_it_also_after_small_calls(platform: Platform) -> None:
    path = platform.deploy("taker", taker(1), memory="200Mi")
    for _ in range(3):
        assert platform.call(path, b"1").status_code == 200
    neighbour = platform.deploy("neighbour", ECHO, HTTP)
    assert platform.call(neighbour, b"here").text == "here"

    answer = platform.call(path, b"120")

    assert (answer.status_code, answer.text) == (200, str(120 * MiB // 4)), answer.text


def test_who_declares_nothing_may_use_the_empty_device_and_gives_back_what_others_need(platform: Platform) -> None:
    path = platform.deploy("taker", taker(2), memory="")

    assert platform.call(path, b"240").status_code == 200, "the first call"
    assert platform.call(path, b"1").status_code == 200
    assert platform.call(path, b"240").status_code == 200
    neighbour = platform.deploy("neighbour", ECHO, HTTP)
    assert platform.call(neighbour, b"here").text == "here"
    assert platform.call(path, b"240").status_code == 200


def test_a_load_that_takes_more_than_was_guessed_is_one_slow_success(platform: Platform) -> None:
    heavy = platform.deploy(
        "heavy",
        """
        import torch

        def load(device):
            return torch.ones(250 * 1024 * 1024 // 4)

        def handle(model, event, context):
            return str(len(model))
        """,
        memory="",
    )

    first = platform.call(heavy)

    assert (first.status_code, first.headers["x-gpufaas-start"]) == (200, "disk"), first.text


@pytest.mark.long
def test_a_load_whose_files_do_not_fit_is_given_more_room(platform: Platform, open_path: Path) -> None:
    """As `import transformers`: files count in a control group, no allocation fails, all is slow for ever."""
    file = open_path / "library"
    with file.open("wb") as out:
        out.write(bytes(250 * MiB))
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what others have read costs nothing
    slow = platform.deploy(
        "slow",
        f"""
        import mmap, os, resource

        def load(device):
            pages = mmap.mmap(os.open({str(file)!r}, os.O_RDONLY), 0, prot=mmap.PROT_READ)
            passes, read = 0, -1
            while resource.getrusage(resource.RUSAGE_SELF).ru_majflt != read:  # the last pass had to read the disk
                read = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
                pages[::4096]
                passes += 1
            return passes

        def handle(passes, event, context):
            return str(passes)
        """,
        memory="",
    )

    first = platform.call(slow)

    assert (first.status_code, first.headers["x-gpufaas-start"]) == (200, "disk"), first.text
    assert int(first.text) < 10, "the load that ended was one with room"


def test_a_load_that_takes_more_than_the_device_says_so(platform: Platform) -> None:
    huge = platform.deploy("huge", TAKER.replace("return device", "return torch.ones(2_000_000_000)"))

    answer = platform.call(huge)

    assert (answer.status_code, answer.headers["x-gpufaas-error"]) == (507, "out-of-memory"), answer.text
    assert "it had 400 MiB, which is all that the largest cpu device for it has" in answer.text


def test_a_handler_may_have_threads(platform: Platform) -> None:
    threads = platform.deploy(
        "threads",
        """
        import threading

        def load(device):
            return device

        def handle(model, event, context):
            gate = threading.Barrier(25)
            made = [threading.Thread(target=gate.wait) for _ in range(24)]
            for each in made:
                each.start()
            gate.wait()
            return str(len(made))
        """,
        memory="100Mi",
    )

    assert platform.call(threads).text == "24"
    assert platform.call(threads).text == "24"


def test_a_call_that_runs_out_is_told_how_much_there_is_and_nobody_else_notices(platform: Platform) -> None:
    path = platform.deploy("taker", taker(3), memory="120Mi")
    neighbour = platform.deploy("neighbour", ECHO, HTTP)
    assert platform.call(path, b"1").status_code == 200

    answer = platform.call(path, b"200")

    assert (answer.status_code, answer.headers["x-gpufaas-error"]) == (507, "out-of-memory"), answer.text
    assert "it may use 120 MiB on" in answer.text
    assert "gpufaas.memory" in answer.text
    assert platform.call(path, b"200").status_code == 200, "it has had room since: there is some"
    assert platform.call(neighbour, b"here").text == "here"


def test_a_call_that_may_run_twice_does_when_there_is_room(platform: Platform) -> None:
    path = platform.deploy("taker", taker(4), memory="120Mi", idempotent="true")
    assert platform.call(path, b"1").status_code == 200

    assert platform.call(path, b"200").status_code == 200
    assert platform.call(path, b"2500").status_code == 507


def test_a_function_may_call_a_model_that_needs_what_it_was_lent(platform: Platform) -> None:
    inner = platform.deploy("inner", taker(5), memory="200Mi")
    outer = platform.deploy(
        "outer",
        f"""
        import urllib.request

        def handle(event, context):
            url = "{platform.url}{inner}"
            return urllib.request.urlopen(url, b"120").read()
        """,
        HTTP,
    )

    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda _: platform.call(outer), range(3)))

    assert [each.status_code for each in answers] == [200] * 3, answers[0].text


def test_what_a_function_keeps_in_shared_memory_is_not_given_to_another_one(platform: Platform) -> None:
    """A file in /dev/shm that is not open belongs to no process; its memory was promised again."""
    if "cgroup" not in platform.status()["devices"][0]["device"]["labels"]["memory.enforcement"]:
        pytest.skip("such files are visible to control groups only")
    keeper = platform.deploy(
        "keeper",
        """
        def load(device):
            return None

        def handle(model, event, context):
            with open("/dev/shm/kept", "wb") as file:
                file.write(bytes(int(event.text) << 20))
            return "kept"
        """,
        memory="",
    )
    assert platform.call(keeper, b"1").status_code == 200
    assert platform.call(keeper, b"250").status_code == 200
    path = platform.deploy("taker", taker(6), memory="250Mi")

    assert platform.call(path, b"120").status_code == 200

    assert platform.residents() == ["taker"], "there is no room for both"


def test_a_function_that_uses_what_it_was_lent_is_told_at_once_that_its_own_call_finds_no_room(
    platform: Platform,
) -> None:
    inner = platform.deploy("inner", taker(7), memory="250Mi")
    outer = platform.deploy(
        "outer",
        """
        import os, urllib.error, urllib.request

        def handle(event, context):
            held = b"x" * (250 << 20)
            try:
                return urllib.request.urlopen(os.environ["OPENFAAS_URL"] + event.body.decode(), b"1").read()
            except urllib.error.HTTPError as error:
                return f"{error.code} {error.headers['X-Gpufaas-Error']}"
        """,
        HTTP,
    )

    assert platform.call(outer, inner.encode()).text == "508 nested-call"


def test_a_function_that_declares_nothing_has_the_room_of_idle_ones_when_it_needs_it(platform: Platform) -> None:
    """The device is full, as it is after a while; the call may run twice, so its caller notices nothing."""
    path = platform.deploy("taker", taker(8), memory="", idempotent="true")
    assert platform.call(path, b"1").status_code == 200
    for number in range(3):
        other = platform.deploy(f"other{number}", ECHO_MODEL, memory="120Mi")
        assert platform.call(other, b"x").status_code == 200
    assert len(platform.residents()) == 4

    answer = platform.call(path, b"70")

    assert (answer.status_code, answer.text) == (200, str(70 * MiB // 4)), answer.text
    assert 2 <= len(platform.residents()) < 4, "no more leave than must"
