"""A function is updated while it is called: the new revision takes calls once it is loaded, and none is lost."""

import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import httpx
import pytest
from tests.integration.conftest import Platform
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)

MODEL = """
    import time

    def load(device):
        return bytearray(50 << 20)

    def handle(model, event, context):
        time.sleep(0.05)
        return "{said}"
"""
BROKEN = """
    def load(device):
        raise ValueError("these weights are of another model")

    def handle(model, event, context):
        return "broken"
"""
TWO, ONE = "200MiB", "120MiB"


@pytest.fixture
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Platform]:
    platform = Platform(tmp_path, "--device", f"cpu:0={getattr(request, 'param', TWO)}")
    try:
        yield platform.start()
    finally:
        platform.close()


def deploy(platform: Platform, source: str) -> None:
    """As `Platform.deploy`, and do not wait."""
    built = platform.build("model", source)
    platform.upload(built)
    platform._cli.deploy({
        "service": "model", "image": "model:1",
        "annotations": {"gpufaas.bundle": built.digest, "gpufaas.memory": "80Mi"},
    })  # fmt: skip


def calls(platform: Platform, count: int) -> list["Future[httpx.Response]"]:
    """Begin a call each tenth of a second."""
    begun = []
    for _ in range(count):
        begun.append(platform.begin("/function/model"))
        time.sleep(0.1)
    return begun


@pytest.mark.parametrize("served", [TWO, ONE], indirect=True, ids=["room for two", "room for one"])
def test_no_call_fails_while_a_resident_model_is_updated(served: Platform) -> None:
    deploy(served, MODEL.format(said="old"))
    assert served.call("/function/model").text == "old"

    before = calls(served, 10)
    deploy(served, MODEL.format(said="new"))
    after = calls(served, 50)

    answers = [each.result() for each in (*before, *after)]
    assert [each.status_code for each in answers] == [200] * 60
    said = [each.text for each in answers]
    assert set(said) == {"old", "new"}
    assert said == sorted(said, reverse=True), "each call after the first answer of the new revision is its own"
    until(lambda: served.residents() == ["model"], "the old revision has drained")


@pytest.mark.long
def test_of_two_devices_with_room_for_one_copy_each_one_loads_the_new_revision_while_the_other_serves(
    tmp_path: Path, open_path: Path
) -> None:
    gate = open_path / "gate"
    source = MODEL.replace(
        "return byte",
        f"import os\n        while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n        return byte",
    )
    platform = Platform(tmp_path, "--device", f"cpu:0={ONE}", "--device", f"cpu:1={ONE}")
    try:
        platform.start()
        deploy(platform, MODEL.format(said="old"))
        platform.http.post("/system/scale-function/model", json={"serviceName": "model", "replicas": 2})
        until(lambda: platform.detail("model")["ready"] == 2, "each device has a copy")

        deploy(platform, source.format(said="new"))
        answers = calls(platform, 10)
        assert [each.result().text for each in answers] == ["old"] * 10, "one copy is left"
        assert "pending" in platform.detail("model")
        answers = calls(platform, 5)
        gate.touch()
        answers += calls(platform, 20)

        assert {each.result().status_code for each in answers} == {200}
        until(lambda: platform.call("/function/model").text == "new", "it is loaded, and has the calls")
        until(lambda: "pending" not in platform.detail("model"), "the hand-over is done")
    finally:
        platform.close()


@pytest.mark.parametrize("served", [TWO, ONE], indirect=True, ids=["room for two", "room for one"])
def test_a_revision_that_does_not_load_leaves_the_old_one_serving_and_says_why(served: Platform) -> None:
    deploy(served, MODEL.format(said="old"))
    served.call("/function/model")
    old = served.detail("model")["revision"]

    deploy(served, BROKEN)
    answers = [each.result() for each in calls(served, 20)]
    until(lambda: "failed" in served.detail("model"), "it has failed")

    assert [(each.status_code, each.text) for each in answers] == [(200, "old")] * 20
    detail = served.detail("model")
    assert detail["revision"] == old
    assert "pending" not in detail
    assert "these weights are of another model" in detail["failed"]["reason"]
    deploy(served, MODEL.format(said="new"))
    until(lambda: served.call("/function/model").text == "new", "the next one serves")
    assert "failed" not in served.detail("model")


def test_an_idle_function_is_updated_without_a_load_and_its_first_calls_go_back_if_that_fails(served: Platform) -> None:
    deploy(served, MODEL.format(said="old"))

    deploy(served, BROKEN)

    broken = served.detail("model")["revision"]
    assert served.residents() == []
    answers = [each.result() for each in calls(served, 5)]
    assert [(each.status_code, each.text) for each in answers] == [(200, "old")] * 5
    assert served.detail("model")["failed"]["revision"] == broken


def test_up_waits_until_a_revision_serves_or_says_why_it_does_not(served: Platform, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "model").mkdir(parents=True)
    address = served.url.removeprefix("http://")
    password = (served.data / "auth" / "basic-auth-password").read_text().strip()
    (project / "stack.yaml").write_text(
        f"provider: {{name: openfaas, gateway: 'http://admin:{password}@{address}'}}\n"
        "functions: {model: {lang: python3-torch, handler: ./model, annotations: {gpufaas.memory: 80Mi}}}\n"
    )

    def up(source: str) -> subprocess.CompletedProcess[str]:
        (project / "model" / "handler.py").write_text(textwrap.dedent(source))
        return subprocess.run(
            [sys.executable, "-m", "gpufaas_cli", "up"], cwd=project, capture_output=True, text=True, check=False
        )

    up(MODEL.format(said="old")).check_returncode()
    assert served.call("/function/model").text == "old"
    up(MODEL.format(said="new")).check_returncode()
    assert served.call("/function/model").text == "new", "it serves when up has ended"

    failed = up(BROKEN)

    assert failed.returncode == 1
    assert "these weights are of another model" in failed.stderr
    assert f"{served.detail('model')['revision']} goes on serving" in failed.stderr
    assert served.call("/function/model").text == "new"
