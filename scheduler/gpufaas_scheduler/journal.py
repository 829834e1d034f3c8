"""
The journal: the events of an engine, to replay its decisions later.

JSON lines. The first is the `Header`, from which an equal engine is made; all others are ``[now, event]``. Commands are
not written: the same events give the same commands, which `replay` returns.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.json_errors import UNREADABLE
from gpufaas_core.messages import Command, Event
from gpufaas_core.model import Seconds
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import DEFAULT_POLICY, PolicySpec, make_policy

VERSION = 5
"""The version of the events and of the header. The events of 1 to 3 know no grants, and give other commands now. Those
of 4 say nothing of host tiers."""

READABLE = (4, 5)
"""The events of these versions still give the same commands."""


class Header(Struct, frozen=True):
    """The arguments of an engine."""

    policy: PolicySpec = PolicySpec(DEFAULT_POLICY)
    epoch: int = 1
    max_queue: int = 10_000
    learn: bool = True
    version: int = VERSION

    def engine(self) -> Engine:
        """:raises InvalidSpec: see `make_policy`"""
        policy = make_policy(self.policy)
        return Engine(
            policy=policy, replacement=policy.replacement, epoch=self.epoch, max_queue=self.max_queue, learn=self.learn
        )


class Journal:
    """Appends to a new file. `flush`, `close` and every 64 KiB write the lines to it."""

    def __init__(self, path: Path, header: Header) -> None:
        self._encoder = msgspec.json.Encoder()
        self._file = path.open("xb", buffering=1 << 16)
        self._file.write(self._encoder.encode(header) + b"\n")

    def append(self, event: Event, now: Seconds) -> None:
        """Call this before the engine is told, so that the journal has an event that crashes the engine."""
        self._file.write(self._encoder.encode((now, event)) + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> tuple[Header, Iterator[tuple[Event, Seconds]]]:
    """
    Return the header of a journal and its events in order. A last line that a crash has cut is left out.

    :raises InvalidSpec: it is no journal, or of another version
    """
    with path.open("rb") as file:
        first = file.readline()
    try:
        version = msgspec.json.decode(first, type=dict[str, Any]).get("version", VERSION)
        if version not in READABLE:
            raise InvalidSpec(
                f"{path} is a journal of version {version}, this program reads version {VERSION}: replay it with the "
                "release that wrote it"
            )
        header = msgspec.json.decode(first, type=Header)
    except UNREADABLE as exc:
        raise InvalidSpec(f"{path}:1: this is no journal: name a file of 'gpufaas serve --journal'") from exc

    def events() -> Iterator[tuple[Event, Seconds]]:
        decoder = msgspec.json.Decoder(tuple[float, Event])
        with path.open("rb") as file:
            file.readline()
            for line in file:
                if line.endswith(b"\n"):
                    now, event = decoder.decode(line)
                    yield event, now

    return header, events()


def replay(path: Path) -> Iterator[tuple[Event, list[Command]]]:
    """
    Tell a new engine the events of a journal, and yield each event with its commands.

    :raises InvalidSpec: it is no journal, or its policy is not installed here
    """
    header, events = read(path)
    engine = header.engine()
    for event, now in events:
        yield event, engine.handle(event, now)
