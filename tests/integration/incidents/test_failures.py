"""
What failed passes, and status says what is true: three failed loads made a function dead until it was deployed again,
and `describe` still said Ready.
"""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from tests.integration.conftest import HTTP, Platform, until

MENDS = """
    import os

    def load(device):
        with open({flag!r} + ".loads", "a") as loads:
            loads.write("x")
        if not os.path.exists({flag!r}):
            raise RuntimeError("the disk is away")

    def handle(model, event, context):
        return "here"
"""


def test_a_function_whose_loads_fail_says_so_and_comes_back_without_a_deployment(
    platform: Platform, open_path: Path
) -> None:
    flag = open_path / "mended"
    path = platform.deploy("mends", MENDS.format(flag=str(flag)))
    assert platform.call(path).status_code == 502
    once = platform.http.get("/system/function/mends").json()
    assert (once["availableReplicas"], once["gpufaas"]["state"], once["gpufaas"]["failures"]) == (0, "failed", 1)
    assert "the disk is away" in once["gpufaas"]["reason"]
    assert [platform.call(path).status_code for _ in range(2)] == [502] * 2

    answers = [platform.call(path)]
    # It loads again if more than a second has passed.
    until(lambda: "retry-after" in answers[-1].headers or answers.append(platform.call(path)), "it is not even tried")
    refused, loads = answers[-1], len((open_path / "mended.loads").read_text())
    [listed] = platform.http.get("/system/functions").json()
    failed = platform.http.get("/system/function/mends").json()
    metrics = platform.http.get("/metrics").text

    assert (refused.status_code, refused.headers["x-gpufaas-error"]) == (502, "load-failed")
    assert int(refused.headers["retry-after"]) >= 1
    assert "the disk is away" in refused.text
    assert "deployed again" in refused.text
    assert listed["availableReplicas"] == failed["availableReplicas"] == 0
    assert failed["gpufaas"]["state"] == listed["gpufaas"]["state"] == "failed"
    assert "the disk is away" in failed["gpufaas"]["reason"]
    assert f'gpufaas_function_failed_loads{{function_name="mends.openfaas-fn"}} {loads}.0' in metrics

    flag.touch()
    time.sleep(float(refused.headers["retry-after"]))
    assert platform.call(path).text == "here"
    after = platform.http.get("/system/function/mends").json()
    assert (after["gpufaas"]["state"], after["availableReplicas"]) == ("resident", 1)


def test_a_minimum_of_copies_whose_loads_fail_comes_back_by_itself(platform: Platform, open_path: Path) -> None:
    flag = open_path / "mended"
    platform.deploy("mends", MENDS.format(flag=str(flag)), labels={"com.openfaas.scale.min": "1"})

    def state() -> str:
        return str(platform.http.get("/system/function/mends").json()["gpufaas"]["state"])

    until(lambda: state() == "failed")
    flag.touch()
    until(lambda: state() == "resident")


def test_a_check_that_is_killed_from_outside_is_503_and_one_that_ends_itself_is_400(platform: Platform) -> None:
    def deploy(name: str, source: str) -> httpx.Response:
        built = platform.build(name, source, HTTP)
        platform.upload(built)
        wanted = {"service": name, "image": name, "annotations": {"gpufaas.bundle": built.digest}}
        return platform.http.post("/system/functions", json=wanted)

    with ThreadPoolExecutor(1) as pool:
        deployed = pool.submit(deploy, "slow", "import time\ntime.sleep(600)\ndef handle(event, context): return ''")
        until(platform.workers)
        for each in platform.workers():
            each.send_signal(signal.SIGKILL)
        killed = deployed.result()
    ended = deploy("ends", "import os\nos._exit(3)\ndef handle(event, context): return ''")

    assert (killed.status_code, ended.status_code) == (503, 400), (killed.text, ended.text)
    assert killed.headers["x-gpufaas-error"] == "check-broken"
    assert "retry-after" in killed.headers
    assert "signal SIGKILL" in killed.text
    assert "exit status 3" in ended.text
