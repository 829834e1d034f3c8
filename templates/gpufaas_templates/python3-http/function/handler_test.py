"""Run with: pytest handler_test.py"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))
if "handler" in sys.modules:  # that of another function, whose tests are in this run
    del sys.modules["handler"]

import handler


def test_any_input_is_answered():
    for body in (b"", b"hello"):
        answer = handler.handle(SimpleNamespace(body=body), SimpleNamespace(hostname="test"))

        assert answer["statusCode"] == 200
        assert answer["body"]["bytes"] == len(body)
