"""Functions that call others by the names which OpenFaaS's gateway has."""

from pathlib import Path

import pytest
from tests.integration.conftest import HTTP, Platform
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)

# Answers with the headers of the request, also with the one that asks for a callback.
RECORDING = """
    import os

    def handle(event, context):
        with open(os.environ["record"], "ab", buffering=0) as file:
            file.write(event.path.encode() + b" " + event.body + b"\\n")
        headers = {name.lower(): event.headers[name] for name in event.headers if name.startswith("X-")}
        return {"statusCode": 200, "body": event.body + b"!", "headers": headers}
"""


def test_functions_are_chained_by_callbacks_to_the_gateways_name(platform: Platform, open_path: Path) -> None:
    """They were never delivered: the name is of OpenFaaS's network. One to itself must not go round for ever."""
    record = open_path / "record"
    platform.deploy("chained", RECORDING, HTTP, env={"record": str(record)})

    def send(body: bytes, callback: str) -> tuple[str, str | None]:
        answer = platform.call("/async-function/chained/sent", body, headers={"X-Callback-Url": callback})
        assert answer.status_code == 202, answer.text
        return answer.headers["x-call-id"], answer.headers.get("x-callback-warning")

    def recorded() -> list[str]:
        return sorted(record.read_text().splitlines()) if record.exists() else []

    chained, no_warning = send(b"a", "http://gateway.openfaas:8080/function/chained/called")
    again, _ = send(b"b", "http://gateway.openfaas.svc.cluster.local:8080/async-function/chained/called")
    lost, warning = send(b"c", "http://nowhere.invalid/")
    ended = platform.call("/async-function/chained/sent", headers={"X-Callback-Url": "http://gateway:8080/system/info"})

    until(lambda: len(recorded()) >= 6, recorded)
    assert recorded() == ["/called a!", "/called b!", "/sent ", "/sent a", "/sent b", "/sent c"]

    def is_done(call: str) -> bool:  # of what its callback has begun, too: that has its id
        return bool(platform.http.get(f"/async/{call}").json()["state"] == "done")

    until(lambda: is_done(chained) and is_done(again), "nothing follows")
    assert len(recorded()) == 6, "a callback has none itself"
    assert no_warning is None
    assert warning is not None
    assert warning.startswith("nowhere.invalid: ")
    assert "X-Callback-Warning" in ended.headers, "only functions are here by that name"
    for call in (lost, ended.headers["x-call-id"]):
        assert platform.http.delete(f"/async-function/{call}").status_code == 202
