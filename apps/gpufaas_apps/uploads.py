"""Uploads to a gateway of a cluster."""

import asyncio
import contextlib
from collections.abc import Generator

from gpufaas_apps.weights import Weights
from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_gateway.ports import ArtifactWriter


class GatewayArtifacts:
    """Uploads to this gateway (`ports.Artifacts`). A complete one is announced and put in the object store."""

    def __init__(self, artifacts: ArtifactStore, weights: Weights, loop: asyncio.AbstractEventLoop) -> None:
        self._artifacts = artifacts
        self._weights = weights
        self._loop = loop

    def has(self, digest: str) -> bool:
        if self._artifacts.has(digest) and digest not in self._weights.unpublished:
            return True
        # Methods of this port run in threads. Any other holder will do.
        holders = asyncio.run_coroutine_threadsafe(self._weights.holders(digest), self._loop).result()
        if holders:
            return True
        store = self._weights.store
        return (
            store is not None and asyncio.run_coroutine_threadsafe(store.head(digest), self._loop).result() is not None
        )

    @contextlib.contextmanager
    def writer(self, digest: str) -> Generator[ArtifactWriter]:
        with self._artifacts.writer(digest) as writer:
            yield writer
        # The context is left in a thread, as it was entered in one.
        asyncio.run_coroutine_threadsafe(self._weights.publish(digest), self._loop).result()
