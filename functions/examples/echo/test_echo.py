from typing import Any

import pytest


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, "ü"]}, {"body": "x"}, [], "text", None, 0, False])
def test_what_was_sent_comes_back(deployed: Any, value: Any) -> None:
    assert deployed("echo").call(value) == (200, value)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff"])
def test_what_is_no_json_is_refused(deployed: Any, body: bytes) -> None:
    status, answer = deployed("echo").call(body)

    assert status == 400
    assert "not JSON" in answer["error"]
