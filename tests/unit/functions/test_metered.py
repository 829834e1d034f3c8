"""What a worker measures of a batch while a profile is taken."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufaas_core.taken import Measured
from gpufaas_functions.author import BadBody, Context, Event
from gpufaas_functions.batches import BatchHandler
from gpufaas_functions.memory import CpuMemory
from gpufaas_functions.metered import metered

CONTEXT = Context("call", "f", "cpu")


class Model:
    """Notes the bodies of each batch."""

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []

    def handle(self, event: Event, _: Context) -> Any:
        self.seen.append([event.json()])
        return (piece for piece in "ab")

    def handle_batch(self, events: Sequence[Event], _: Sequence[Context]) -> list[Any]:
        self.seen.append([each.json() for each in events])
        return [each.json() for each in events]


def event(asked: str, body: bytes = b"") -> Event:
    return Event("POST", "/", b"", [(b"x-gpufaas-profile", asked.encode())], body)


def measured(handle: Callable[..., Any], of: Event) -> Measured:
    found = handle(of, CONTEXT)
    return msgspec.json.decode(found["body"], type=Measured)


def test_a_call_runs_a_batch_of_equal_calls_with_the_sample_of_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "function").mkdir()
    (tmp_path / "function" / "sample.json").write_text('{"n": 1}')
    model = Model()
    run = metered(model.handle, BatchHandler(model.handle_batch), CpuMemory(), str(tmp_path), model)

    one, three, last = (measured(run, event(asked)) for asked in ("1", "3", "1 peak"))
    measured(run, event("2", b'{"n": 2}'))

    assert model.seen == [[{"n": 1}], [{"n": 1}] * 3, [{"n": 1}], [{"n": 2}] * 2]
    assert all(each.wall_s > 0 and each.cores > 0 and each.uses is None for each in (one, three))
    assert (one.peak, three.peak) == (0, 0)
    assert last.peak > 0


def test_an_input_that_is_not_there_or_not_taken_is_said(tmp_path: Path) -> None:
    run = metered(lambda *_: {"statusCode": 422, "body": "no image"}, None, CpuMemory(), str(tmp_path), None)

    with pytest.raises(BadBody, match="there is no sample input"):
        run(event("1"), CONTEXT)
    with pytest.raises(BadBody, match="answers this input with 422: no image"):
        run(event("1", b"x"), CONTEXT)


def test_a_batch_fails_as_the_function_does(tmp_path: Path) -> None:
    together = BatchHandler(lambda events, _: [ValueError("no"), *events[1:]])
    run = metered(lambda *_: "", together, CpuMemory(), str(tmp_path), None)

    with pytest.raises(ValueError, match="no"):
        run(event("2", b"x"), CONTEXT)


def test_an_async_handler_is_measured_too(tmp_path: Path) -> None:
    async def handle(event: Event, _: Context) -> Any:
        await asyncio.sleep(0)
        return event.text

    async def streams(*_: Any) -> Any:
        async def pieces() -> Any:
            yield "a"

        return pieces()

    for each in (handle, streams):
        run = metered(each, None, CpuMemory(), str(tmp_path), None)
        found = msgspec.json.decode(asyncio.run(run(event("1 peak", b"x"), CONTEXT))["body"], type=Measured)
        assert found.wall_s > 0
        assert found.peak > 0
