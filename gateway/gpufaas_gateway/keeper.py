"""`Keeper`: saves what calls change: how many there were, and what their functions cost."""

import asyncio
import logging
from collections.abc import Callable

from gpufaas_core.errors import StorageFailed
from gpufaas_core.messages import Learnt
from gpufaas_core.model import Profile
from gpufaas_core.units import Seconds
from gpufaas_gateway.catalogue import Catalogue
from gpufaas_gateway.ports import Store

log = logging.getLogger(__name__)


class Keeper:
    """`keep` runs beside the server. One event loop owns it."""

    def __init__(self, store: Store, catalogue: Catalogue) -> None:
        self._store = store
        self._catalogue = catalogue
        self._unsaved: dict[tuple[str, str], Profile] = {}

    def learn(self, learnt: Learnt) -> None:
        """Take note of a profile that the engine learnt; `save` keeps it. Cheap: it is told after every call."""
        deployed = self._catalogue.by_id(learnt.function)
        if deployed is not None:
            deployed.profiles[learnt.kind] = learnt.profile
            self._unsaved[deployed.spec.digest, learnt.kind] = learnt.profile

    async def save(self) -> None:
        """
        Write what calls have changed since the last time: counts and profiles.

        :raises StorageFailed: some of it is not written, and stays to be
        """
        counts = {each.full_name: each.stats.finished - each.stats.saved for each in self._catalogue.everywhere()}
        counts = {name: count for name, count in counts.items() if count}
        if counts:
            await asyncio.to_thread(self._store.add_invocations, counts)
            for name, count in counts.items():
                if (found := self._catalogue.get(name)) is not None:
                    found.stats.saved += count
        for key, profile in list(self._unsaved.items()):
            await asyncio.to_thread(self._store.save_profile, *key, profile)
            if self._unsaved.get(key) is profile:
                del self._unsaved[key]

    async def keep(
        self, stopped: asyncio.Event, learn: Callable[[], None] = lambda: None, every_s: Seconds = 5.0
    ) -> None:
        """
        `save` every so often, and once more when *stopped* is set; before that, *learn* is called. A kill loses at most
        the counts of that time.

        A disk that is full is logged, and tried again: it must not end the platform.
        """
        while not stopped.is_set():
            try:
                await asyncio.wait_for(stopped.wait(), every_s)
            except TimeoutError:
                pass
            learn()
            try:
                await self.save()
            except StorageFailed as exc:
                log.warning("not saved, will be tried again: %s", exc)
