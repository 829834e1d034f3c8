"""`Keeper`: writes the numbers of calls, and the learnt profiles of functions, to the store."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from gpufaas_core.errors import StorageFailed
from gpufaas_core.model import Learnt, Profile
from gpufaas_core.units import Seconds
from gpufaas_gateway.catalogue import Catalogue
from gpufaas_gateway.ports import Store

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Keeper:
    """Run `keep` beside the server. One event loop owns it."""

    store: Store
    catalogue: Catalogue
    _unsaved: dict[tuple[str, str], Profile] = field(default_factory=dict)

    def learn(self, learnt: Learnt) -> None:
        """Note a profile that the engine learnt; `save` writes it. Cheap: called after each call."""
        deployed = self.catalogue.by_id(learnt.function)
        if deployed is not None:
            deployed.profiles[learnt.kind] = learnt.profile
            self._unsaved[deployed.spec.profiled, learnt.kind] = learnt.profile

    async def save(self) -> None:
        """
        Write the counts and profiles that changed since the last call.

        :raises StorageFailed: some are not written; the next call writes them
        """
        counts = {each.full_name: each.stats.finished - each.stats.saved for each in self.catalogue.everywhere()}
        counts = {name: count for name, count in counts.items() if count}
        if counts:
            await asyncio.to_thread(self.store.add_invocations, counts)
            for name, count in counts.items():
                if (found := self.catalogue.find(name)) is not None:
                    found.stats.saved += count
        for key, profile in list(self._unsaved.items()):
            await asyncio.to_thread(self.store.save_profile, *key, profile)
            if self._unsaved.get(key) is profile:
                del self._unsaved[key]

    async def keep(
        self, stopped: asyncio.Event, learn: Callable[[], None] = lambda: None, every_s: Seconds = 5.0
    ) -> None:
        """
        Call *learn* and `save` every *every_s*, and once more when *stopped* is set. A kill loses what came since.

        A full disk is logged and tried again: it must not end the platform.
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
