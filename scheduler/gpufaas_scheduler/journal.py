"""
The journal: the events of an engine, to replay its decisions later.

JSON lines. The first is the `Header`, from which an equal engine is made; all others are ``[now, event]``. Commands are
not written: the same events give the same commands, which `replay` returns.
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec
from msgspec import Struct

from gpufaas_cache_manager.replacement import make_replacement
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.messages import Command, Event
from gpufaas_core.model import Seconds
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import DEFAULT_O3_LIMIT, DEFAULT_POLICY, DEFAULT_WAIT_BOUND_S, make_policy

VERSION = 3
"""
1: a device held one copy of a function. Its events can be read, but give other commands now.
2: devices joined empty, and there was no takeover. A reader of 2 would ignore a node's snapshot.
"""

READABLE = (2, 3)
"""The events of these versions still give the same commands."""


class Header(Struct, frozen=True):
    """The arguments of an engine."""

    policy: str = DEFAULT_POLICY
    o3_limit: int = DEFAULT_O3_LIMIT
    replacement: str = "lru"
    wait_bound_s: Seconds = DEFAULT_WAIT_BOUND_S
    epoch: int = 1
    max_queue: int = 10_000
    learn: bool = True
    version: int = VERSION

    def engine(self) -> Engine:
        """:raises InvalidSpec: no such policy or replacement order"""
        return Engine(
            policy=make_policy(self.policy, o3_limit=self.o3_limit, wait_bound_s=self.wait_bound_s),
            replacement=make_replacement(self.replacement),
            epoch=self.epoch,
            max_queue=self.max_queue,
            learn=self.learn,
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

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read(path: Path) -> tuple[Header, Iterator[tuple[Event, Seconds]]]:
    """
    Return the header of a journal and its events in order. A last line that a crash has cut is left out.

    :raises InvalidSpec: it is no journal, or of another version
    """
    file = path.open("rb")
    try:
        header = msgspec.json.decode(file.readline(), type=Header)
    except msgspec.DecodeError as exc:
        file.close()
        raise InvalidSpec(f"{path} is not a journal: its first line is no header ({exc})") from exc
    if header.version not in READABLE:
        file.close()
        raise InvalidSpec(
            f"{path} is a journal of version {header.version}, this program reads {READABLE[0]} to {VERSION}: "
            "replay it with the release that wrote it"
        )

    def events() -> Iterator[tuple[Event, Seconds]]:
        decoder = msgspec.json.Decoder(tuple[float, Event])
        with file:
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
