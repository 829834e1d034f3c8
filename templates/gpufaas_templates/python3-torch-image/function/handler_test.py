"""Run with: pytest handler_test.py"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))
if "handler" in sys.modules:  # that of another function, whose tests are in this run
    del sys.modules["handler"]

import handler

CONTEXT = SimpleNamespace(hostname="test", call_id="1", function="test", device="cpu")


def test_scores_are_probabilities_for_any_input():
    model = handler.load("cpu")

    for body in (b"", b"hello", bytes(range(256))):
        answer = handler.handle(model, SimpleNamespace(body=body), CONTEXT)

        assert answer["bytes"] == len(body)
        assert abs(sum(answer["scores"]) - 1) < 1e-4
