"""Builds the examples as ``gpufaas build`` does, from stack.yaml, and imports their handlers from what was built."""

import asyncio
import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpufaas_cli.bundles import BuildRequest, build
from gpufaas_functions.author import Context, Event, piece_of, to_answer
from gpufaas_functions.batches import BatchHandler
from gpufaas_functions.coroutines import called, is_async

EXAMPLES = Path(__file__).parent


@pytest.fixture(scope="session")
def stack() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "stack.yaml").read_text())


class Deployed:
    """One example, built and loaded as a worker would."""

    def __init__(self, handler: Any, kind: str) -> None:
        self.handler = handler
        self.folder = Path(handler.__file__).parent
        self.model = handler.load("cpu") if kind == "model" else None

    def call(self, body: Any = b"", query: str = "") -> Any:
        """Return (status, answer): the answer's JSON, or its pieces as a list when it is streamed."""
        if is_async(self.handler.handle):
            return asyncio.run(self.answer(body, query))
        answer = to_answer(self._handle(*_call(body, query)))
        if answer.chunks is not None:
            return answer.status, list(answer.chunks)
        return answer.status, json.loads(answer.body or b"null")

    async def answer(self, body: Any = b"", query: str = "") -> Any:
        """The same for an async handler."""
        answer, pieces = await called(self._handle, *_call(body, query))
        if pieces is not None:
            return answer.status, [piece_of(each) async for each in pieces]
        return answer.status, json.loads(answer.body or b"null")

    def call_together(self, *bodies: Any) -> list[Any]:
        """Return what `call` does, of each of several calls that run in one batch."""
        events, contexts = zip(*(_call(each, "") for each in bodies), strict=True)
        together = BatchHandler(partial(self.handler.handle_batch, self.model))
        found = {place: each for some in together.run(events, contexts) for place, each in some.items()}
        return [(found[place].status, json.loads(found[place].body)) for place in range(len(bodies))]

    def _handle(self, event: Event, context: Context) -> Any:
        return self.handler.handle(*([] if self.model is None else [self.model]), event, context)


def _call(body: Any, query: str) -> tuple[Event, Context]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Event("POST", "/", query.encode(), [], raw), Context("1", "example", "cpu")


@pytest.fixture(scope="session")
def deployed(stack: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Deployed]:
    """Build and load one example of stack.yaml, once per session."""
    root = tmp_path_factory.mktemp("build")
    made: dict[str, Deployed] = {}

    def deploy(name: str) -> Deployed:
        if name not in made:
            definition = stack["functions"][name]
            copies = [Path(each) for each in stack["configuration"]["copy"]]
            request = BuildRequest(
                name, definition["lang"], Path(definition["handler"]), copy=copies, build_root=root, root=EXAMPLES
            )
            built = build(request)
            made[name] = Deployed(import_handler(root / name / "function"), built.manifest.kind)
        return made[name]

    return deploy


def import_handler(folder: Path) -> Any:
    """Import handler.py as a worker does, and forget it: in a worker it is the only one of that name."""
    sys.modules.pop("handler", None)  # of a function whose own tests are in this run
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("handler")
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
