"""
``exec_timeout`` and ``X-Timeout`` counted the cold start: a function with a slow load and a short limit never answered.
Two first calls at once loaded the model twice.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration import conftest
from tests.integration.conftest import HTTP, Platform
from tests.waiting import until

SLOW = """
    import time

    def load(device):
        time.sleep(1.5)

    def handle(model, event, context):
        time.sleep(float(event.text))
        return "ran"
"""
SLOW_IMPORT = """
    import time

    time.sleep(1.2)

    def handle(event, context):
        time.sleep(float(event.text))
        return "ran"
"""


@pytest.mark.slow
@pytest.mark.parametrize("over_tcp", [False, True], ids=["one process", "to a node elsewhere"])
def test_a_cold_start_counts_against_no_limit_of_the_run(
    make_platform: Callable[..., Platform], monkeypatch: pytest.MonkeyPatch, over_tcp: bool
) -> None:
    if over_tcp:
        monkeypatch.setattr(conftest, "PROGRAM", [str(Path(__file__).parents[1] / "serve_over_tcp.py")])
    platform = make_platform("--device", "cpu:0=600MiB", "--device", "cpu:1=600MiB").start()
    model = platform.deploy("model", SLOW, env={"exec_timeout": "700ms"})
    plain = platform.deploy("plain", SLOW_IMPORT, HTTP, env={"exec_timeout": "700ms"})

    limit = {"x-timeout": "600ms"}
    first = [platform.begin(path, b"0", headers=limit) for path in (model, model, plain)]
    runs_on = [platform.begin(path, b"9", headers=limit) for path in (plain, platform.deploy("other", SLOW))]
    answers = [each.result() for each in first]

    assert [each.text for each in answers] == ["ran"] * 3
    starts = sorted(each.headers["x-gpufaas-start"] == "hit" for each in answers[:2])
    assert starts == [False, True], "one load is for both"
    (waited,) = [each for each in answers[:2] if each.headers["x-gpufaas-start"] == "hit"]
    assert ", queue-load;dur=" in waited.headers["server-timing"]

    for each in runs_on:
        assert each.result().status_code == 504
        assert "within 0.6 s, the limit of its run (X-Timeout)" in each.result().text
    late = platform.call(model, b"9")
    assert late.status_code == 504
    assert "within 0.7 s, the limit of its run (environment exec_timeout)" in late.text

    whole = platform.deploy("whole", SLOW, timeout="500ms", env={"exec_timeout": "5s"})
    assert "within 0.5 s, its time limit (annotation gpufaas.timeout)" in platform.call(whole, b"0").text
    until(lambda: platform.call(whole, b"0").text == "ran", "its load went on, for the next caller")
