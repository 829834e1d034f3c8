"""Which functions have their weights in the host tier of this node: brings them there, and tells the scheduler."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from gpufaas_core.bundle import Manifest, WeightsFile, WorkerSpec
from gpufaas_core.errors import GpufaasError
from gpufaas_core.messages import Event, Staged, Unstaged
from gpufaas_core.model import Bytes, FunctionId, NodeId
from gpufaas_core.snapshot import StagedWeights
from gpufaas_gpu_manager.host_cache import HostCache


class Bundles(Protocol):
    """The installed bundles (gpufaas_cache_manager.bundles)."""

    def install(self, digest: str) -> Path: ...

    def manifest(self, digest: str) -> Manifest: ...

    def compiled(self, digest: str) -> Path:
        """Return the directory with what workers have compiled."""


class Staging:
    """
    See module. Used on the event loop.

    :param fetch: brings what a function needs to this node; None: it is here
    """

    def __init__(
        self, node: NodeId, cache: HostCache, bundles: Bundles, report: Callable[[Event], None],
        fetch: Callable[[WorkerSpec], Awaitable[str]] | None,
    ) -> None:  # fmt: skip
        self.specs: dict[FunctionId, WorkerSpec] = {}
        """The functions that the node knows."""
        self._node = node
        self._cache = cache
        self._bundles = bundles
        self._report = report
        self._fetch = fetch
        self._deployed: set[FunctionId] = set()
        """Those of them that are not removed."""
        self._weights: dict[FunctionId, tuple[WeightsFile, ...]] = {}
        """The weights of the functions of which they are known here."""
        self._before: dict[str, tuple[WeightsFile, ...]] = {}
        """Those of the revision before, by function: a rollback finds them as long as no others are worth more."""
        self._told: dict[FunctionId, Bytes] = {}
        self._tasks: dict[FunctionId, asyncio.Task[None]] = {}
        cache.on_changed = self._changed

    def know(self, spec: WorkerSpec, weights: tuple[WeightsFile, ...]) -> None:
        """*spec* was deployed: its weights may be here for another function, or for its older revision."""
        self._deployed.add(spec.function)
        self._note(spec, weights)

    def _note(self, spec: WorkerSpec, weights: tuple[WeightsFile, ...]) -> None:
        if weights and self._cache.status().budget:
            self._weights[spec.function] = weights
            self._told.pop(spec.function, None)
            self._changed()

    def loaded(self, spec: WorkerSpec) -> None:
        """A worker of *spec* is ready: keep its weights, if they are worth it. Not those of a function that drains."""
        if spec.image or not self._cache.status().budget or spec.function not in self._deployed:
            return
        with contextlib.suppress(GpufaasError, OSError):  # the next load says what is wrong
            manifest = self._bundles.manifest(spec.digest)
            if spec.function not in self._weights:
                self._note(spec, manifest.weights)
            self._cache.asked(manifest.weights, self._bundles.install(spec.digest), time.monotonic())

    def stage(self, function: FunctionId) -> None:
        """Bring the weights of *function* into the host tier, in the background; the scheduler is told how it went."""
        if function not in self._tasks:
            task = self._tasks[function] = asyncio.get_running_loop().create_task(self._stage(function))
            task.add_done_callback(lambda _: self._tasks.pop(function, None))

    def forget(self, function: FunctionId) -> None:
        """*function* is removed: weights that no other one has are dropped, but not for an update."""
        self._deployed.discard(function)
        if self._told.pop(function, None) is not None:
            self._report(Unstaged(self._node, function, "it was removed"))
        gone, name = self._weights.pop(function, ()), function.partition("@")[0]
        before = self._before.pop(name, ())
        if any(each.partition("@")[0] == name for each in self._deployed):
            self._before[name], gone = gone, ()
        self._drop(gone + before)

    def _drop(self, gone: tuple[WeightsFile, ...]) -> None:
        having = (*self._weights.values(), *self._before.values())
        others = {each.sha256 for weights in having for each in weights}
        self._cache.forget([each.sha256 for each in gone if each.sha256 not in others])

    def snapshot(self) -> tuple[StagedWeights, ...]:
        """Return all that is staged, or on its way there."""
        ready = tuple(StagedWeights(function, size) for function, size in self._told.items())
        return ready + tuple(StagedWeights(each, staging=True) for each in self._tasks if each not in self._told)

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _stage(self, function: FunctionId) -> None:
        reason = ""
        try:
            reason = await self._bring(function)
        except (GpufaasError, OSError) as exc:
            reason = str(exc)
        if reason:
            self._report(Unstaged(self._node, function, reason))
        elif function not in self._told:
            self._changed()

    async def _bring(self, function: FunctionId) -> str:
        """Return why the weights are not here; empty: they are."""
        spec = self.specs.get(function)
        if spec is None or spec.image:
            return "it is not known here" if spec is None else "it has an image, and no weights of its own"
        if self._fetch is not None:
            await self._fetch(spec)
        folder = await asyncio.to_thread(self._bundles.install, spec.digest)
        weights = self._bundles.manifest(spec.digest).weights
        if not weights:
            return "it has no weights"
        if reason := self._cache.refusal(weights):
            return reason
        if function not in self._weights and function in self._deployed:
            self._note(spec, weights)
        for each in weights:
            if function not in self._deployed:
                return "it was removed"
            if not await asyncio.shield(self._cache.stage(each, folder)):
                return self._cache.status().note or "others are worth more in the host tier"
        return ""

    def _changed(self) -> None:
        for function, weights in self._weights.items():
            here, told = self._cache.has(weights), function in self._told
            if here and not told:
                size = self._told[function] = sum(each.bytes for each in weights)
                self._report(Staged(self._node, function, size))
            elif told and not here:
                del self._told[function]
                self._report(Unstaged(self._node, function))
