"""
The provider ``local``: nodes are processes on this machine, one ``gpufaas node`` for each order.

The options of an offer are options of that command. Each node has a directory, and there: ``lock``, which its processes
hold as long as they live; ``since`` and ``until``, when it began and ended; ``pid``; ``log``. A shell outlives the
leader that started it, and writes these.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpufaas_core._types import Seconds
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.model import NodeId, OrderId
from gpufaas_core.orders import NodeOffer
from gpufaas_core.units import format_bytes
from gpufaas_providers.ports import Held, Joining

_DETACHED: Final = 'echo $$ > group; sh -c "$@" &'
_SHELL: Final = """
trap 'stop=1; kill -TERM $child 2>/dev/null' TERM
echo $$ > pid
date +%s.%N > since
sleep "$0" & child=$!; wait $child
if [ -z "$stop" ]; then
    "$@" & child=$!
    [ -z "$stop" ] || kill -TERM $child
    while kill -0 $child 2>/dev/null; do wait $child; done
fi
date +%s.%N > until
"""
_STOP_S: Final[Seconds] = 20.0
"""A node that was told to stop ends within 10 s; after so long it is killed."""
_KEPT_S: Final[Seconds] = 3600.0
"""How long the directory of a node that has ended is kept."""


class LocalProvider:
    """See module; `ports.Provider`."""

    def __init__(self, joining: Joining) -> None:
        self._joining = joining
        self._root = joining.data / "local"

    async def start(self, order: OrderId, offer: NodeOffer) -> Held:
        return await asyncio.to_thread(self._start, order, offer)

    async def stop(self, node: NodeId) -> None:
        await asyncio.to_thread(self._stop, node)

    async def list(self) -> Sequence[Held]:
        return await asyncio.to_thread(self._list)

    def _start(self, order: OrderId, offer: NodeOffer) -> Held:
        node = NodeId(f"local-{order}")
        given = [each for number in range(offer.devices) for each in ("--device", _device(number, offer))]
        for name, value in offer.options.items():
            given += [f"--{name}", value]
        home = self._root / node
        home.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, "-P", "-m", "gpufaas_cli", "node", "--id", node, "--order", order, "--listen",
            "127.0.0.1:0", "--status-port", "0", "--data", str(home / "data"), *self._joining.arguments, *given,
        ]  # fmt: skip
        with (home / "lock").open("a") as lock, (home / "log").open("ab") as log:
            if not (home / "since").exists() and _taken(lock.fileno()):
                subprocess.run(
                    ["sh", "-c", _DETACHED, "sh", _SHELL, f"{offer.start_s:g}", *command], cwd=home, check=True,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(lock.fileno(),), start_new_session=True,
                )  # fmt: skip
        for _ in range(500):
            if (held := _held(home)) is not None:
                return held
            time.sleep(0.01)  # the shell writes it at once
        raise GpufaasError(f"{home} has no file since after 5 s: see {home / 'log'}")

    def _list(self) -> Sequence[Held]:
        found: list[Held] = []
        for home in sorted(self._root.glob("local-*")):
            held = _held(home)
            if held is not None and held.until and held.until < time.time() - _KEPT_S:
                shutil.rmtree(home, ignore_errors=True)
            elif held is not None:
                found.append(held)
        return found

    def _stop(self, node: str) -> None:
        """Ask the node to end; kill it if it does not."""
        home = self._root / node
        if not home.is_dir():
            return
        for tell, file, sign in ((os.kill, "pid", signal.SIGTERM), (os.killpg, "group", signal.SIGKILL)):
            pid, give_up = _read(home / file), time.monotonic() + _STOP_S
            if pid is not None and _lives(home):
                with contextlib.suppress(ProcessLookupError):
                    tell(int(pid), sign)
            while _lives(home):
                if time.monotonic() > give_up:
                    break
                time.sleep(0.02)
            else:
                return


def _device(number: int, offer: NodeOffer) -> str:
    kind, _, cores = offer.kind.partition("-")
    if kind != "cpu":
        raise InvalidSpec(f"local nodes have CPU devices, of kind cpu or cpu-CORES, and none of kind {offer.kind}")
    return f"cpu:{number}={format_bytes(offer.memory).replace(' ', '')}{f',cores={cores}' if cores else ''}"


def _taken(lock: int) -> bool:
    """Take the lock for what inherits it; False: the node of this directory lives."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _held(home: Path) -> Held | None:
    """Return the node of a directory; None: it has not begun."""
    since = _read(home / "since")
    if since is None:
        return None
    until = _read(home / "until")
    if until is None and not _lives(home):
        until = _read(home / "until") or time.time()  # its shell was killed
        (home / "until").write_text(f"{until}\n")
    return Held(NodeId(home.name), OrderId(home.name.removeprefix("local-")), since, until or 0.0)


def _read(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # it is not there, or half written
        return None


def _lives(home: Path) -> bool:
    with (home / "lock").open("a") as lock:
        return not _taken(lock.fileno())
