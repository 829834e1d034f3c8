"""
What a new user's first functions met: a caller's bad JSON was the function's 500, a typo in `headers` turned a 401 into
a 200, `async def handle` failed at each call, a stream that broke off was "no gateway", tracebacks began with ours.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.conftest import HTTP, Platform, until

HANDLER = """
    def fail():
        raise KeyError("breed")

    def handle(event, context):
        match event.path:
            case "/json":
                return event.json()
            case "/typo":
                return {"statusCode": 401, "header": {"www-authenticate": "Basic"}}
            case "/stream":
                return pieces()
        fail()

    def pieces():
        yield "first"
        fail()
"""


def test_what_a_caller_and_an_author_do_wrong_is_told_to_the_one_who_did_it(platform: Platform) -> None:
    path = platform.deploy("first", HANDLER, HTTP)

    bad = platform.call(f"{path}/json", b"{no json")
    typo = platform.call(f"{path}/typo")

    assert (bad.status_code, bad.text.startswith("the body is not JSON: ")) == (400, True)
    assert typo.status_code == 500
    assert "'header' (did you mean 'headers'?)" in typo.text
    until(lambda: "Traceback" in platform.log("first"))
    assert "not JSON" not in platform.log("first"), "a bad request is not in the function's log"


GATED_LOAD = """
    import os, time

    def load(device):
        while not os.path.exists(os.environ["GATE"]):
            time.sleep(0.01)

    def handle(model, event, context):
        return "loaded"
"""


def test_a_call_whose_time_is_up_while_its_worker_loads_says_so(platform: Platform, open_path: Path) -> None:
    """It said "hit", and that its load took 0.0 ms."""
    gate = open_path / "gate"
    path = platform.deploy("loads", GATED_LOAD, timeout="500ms", env={"GATE": str(gate)})

    late = platform.call(path)

    assert late.status_code == 504
    said = re.search(r"its worker was still loading, for ([0-9.]+) s", late.text)
    told = re.search(r"load;dur=([0-9.]+)", late.headers["server-timing"])
    assert said
    assert told
    assert float(told[1]) == pytest.approx(float(said[1]) * 1000, rel=0.01)
    assert float(told[1]) > 100
    gate.touch()
    until(lambda: platform.call(path).text == "loaded")


def test_a_traceback_begins_with_the_authors_frame(platform: Platform) -> None:
    path = platform.deploy("first", HANDLER, HTTP)

    platform.call(f"{path}/fails")

    until(lambda: "KeyError: 'breed'" in platform.log("first"))
    assert "runner.py" not in platform.log("first")
    assert platform.log("first").index("in handle") < platform.log("first").index("in fail")


def test_a_stream_that_breaks_off_is_a_failure_of_the_function_and_points_to_its_logs(platform: Platform) -> None:
    platform.deploy("first", HANDLER, HTTP)

    command = [sys.executable, "-m", "gpufaas_cli", "invoke", "first/stream", "-g", platform.url]
    done = subprocess.run(command, check=False, capture_output=True, input=b"x")

    assert (done.returncode, done.stdout) == (1, b"first")
    assert b"'gpufaas logs first' says why" in done.stderr
