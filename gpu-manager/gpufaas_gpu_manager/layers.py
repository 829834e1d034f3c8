"""
The layers of a node: which functions have a fork server with their imports, so that workers begin with these.

Of a function whose imports took long, a worker says what it has imported (`functions/imports.py`); the next start makes
a layer with that. A layer belongs to one function: to its later revisions, too, as long as they find the same modules
in the same environment. Layers have a part of the host tier, in which the one worth least makes room: the seconds that
it saves, times its recent starts, for each byte. Without a layer a worker is forked as any other, and imports itself.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import Bytes, FunctionId, Seconds
from gpufaas_core.units import GiB, MiB
from gpufaas_core.wire.heads import Imported
from gpufaas_functions.imports import LONG_S
from gpufaas_functions.runner import WorkerStart
from gpufaas_gpu_manager.forks import ForkServer
from gpufaas_gpu_manager.isolation.walls import Own
from gpufaas_gpu_manager.launch.layer import Layer
from gpufaas_gpu_manager.launch.recipes import Recipes
from gpufaas_gpu_manager.machine_memory import available_memory
from gpufaas_gpu_manager.worker import Worker

NONE: Final = ("none",)
"""``gpufaas.preload`` of a function that has no layer."""
MOST: Final = 4
"""Layers of a node without a host tier, all of functions that name modules to preload."""
_AGAIN_S: Final[Seconds] = 60.0
"""A layer that could not be made is not tried again for so long."""
_TIMES: Final = 3
"""How often workers may say that there is more to import. Beyond that, their imports differ each time."""
_HALF_LIFE_S: Final[Seconds] = 600.0


class Key(NamedTuple):
    """What workers have in common that can be forked from one layer."""

    function: str
    """With its namespace, without the revision."""
    site: str
    """The directory with its requirements."""
    preload: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    device: tuple[tuple[str, str], ...]
    """The environment of a GPU."""
    own: Own


class _Known:
    """What is known of the imports of workers with one key, and their layer."""

    def __init__(self) -> None:
        self.imported = Imported(0.0, [], {})
        self.told = 0
        self.fault, self.until = "", 0.0
        self.functions: set[FunctionId] = set()
        self.layer: Layer | None = None
        self.making: asyncio.Task[Layer | str] | None = None
        """Makes the layer, or says why there can be none."""
        self._score, self._scored_at = 0.0, 0.0

    @property
    def score(self) -> float:
        """How many starts there were: each counts half after `_HALF_LIFE_S`."""
        return self._score * math.pow(0.5, (time.monotonic() - self._scored_at) / _HALF_LIFE_S)

    def asked(self, function: FunctionId) -> None:
        self.functions.add(function)
        self._score, self._scored_at = self.score + 1.0, time.monotonic()


class Layers:
    """See module."""

    def __init__(
        self, base: ForkServer, recipes: Recipes, make: Callable[..., Worker], on_said: Callable[[str], None]
    ) -> None:
        """:param make: makes the worker that a layer is (`Supervisor.make`)"""
        self._base = base
        self._recipes = recipes
        self._make_worker = make
        self._cache = recipes.host_cache
        self._on_said = on_said
        self._known: dict[Key, _Known] = {}
        self._keys: WeakKeyDictionary[Worker, Key] = WeakKeyDictionary()
        self._living: list[Layer] = []

    # --- for starts ---

    async def claim(self, worker: Worker, start: WorkerStart) -> Layer | None:
        """
        Return the layer that forks *worker*; None: the fork server does. The caller must `release` the layer when it
        has asked for the worker.

        :raises InvalidSpec: *worker* checks a function whose modules cannot be preloaded
        """
        spec, key = worker.spec, self._key(worker, start)
        self._keys[worker] = key
        if spec.own_process or spec.preload == NONE or (worker.device.source.emulation and not worker.checks):
            return None
        known = self._known.get(key) or (self._known.setdefault(key, _Known()) if spec.preload else None)
        if known is None:
            return None
        known.asked(spec.function)
        if worker.checks:
            known.until = 0.0  # somebody may have installed them just now
        found = await self._find(key, known, worker)
        if isinstance(found, Layer) and found.said is not None:
            found.claims += 1
            clash = await asyncio.to_thread(_clash, found.said.packages, start.bundle)
            if not clash:
                return found
            self.release(found)
            found = clash
        if spec.preload:
            if worker.checks and isinstance(found, str):
                raise InvalidSpec(f"annotation gpufaas.preload of {spec.name}: {found}: name other modules, or none")
            self._on_said(f"a worker of {key.function} imports {', '.join(spec.preload)} itself: {found}")
        return None

    def release(self, layer: Layer) -> None:
        layer.claims -= 1
        self.sweep()

    def learn(self, worker: Worker, imported: Imported) -> None:
        """*worker* has imported that itself, which took long."""
        known = self._known.setdefault(self._keys[worker], _Known())
        known.functions.add(worker.spec.function)
        have = set(known.imported.modules)
        more = [name for name in imported.modules if name not in have]
        if more and known.told < _TIMES:
            known.told += 1
            known.fault = ""
            env = {**known.imported.env, **imported.env}
            known.imported = Imported(imported.seconds, [*known.imported.modules, *more], env)
            self._retire(known)

    def has_for(self, spec: WorkerSpec) -> bool:
        """Whether a worker of *spec* will probably be forked from a layer."""
        name = f"{spec.name}.{spec.namespace}"
        return any(key.function == name and (each.making or each.layer) for key, each in self._known.items())

    # --- for people ---

    def all(self) -> list[Layer]:
        return [each for each in self._living if each.serves]

    def memory(self) -> Bytes:
        return sum(each.said.memory for each in self.all() if each.said is not None)

    # --- when they end ---

    def sweep(self) -> None:
        """Retire those of an earlier fork server, and those with many files; end what is retired and has no workers."""
        for known in self._known.values():
            if (layer := known.layer) and (layer.base != self._base.pid or layer.worn):
                known.layer = None
        current = {each.layer for each in self._known.values()}
        for each in self.all():
            if each not in current and each.idle:
                self._give_back(each)
                each.kill()

    def keep(self, wanted: Collection[FunctionId]) -> None:
        """Forget what no function needs any more."""
        for key, known in list(self._known.items()):
            known.functions.intersection_update(wanted)
            if not known.functions:
                del self._known[key]
        self.sweep()

    def _retire(self, known: _Known) -> None:
        """Take no new workers from the layer of *known*, if there is one; it ends with those that it has."""
        if known.layer is not None:
            known.layer = None
            self.sweep()

    def _over(self, layer: Layer) -> None:
        self._living.remove(layer)
        self._give_back(layer)
        self._spare()
        for known in self._known.values():
            if known.layer is layer:
                known.layer = None

    def _give_back(self, layer: Layer) -> None:
        self._cache.parked.set_aside(-layer.charged)
        layer.charged, layer.serves = 0, False

    def _spare(self) -> None:
        self._recipes.enforcement.stand_by(self, [each.worker.pid for each in self._living if each.worker.pid])

    async def close(self) -> None:
        making = [each.making for each in self._known.values() if each.making is not None]
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        for each in self._living:
            each.kill()

    # --- making them ---

    def _key(self, worker: Worker, start: WorkerStart) -> Key:
        spec, own, settings = worker.spec, worker.own, self._recipes.settings
        site = os.path.join(start.bundle, "site")
        place = os.path.realpath(site) if os.path.isdir(site) else ""
        if own != Own() and settings.scratch is None:
            place = start.bundle  # another one cannot be shown
        read = tuple(each for each in own.read if each != start.bundle)
        return Key(
            f"{spec.name}.{spec.namespace}", place, spec.preload, tuple(sorted(spec.env.items())),
            tuple(sorted(worker.device.source.env.items())), replace(own, read=read, write=(), scratch="", room=0),
        )  # fmt: skip

    async def _find(self, key: Key, known: _Known, worker: Worker) -> Layer | str:
        if known.fault and (time.monotonic() < known.until or not key.preload):
            return known.fault
        self.sweep()
        if known.layer is not None:
            return known.layer
        if known.making is None:
            if not key.preload and (not self._cache.status().budget or available_memory() < GiB):
                return "this node has no host memory for it"
            known.making = asyncio.ensure_future(self._make(key, known, worker))
        return await asyncio.shield(known.making)

    async def _make(self, key: Key, known: _Known, asks: Worker) -> Layer | str:
        """:param asks: the first worker that it forks"""
        recipes, source = self._recipes, asks.device.source
        await self._base.ready()
        # A watcher would count the workers that are forked from it, too.
        memory = source.device.memory if source.enforced and recipes.enforcement.has_groups else 0
        worker = self._make_worker(asks.device, asks.spec, memory, checks=True)
        layer = Layer(worker, recipes, self._base, known.imported, self._over)
        worker.run = layer
        self._living.append(layer)
        worker.begin()
        try:
            async with asyncio.timeout(recipes.settings.check_timeout_s):
                end = await asyncio.shield(worker.checked)
                fault = end.summary if end is not None else ""
        except TimeoutError:
            fault = f"they were not imported within {recipes.settings.check_timeout_s:g} s"
        self._spare()
        known.making = None
        if fault := fault or self._fault(key, known, layer):
            layer.kill()
            known.fault, known.until = fault, time.monotonic() + _AGAIN_S
            return fault
        layer.serves, known.layer = True, layer
        return layer

    def _fault(self, key: Key, known: _Known, layer: Layer) -> str:
        """Return why *layer*, which has imported, cannot stay; empty: it can, and is charged."""
        said = layer.said
        if said is None:
            return "the process that imports them ended"
        if said.fault:
            return said.fault
        if not key.preload and said.seconds < LONG_S:
            return f"they are imported within {LONG_S} s"
        while not self._charge(layer, said.memory):
            idle = [each for each in self._known.values() if each.layer is not None and each.layer.idle]
            least = min(idle, key=lambda each: _worth(each, each.layer), default=None)
            if least is None or _worth(least, least.layer) >= _worth(known, layer):
                return "this node has no room for it beside others, which are in use, or worth more"
            self._retire(least)
        return ""

    def _charge(self, layer: Layer, size: Bytes) -> bool:
        if not self._cache.status().budget:
            return len(self.all()) < MOST
        if not self._cache.parked.set_aside(size):
            return False
        layer.charged = size
        return True


def _worth(known: _Known, layer: Layer | None) -> float:
    """Return the seconds that *layer* saves, times its recent starts, for each byte."""
    return known.score * layer.said.seconds / max(layer.said.memory, MiB) if layer and layer.said else 0.0


def _clash(packages: Collection[str], bundle: str) -> str:
    """Return why a worker of *bundle* cannot begin with *packages* imported; empty: it can."""
    folder = Path(bundle) / "function"
    own = {each.name.partition(".")[0] for each in folder.iterdir()} if folder.is_dir() else set()
    both = sorted(own.intersection(packages))
    return f"the function has its own {', '.join(both[:5])}" if both else ""
