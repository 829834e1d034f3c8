"""
A revision that succeeds another one: it is loaded beside that one, and takes the calls once it is loaded.

Its gateway decides when: it sees in the status that copies are ready, or that there is no room for them. It ends the
succession with the removal of one of the two.
"""

from gpufaas_core.model import FunctionId
from gpufaas_scheduler.handle.copies import balance
from gpufaas_scheduler.world.state import FunctionState
from gpufaas_scheduler.world.world import World


def begin(world: World, owner: FunctionState, succeeds: FunctionId | None) -> None:
    """Let *owner* have as many copies as the revision that it *succeeds*. None of those is evicted for them."""
    before = None if succeeds is None else world.functions.get(succeeds)
    if before is not None and not before.removed:
        owner.before = before
        owner.ask(max(1, before.copies))


def removed(world: World, owner: FunctionState) -> None:
    """*owner* was removed: a revision that succeeds it has the calls."""
    for each in world.functions.values():
        if each.before is owner:
            settle(world, each)


def settle(world: World, owner: FunctionState) -> None:
    """If *owner* has a copy, and all calls: from now on its calls decide about its copies."""
    if owner.before is not None and owner.before.removed and owner.copies > owner.loading:
        owner.before = None
        owner.wake()
        balance(world, owner)
