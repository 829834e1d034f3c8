"""
Layers: fork servers with more modules imported, so that what functions name in ``gpufaas.preload`` is imported once.

A layer is forked from the fork server, and imports modules that are installed beside the platform; nothing of a bundle,
so that it belongs to no tenant. It has standbys of its own. A node has a few of them: a new one takes the place of the
one that was used longest ago and has no workers. Without a layer, a worker is forked as any other and imports itself.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Protocol

from gpufaas_core.model import Bytes, Seconds
from gpufaas_gpu_manager import zygote
from gpufaas_gpu_manager.forks import Child, LayerServer, Zygote
from gpufaas_gpu_manager.standbys import Standbys

MOST: Final = 4
"""Layers of a node. Each holds what its modules hold: of transformers, some 100 MiB."""
_AGAIN_S: Final[Seconds] = 60.0
"""A layer that could not be made is not tried again for so long."""

Modules = tuple[str, ...]


class ForkServer:
    """A fork server, and its standbys."""

    def __init__(self, zygote: Zygote, standbys: Standbys) -> None:
        self.zygote = zygote
        self.standbys = standbys


class Layer(ForkServer):
    """`packages`: what it has imported beyond its base, the fork server with process `base`."""

    def __init__(self, server: LayerServer, standbys: Standbys, base: int | None) -> None:
        super().__init__(server, standbys)
        self.base = base
        self.packages: frozenset[str] = frozenset()
        self.memory: Bytes = 0
        """What its modules hold."""
        self.claims = 0
        """Starts that are about to ask it for a worker."""
        self.used_at = time.monotonic()

    @property
    def idle(self) -> bool:
        return not self.claims and not self.zygote.busy


class Host(Protocol):
    """Makes pools, and is told of processes."""

    def standbys_of(self, forks: Zygote) -> Standbys: ...

    def next_number(self) -> int: ...

    def on_forked(self, number: int, pid: int, standbys: Standbys) -> None: ...

    def on_exited(self, number: int, status: int, standbys: Standbys) -> None: ...


class Layers:
    """See module."""

    def __init__(
        self, base: ForkServer, host: Host, spare: Callable[[object, Collection[int]], None],
        on_said: Callable[[str], None], import_s: Seconds, most: int = MOST,
    ) -> None:  # fmt: skip
        """
        :param spare: `Enforcement.stand_by`
        :param import_s: so long may the import of a layer's modules take
        """
        self.base = base
        self._host = host
        self._spare = spare
        self._on_said = on_said
        self._import_s = import_s
        self._most = most
        self._layers: dict[Modules, asyncio.Task[Layer | str]] = {}
        """Made, or being made; a text says why one cannot be."""
        self._faults: dict[Modules, tuple[str, Seconds]] = {}
        self._retired: list[Layer] = []
        """Not used for new workers, but has some."""
        self._forking: dict[int, asyncio.Future[int]] = {}
        self._pids: dict[int, int] = {}
        self._closing = False

    # --- for starts ---

    async def claim(self, modules: Modules, bundle: str) -> ForkServer:
        """
        Return the fork server for a worker of *bundle*, and `release` it when the worker was asked for.

        It is the base if there can be no layer with *modules*, which is said.
        """
        if not modules:
            return self.base
        found = await self._find(modules)
        if isinstance(found, Layer):
            found.claims += 1
            found.used_at = time.monotonic()
            clash = await asyncio.to_thread(_clash, found.packages, bundle)
            if not clash:
                return found
            self.release(found)
            found = clash
        self._on_said(f"a worker imports {', '.join(modules)} itself: {found}")
        return self.base

    def release(self, server: ForkServer) -> None:
        if isinstance(server, Layer):
            server.claims -= 1
            self.sweep()

    def ready(self, modules: Modules) -> ForkServer:
        """Return the layer with *modules* if there is one now, else the base."""
        task = self._layers.get(modules)
        found = task.result() if task is not None and task.done() and not task.cancelled() else None
        return found if isinstance(found, Layer) else self.base

    async def fault(self, modules: Modules, bundle: str) -> str:
        """Return why *modules* cannot be preloaded for *bundle*; empty: they can, or nobody knows."""
        self._faults.pop(modules, None)  # somebody may have installed them just now
        found = await self._find(modules)
        if isinstance(found, Layer):
            return await asyncio.to_thread(_clash, found.packages, bundle)
        return found if modules in self._faults else ""

    # --- for people ---

    def all(self) -> list[Layer]:
        done = [each.result() for each in self._layers.values() if each.done() and not each.cancelled()]
        return [*(each for each in done if isinstance(each, Layer)), *self._retired]

    # --- when they end ---

    def sweep(self) -> None:
        """Retire those of an earlier fork server, and end the retired ones that have no workers."""
        for each in self.all():
            if each not in self._retired and each.base != self.base.zygote.pid:
                self._retire(each)
        for each in [each for each in self._retired if each.idle]:
            self._retire(each)

    def keep(self, wanted: Collection[Modules]) -> None:
        """Retire those that no function names any more."""
        for modules, task in list(self._layers.items()):
            if modules not in wanted and task.done() and isinstance(layer := task.result(), Layer):
                self._retire(layer)

    # --- processes ---

    def on_forked(self, number: int, pid: int) -> bool:
        """Whether *number* is a layer, whose process is *pid*."""
        forking = self._forking.pop(number, None)
        if forking is None:
            return False
        self._pids[number] = pid
        self._spare(self, list(self._pids.values()))
        if not forking.done():
            forking.set_result(pid)
        return True

    def on_exited(self, number: int) -> bool:
        """As `on_forked`, when it has ended, or could not be forked."""
        forking = self._forking.pop(number, None)
        if forking is not None and not forking.done():
            forking.set_result(0)
        if self._pids.pop(number, None) is not None:
            self._spare(self, list(self._pids.values()))
            return True
        return forking is not None

    async def close(self) -> None:
        self._closing = True
        for task in self._layers.values():
            task.cancel()
        await asyncio.gather(*self._layers.values(), return_exceptions=True)
        for each in self.all():
            each.standbys.close()
            await each.zygote.close()

    # --- making them ---

    async def _find(self, modules: Modules) -> Layer | str:
        why, until = self._faults.get(modules, ("", 0.0))
        if time.monotonic() < until:
            return why
        self.sweep()
        task = self._layers.get(modules)
        if task is None:
            if not self._room():
                return f"this node has {self._most} sets of preloaded modules, and all of them are in use"
            task = self._layers[modules] = asyncio.ensure_future(self._made(modules))
        found = await asyncio.shield(task)
        if isinstance(found, str) and self._layers.get(modules) is task:
            del self._layers[modules]
            self._faults[modules] = found, time.monotonic() + _AGAIN_S
        return found

    def _room(self) -> bool:
        """Make room for one more; False: there is none."""
        if len(self._layers) + len(self._retired) < self._most:
            return True
        idle = [each for each in self.all() if each.idle]
        if idle:
            self._retire(min(idle, key=lambda each: each.used_at))
        return bool(idle)

    def _retire(self, layer: Layer) -> None:
        """Take no new workers from *layer*; end it if it has none."""
        for modules, task in list(self._layers.items()):
            if task.done() and not task.cancelled() and task.result() is layer:
                del self._layers[modules]
                self._retired.append(layer)
        layer.standbys.close()
        if layer.idle and layer in self._retired:
            self._retired.remove(layer)
            asyncio.ensure_future(layer.zygote.close())  # noqa: RUF006 # it waits for nothing

    async def _made(self, modules: Modules) -> Layer | str:
        try:
            return await self._make(modules)
        except OSError as exc:  # too many open files
            return str(exc)

    async def _make(self, modules: Modules) -> Layer | str:
        await self.base.zygote.ready()
        number, base = self._host.next_number(), self.base.zygote.pid
        pid = self._forking[number] = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            await self.base.zygote.fork(zygote.Layer(number, modules), [theirs.fileno()])
        if not await pid:
            ours.close()
            return "the process that imports them could not be forked"
        layer = self._layer(Child(pid.result()), ours, base)
        try:
            async with asyncio.timeout(self._import_s):
                said = await layer.zygote.ready()
            layer.packages, layer.memory = frozenset(said.packages), said.memory
            fault = said.fault
        except TimeoutError:
            os.kill(pid.result(), 9)
            fault = f"they were not imported within {self._import_s:g} s"
        if not fault:
            return layer
        await layer.zygote.close()
        return fault

    def _layer(self, child: Child, control: socket.socket, base: int | None) -> Layer:
        server = LayerServer(
            child, control,
            lambda number, pid: self._host.on_forked(number, pid, standbys),
            lambda number, status: self._host.on_exited(number, status, standbys),
            self._on_said, lambda: self._retire(layer),
        )  # fmt: skip
        standbys = self._host.standbys_of(server)
        layer = Layer(server, standbys, base)
        return layer


def _clash(packages: frozenset[str], bundle: str) -> str:
    """Return why a worker of *bundle* cannot begin with *packages* imported; empty: it can."""
    own = {
        each.name.partition(".")[0]
        for folder in ("function", "site")
        if (Path(bundle) / folder).is_dir()
        for each in (Path(bundle) / folder).iterdir()
    }
    both = sorted(packages & own)
    return f"the function has its own {', '.join(both[:5])}" if both else ""
