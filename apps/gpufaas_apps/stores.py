"""What a platform of one process keeps in its data directory, and when that goes."""

import asyncio
import time
from pathlib import Path

from gpufaas_adapters.sqlite.async_queue import SqliteAsyncQueue
from gpufaas_adapters.sqlite.functions import SqliteStore
from gpufaas_adapters.sqlite.plans import SqlitePlans
from gpufaas_apps.machine import NodeStores
from gpufaas_cache_manager.collect import Collected, collect, kept
from gpufaas_core.model import Bytes, Seconds
from gpufaas_gateway.catalogue import Catalogue


class Stores(NodeStores):
    """See module."""

    def __init__(self, data: Path, history_size: Bytes) -> None:
        """
        :param history_size: the most bytes that earlier revisions of functions may keep
        :raises StorageFailed: one of them cannot be used
        """
        super().__init__(data)
        self._history_size = history_size
        self.functions = SqliteStore(data / "gpufaas.db")
        self.async_queue = SqliteAsyncQueue(data / "async")
        self.plans = SqlitePlans(data / "plans.db")

    def close(self) -> None:
        self.plans.close()
        self.async_queue.close()
        self.logs.close()
        self.functions.close()

    async def collect(self, catalogue: Catalogue, unused_s: Seconds, dry: bool = False) -> Collected:
        """Remove what neither functions, for *unused_s*, nor the kept history name. *dry*: only say what would go."""
        until, functions = time.time() - unused_s, catalogue.everywhere()
        tried = {old.revision for each in functions if (old := each.record.handover.before) is not None}

        def work() -> Collected:
            past = [noted for each in functions for noted in self.functions.history(each.full_name) if noted.digest]
            used = {each.digest for each in past if each.status == "pending" or each.revision in tried}
            used |= {each.spec.digest for each in functions if not each.spec.image}
            newest_first = [each.digest for each in sorted(past, key=lambda noted: -noted.at)]
            more, lacking = kept(self.artifacts, self.bundles, used, newest_first, self._history_size)
            return collect(self.artifacts, self.bundles, used | more, until, lacking=lacking, dry=dry)

        return await asyncio.to_thread(work)
