"""What handlers returned, raised and were sent became errors that named nothing, and an exception ended its worker."""

import gzip
import json

from tests.integration.conftest import HTTP, Platform

ANSWERS = """
    import os

    def answer(event):
        if event.path == "/fail":
            raise ValueError("x\\n" * 5_000_000)
        return {"pid": os.getpid(), None: event.json()}, 201, {"X-Kind": "found"}

    def handle(event, context):
        return answer(event)
"""
ASYNC = ANSWERS.replace("def handle", "async def handle")


def test_an_exception_of_ten_megabytes_costs_its_worker_nothing_and_bodies_and_answers_may_be_what_python_says(
    platform: Platform,
) -> None:
    packed = {"content-encoding": "gzip", "content-type": "application/json"}
    bomb = gzip.compress(b" " * (33 << 20))
    for path in (platform.deploy("answers", ANSWERS, HTTP), platform.deploy("answers-async", ASYNC, HTTP)):
        before = platform.call(path, gzip.compress(b'"caf\xc3\xa9"'), headers=packed)
        failed = platform.call(path + "/fail")
        after = platform.call(path, b'"x"')

        assert (before.status_code, before.headers["x-kind"], before.json()["null"]) == (201, "found", "café")
        assert (failed.status_code, failed.text[:15]) == (500, "ValueError: x x")
        assert after.json()["pid"] == before.json()["pid"]
        assert platform.call(path, bomb, headers=packed).status_code == 413
        assert platform.call(path, b"x", headers={"content-encoding": "br"}).status_code == 415
    assert json.loads(after.content)["null"] == "x"
