"""
What a stranger sends, or a function answers, concerns nobody else. A body that was no UTF-8 failed all calls of its
batch. An answer with ``Transfer-Encoding`` in upper case ended early for a connection that callers share, and the next
caller read what a function had made up.
"""

import contextlib
import http.client

from tests.integration.conftest import HTTP, Platform
from tests.waiting import LIMIT_S

READS = """
    def load(device):
        return None

    def one(event):
        return event.json()["text"] if event.path == "/json" else event.text

    def handle(model, event, context):
        return one(event)
"""
READS_ASYNC = """
    async def handle(event, context):
        return event.json()["text"] if event.path == "/json" else event.text
"""


def test_a_body_that_cannot_be_read_is_its_callers_fault_and_not_the_handlers(platform: Platform) -> None:
    latin_1 = b'{"text":"caf\xe9"}'
    for path in (platform.deploy("reads", READS), platform.deploy("reads-async", READS_ASYNC, HTTP)):
        for kind in ("/json", "/text"):
            bad = platform.call(path + kind, latin_1)
            unknown = platform.call(path + kind, latin_1, headers={"content-type": "text/plain; charset=klingon"})
            assert (bad.status_code, unknown.status_code) == (400, 415)
            assert "can't decode byte 0xe9" in bad.text
            assert "send the body in UTF-8" in unknown.text
        named = platform.call(path + "/json", latin_1, headers={"content-type": "application/json; charset=latin-1"})
        assert named.text == "café"
    assert "Traceback" not in platform.log("reads") + platform.log("reads-async")


SPLITS = """
    import gpufaas_functions.author as author

    author._header = author._known_header = lambda name, value: (name.encode(), value.encode())
    SECOND = "HTTP/1.1 200 OK\\r\\ncontent-length: 4\\r\\n\\r\\nevil"

    def handle(event, context):
        body = "0\\r\\n\\r\\n" + SECOND if event.query["name"].lower().startswith("transfer") else SECOND
        headers = {event.query["name"]: event.query["value"]}
        return {"body": iter([body, SECOND]) if event.path == "/stream" else body, "headers": headers}
"""


def test_no_header_of_a_function_splits_the_connection_that_its_callers_share(platform: Platform) -> None:
    path = platform.deploy("splits", SPLITS, HTTP)
    honest = platform.deploy("honest", "def handle(event, context):\n    return 'honest'", HTTP)
    connection = http.client.HTTPConnection("127.0.0.1", platform.port, timeout=LIMIT_S)

    def get(path: str) -> tuple[int, bytes]:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()

    with contextlib.closing(connection):
        assert get(honest) == (200, b"honest")
        shared = connection.sock
        for name, value, status in (
            ("Transfer-Encoding", "chunked", 502),
            ("tRANSFER-eNCODING", "chunked", 502),
            ("transfer-encoding", "chunked", 200),
            ("Content-Length", "0", 502),
            ("Connection", "close", 502),
            ("connection", "close", 200),
            ("keep-alive", "timeout=0", 200),
            ("x-a", "b%0Bc", 502),
        ):
            for way in ("", "/stream"):
                found, body = get(f"{path}{way}?name={name}&value={value}")
                assert (found, b"evil" in body) == (status, status == 200), (name, way)
                assert get(honest) == (200, b"honest"), (name, way)
        assert get(f"{path}?name=content-length&value=0")[1].endswith(b"evil")
        assert get(honest) == (200, b"honest")
        assert connection.sock is shared, "no answer has closed it"
