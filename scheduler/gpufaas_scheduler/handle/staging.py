"""Weights in the host tiers of nodes: the nodes tell of them, and policies ask for some."""

from gpufaas_core import messages as m
from gpufaas_scheduler import contract
from gpufaas_scheduler.world.function import FunctionState
from gpufaas_scheduler.world.world import World


def staged(world: World, event: m.Staged) -> None:
    host = world.hosts.by_node.get(event.node)
    if host is None:
        world.ignored["Staged"] += 1
        return
    world.hosts.stage(host, event.function, event.size)
    world.rare = True
    world.freed = True  # a load is shorter now than a wait may be


def unstaged(world: World, event: m.Unstaged) -> None:
    host = world.hosts.by_node.get(event.node)
    if host is None or not (event.function in host.staged or event.function in host.staging):
        world.ignored["Unstaged"] += 1
        return
    if event.function in host.staging:
        host.declined[event.function] = world.now
        world.settled = True
    world.hosts.unstage(host, event.function)


def stage_beside(world: World, owner: FunctionState) -> None:
    """*owner* does not fit beside the revision that it succeeds: bring its weights to where the copies of that are."""
    for device in () if owner.before is None else owner.before.active.values():
        if device.host.refusal(owner.id, world.now) is None:
            world.hosts.bring(device.host, owner.id)
            world.out.append(m.Stage(owner.id, device.node))


def try_stage(world: World, owner: FunctionState, action: contract.Load) -> str | None:
    """Do *action*, a load into the host tier of a node, or return why not."""
    device = world.devices.get(action.parts[0].device) if action.parts else None
    if device is None:
        return f"there is no device {action.parts[0].device}" if action.parts else "a load says a device of its node"
    host = device.host
    refusal = host.refusal(owner.id, world.now)
    if refusal is None:
        world.hosts.bring(host, owner.id)
        world.out.append(m.Stage(owner.id, host.node))
    return refusal
