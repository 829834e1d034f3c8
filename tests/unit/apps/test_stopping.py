"""How the platform in one process ends: from the outside in, also when something beside the server fails."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufaas_apps.data_directory import owned
from gpufaas_apps.options import ServeOptions
from gpufaas_apps.process import listen
from gpufaas_apps.serve import composed


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A server takes the signals of its process, and keeps them."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.slow
async def test_a_task_beside_the_server_that_fails_ends_the_platform_from_the_outside_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the watch on its devices, a platform would look healthy."""
    options = ServeOptions(data=tmp_path, devices=("cpu:0=64MiB",), functions="process", memory_enforcement="rlimit")
    with owned(tmp_path) as spool, listen("127.0.0.1", 0, "--port") as listening:
        app = composed(options, None, spool)
        closed: list[tuple[str, bool]] = []

        def note(name: str, part: Any) -> None:
            """Have it noted when *part* is closed, and whether the port was open then."""
            close = part.close
            monkeypatch.setattr(part, "close", lambda: (closed.append((name, is_open())), close())[1])

        def is_open() -> bool:
            return any(each.is_serving() for each in app._front.server.servers)

        note("functions", app._stores.functions)
        note("logs", app._stores.logs)
        note("workers", app._node)

        async def fail(_: object) -> None:
            raise RuntimeError("the driver is gone")

        monkeypatch.setattr(app._node, "watch_devices", fail)

        with pytest.raises(RuntimeError, match="the driver is gone"):
            await app.run(listening, contextlib.nullcontext())

        assert closed == [("workers", False), ("logs", False), ("functions", False)]
