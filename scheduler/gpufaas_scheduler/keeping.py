"""
Which grants a gateway may keep when their call has ended, and run further calls by, without asking again.

While a gateway keeps a grant, its copy has a slot less and cannot be evicted. So only what nobody else needs is kept,
and not for long.
"""

from typing import Final

from gpufaas_core.messages import Grant
from gpufaas_core.model import Seconds
from gpufaas_scheduler.world.world import World

KEEP_S: Final[Seconds] = 0.05
"""A grant may be taken for another call until this time after it was made."""


def keep_s(world: World, grant: Grant) -> Seconds:
    """
    Return how long a gateway may keep *grant*, which was made just now; 0.0: not at all.

    The function is direct, and none of its calls waits; at least half of the slots of the copy are free, so
    that calls of other gateways find one; and nothing waits for the memory or the share of a copy that is idle.

    Its calls have made no calls: these end with the call that made them, and of further calls by a grant the scheduler
    does not know when they end.
    """
    call = world.calls.by_id.get(grant.calls[0])
    if call is None or call.device is None or (copy := call.copy) is None or grant.cold or grant.load_s:
        return 0.0
    owner = call.owner
    may = (
        not (owner.placed or owner.removed or owner.nests)
        and not owner.flow.calls
        and copy.running * 2 <= owner.slots
        and not copy.loading
        and copy in owner.active
        and call.ends is None
        and not (world.homeless or world.nested or call.device.local)
    )
    return KEEP_S if may else 0.0
