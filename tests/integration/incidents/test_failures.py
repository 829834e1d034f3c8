"""
What failed passes, and status says what is true: three failed loads made a function dead until it was deployed again,
and `describe` still said Ready.
"""

import time
from pathlib import Path

from tests.integration.conftest import Platform, until

MENDS = """
    import os

    def load(device):
        if not os.path.exists({flag!r}):
            raise RuntimeError("the disk is away")

    def handle(model, event, context):
        return "here"
"""


def test_a_function_whose_loads_fail_says_so_and_comes_back_without_a_deployment(
    platform: Platform, tmp_path: Path
) -> None:
    flag = tmp_path / "mended"
    path = platform.deploy("mends", MENDS.format(flag=str(flag)))
    assert [platform.call(path).status_code for _ in range(3)] == [502] * 3

    refused = platform.call(path)
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
    assert 'gpufaas_function_failed_loads{function_name="mends.openfaas-fn"} 3.0' in metrics

    flag.touch()
    time.sleep(float(refused.headers["retry-after"]))
    assert platform.call(path).text == "here"
    after = platform.http.get("/system/function/mends").json()
    assert (after["gpufaas"]["state"], after["availableReplicas"]) == ("resident", 1)


def test_a_minimum_of_copies_whose_loads_fail_comes_back_by_itself(platform: Platform, tmp_path: Path) -> None:
    flag = tmp_path / "mended"
    platform.deploy("mends", MENDS.format(flag=str(flag)), labels={"com.openfaas.scale.min": "1"})

    def state() -> str:
        return str(platform.http.get("/system/function/mends").json()["gpufaas"]["state"])

    until(lambda: state() == "failed")
    flag.touch()
    until(lambda: state() == "resident")
