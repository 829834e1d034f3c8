"""
Where a service's bytes come from, and who is told that it has them: artifacts, bundles and secrets of a cluster.

A holder of bytes says so in etcd under its lease (``v1/artifacts/SHA256/HOLDER``) and serves them on its status port,
to whoever has the cluster's token.
"""

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.bundles import BundleStore
from gpufaas_cache_manager.fetch import Fetcher
from gpufaas_cache_manager.object_store import open_object_store
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.connection import Identity

if TYPE_CHECKING:
    from gpufaas_store.election import Registration
    from gpufaas_store.etcd import Etcd

log = logging.getLogger("weights")


class Weights:
    """See module. `join` before anything is fetched; `run` beside the service."""

    def __init__(
        self, me: Identity, artifacts: ArtifactStore, bundles: BundleStore | None, object_store: str, data: Path
    ) -> None:
        self._me = me
        self._artifacts = artifacts
        self._bundles = bundles
        self.store = open_object_store(object_store) if object_store else None
        self._fetcher = Fetcher(
            artifacts, self._holders, self.store, self._announce, token=me.token, staging=data / "fetching"
        )
        self._etcd: Etcd | None = None
        self._registration: Registration | None = None
        self._url = ""
        self._joined = asyncio.Event()
        self._wanted: asyncio.Queue[WorkerSpec] = asyncio.Queue()
