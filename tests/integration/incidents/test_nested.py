"""A model function called a model function on the same device, and both hung until their time limit."""

from collections.abc import Callable
from pathlib import Path

from tests.integration.conftest import HTTP, Platform, until

OUTER = """
    import os, urllib.error, urllib.request
    def load(device):
        return None
    def handle(model, event, context):
        url = os.environ["OPENFAAS_URL"] + "/function/" + event.body.decode()
        try:
            with urllib.request.urlopen(url, data=b"x") as answer:
                return answer.headers["X-Gpufaas-Device"] + " " + answer.read().decode()
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.headers['X-Gpufaas-Error']} {error.read().decode()}"
"""
ENDLESS = """
    import os, time
    def load(device):
        return None
    def handle(model, event, context):
        open(os.environ["BEGAN"], "w").close()
        while True:
            yield b"x"
            time.sleep(0.1)
"""
INNER_CPU = """
    def handle(event, context):
        return "inner"
"""
INNER = """
    def load(device):
        return None
    def handle(model, event, context):
        return "inner"
"""


def test_on_one_device_the_inner_call_is_refused_at_once_and_the_outer_answers(platform: Platform) -> None:
    outer = platform.deploy("outer", OUTER)
    platform.deploy("inner", INNER)
    platform.deploy("cpu", INNER_CPU, HTTP)
    assert platform.call(outer, b"cpu").text == "local/cpu:0 inner", "a CPU function has room beside it"

    answers = [platform.call(outer, name) for name in (b"inner", b"outer")]

    for answer in answers:
        assert answer.status_code == 200
        assert answer.text.startswith("508 nested-call "), answer.text
        assert "device local/cpu:0 is held by call" in answer.text


def test_on_two_devices_it_runs_on_the_other_one(make_platform: Callable[..., Platform], open_path: Path) -> None:
    """And ends with its outer call, whose time limit is shorter than its own."""
    began = open_path / "began"
    platform = make_platform("--device", "cpu:0=200MiB", "--device", "cpu:1=200MiB").start()
    outer, brief = platform.deploy("outer", OUTER), platform.deploy("brief", OUTER, timeout="2s")
    platform.deploy("inner", INNER)
    platform.deploy("endless", ENDLESS, timeout="1h", env={"BEGAN": str(began)})
    until(lambda: platform.call(brief, b"endless").status_code == 504 and began.exists(), "they ran, and time was up")
    until(lambda: platform.running() == 0, "the inner call ended with it")

    for _ in range(2):
        answer = platform.call(outer, b"inner")
        device, said = answer.text.split(" ", 1)
        assert said == "inner"
        assert device != answer.headers["X-Gpufaas-Device"]


RECURSES = """
    import os, urllib.error, urllib.request
    def handle(event, context):
        '''Call itself until it is refused; say how deep that was.'''
        depth = int(event.text)
        try:
            url = os.environ["OPENFAAS_URL"] + "/function/recurses"
            with urllib.request.urlopen(url, data=str(depth + 1).encode()) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            return f"{depth} {error.code} {error.headers['X-Gpufaas-Error']}"
"""


def test_a_function_that_calls_itself_without_end_is_refused_once_its_copies_have_no_slot(platform: Platform) -> None:
    recurses = platform.deploy("recurses", RECURSES, HTTP, slots="2", labels={"com.openfaas.scale.max": "2"})
    for _ in range(2):
        assert platform.call(recurses, b"1").text == "4 508 nested-call"


def test_an_address_of_no_worker_is_refused_and_a_forged_one_too(platform: Platform) -> None:
    for token in ("x", "AAAA", "A" * 60, "%C3%A9"):
        answer = platform.http.post(f"/from/{token}/function/outer")
        assert answer.status_code == 403
        assert "OPENFAAS_URL" in answer.text
