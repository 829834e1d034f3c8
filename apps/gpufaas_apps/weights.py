"""
Artifacts and bundles of a cluster: where a service gets them, and how it announces those that it has.

A service that holds an artifact announces it in etcd under its lease (``v1/artifacts/SHA256/HOLDER``), and serves it on
its status port to services with the cluster's token.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gpufaas_adapters.object_store import object_store as open_object_store
from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.bundles import BundleStore
from gpufaas_cache_manager.fetcher import Fetcher
from gpufaas_cache_manager.object_store import ObjectStore, publish
from gpufaas_cache_manager.peers import PeerArtifacts, PeerClient
from gpufaas_cluster.connection import Identity
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import GpufaasError

if TYPE_CHECKING:
    from gpufaas_adapters.etcd.client import Etcd
    from gpufaas_adapters.etcd.election import Registration
    from gpufaas_apps.status import App

log = logging.getLogger("weights")

_KEYS = "v1/artifacts/"


def peer_token(me: Identity) -> str:
    """Return the token for HTTP between peers. It is derived: the cluster's token itself is never sent."""
    return hashlib.sha256(b"gpufaas artifacts\0" + me.token).hexdigest()


class Weights:
    """See module. Call `open` first, then `join`; fetches wait for it. `run` announces and prefetches."""

    def __init__(self, me: Identity, artifacts: ArtifactStore, bundles: BundleStore, object_store: str) -> None:
        self._me = me
        self._artifacts = artifacts
        self.store: ObjectStore | None = open_object_store(object_store) if object_store else None
        self.served: App = PeerArtifacts(artifacts, peer_token(me))
        self._peers = PeerClient(peer_token(me))
        self._fetcher = Fetcher(artifacts, bundles, self.holders, self._peers, self.store, self.announce)
        self._etcd: Etcd | None = None
        self._registration: Registration | None = None
        self._url = ""
        self._joined = asyncio.Event()
        self._wanted: asyncio.Queue[str] = asyncio.Queue()
        self.unpublished: set[str] = set()
        """Uploads that failed to get into the object store: their clients were told, and upload them again."""
        self._new: asyncio.Queue[str] = asyncio.Queue()

    async def open(self) -> None:
        """
        Check that the object store can be used, at the start rather than at the first deploy.

        :raises StorageFailed: it cannot; the message says why
        """
        if self.store is not None:
            await self.store.open()

    def join(self, etcd: "Etcd", registration: "Registration", url: str) -> None:
        """From now on other holders can be found, and find this one at *url*."""
        self._etcd, self._registration, self._url = etcd, registration, url
        for digest in self._artifacts.digests():
            self.announce(digest)
        self._joined.set()

    def announce(self, digest: str) -> None:
        """Announce that this service has the bytes of *digest*."""
        self._new.put_nowait(digest)

    async def fetch(self, spec: WorkerSpec) -> str:
        """
        Get the bundle of *spec* and its weights, unless they are here. Return where from, as `Fetcher.ensure`.

        :raises GpufaasError: no service has them, or they could not be written
        """
        return "" if spec.image else await self._fetcher.ensure_bundle(spec.digest)

    def prefetch(self, spec: WorkerSpec) -> None:
        """Get the bundle of *spec* soon: a call may come, and other holders may go."""
        if not spec.image:
            self._wanted.put_nowait(spec.digest)

    async def run(self) -> None:
        """Announce and prefetch, until cancelled."""
        await self._joined.wait()
        try:
            await asyncio.gather(self._announce_all(), self._prefetch_all())
        finally:
            await self._fetcher.close()
            self._peers.close()
            if self.store is not None:
                await self.store.close()

    async def _announce_all(self) -> None:
        assert self._registration is not None
        value = msgspec.json.encode({"url": self._url})
        while True:
            digest = await self._new.get()
            await self._registration.put(f"{_KEYS}{digest}/{self._me.role}-{self._me.id}", value)

    async def _prefetch_all(self) -> None:
        while True:
            digest = await self._wanted.get()
            try:
                await self._fetcher.ensure_bundle(digest)
            except GpufaasError as exc:
                log.warning("bundle.not_fetched digest=%s reason=%s", digest, exc)

    async def holders(self, digest: str) -> Sequence[str]:
        await self._joined.wait()
        assert self._etcd is not None
        found = []
        for item in (await self._etcd.range(f"{_KEYS}{digest}/")).items:
            with contextlib.suppress(msgspec.DecodeError, TypeError, KeyError):
                url = msgspec.json.decode(item.value)["url"]
                if url != self._url:
                    found.append(url)
        return found

    # --- uploads to a gateway ---

    async def publish(self, digest: str) -> None:
        """An upload is complete: announce it, and keep it in the object store if there is one."""
        if self.store is not None:
            try:
                await publish(self._artifacts, self.store, digest)
            except BaseException:
                self.unpublished.add(digest)
                raise
            self.unpublished.discard(digest)
        self.announce(digest)
