"""
The right answers, from a plain process: the same handlers and weights, without the platform.

    python -m demo.reference BUILD_FOLDER < inputs.json > answers.json

Inputs are ``{"function": [body, ...]}``, bodies as text; answers are ``{"function": [answer, ...]}``.
"""

import importlib
import json
import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpufaas_functions.author import Event, to_answer


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    asked = json.load(sys.stdin).items()
    # A child per function: each has a module called handler, and its memory ends with it.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        answers = {name: pool.apply(answer, (root / name / "function", bodies)) for name, bodies in asked}
    json.dump(answers, sys.stdout)


def answer(folder: Path, bodies: list[str]) -> list[Any]:
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(folder.parent / "site")]
    handler = importlib.import_module("handler")
    context = SimpleNamespace(device="cpu", function="", call_id="", hostname="")
    model = handler.load("cpu") if hasattr(handler, "load") else None
    results = []
    for body in bodies:
        event = Event("POST", "/", b"", [], body.encode())
        returned = handler.handle(event, context) if model is None else handler.handle(model, event, context)
        body_of_answer = to_answer(returned).body
        assert body_of_answer is not None, "the examples of the demo do not stream"
        results.append(json.loads(body_of_answer))
    return results


if __name__ == "__main__":
    main()
