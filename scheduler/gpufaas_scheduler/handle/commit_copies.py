"""Actions on copies beside their loads: they are evicted or limited, and what they need is fetched ahead."""

from gpufaas_core import messages as m
from gpufaas_core.model import Device, NodeId
from gpufaas_scheduler import contract
from gpufaas_scheduler.handle.copies import evict, serve_fifo
from gpufaas_scheduler.handle.grants import change_share
from gpufaas_scheduler.world.world import World


def try_evict(world: World, action: contract.Evict) -> str | None:
    """Do *action*, or return why not."""
    found = world.copies.get(action.copy)
    if found is None:
        return f"there is no copy {action.copy}"
    if action.to not in (contract.NONE, contract.HOST):
        return f"there is no tier {action.to}"
    device, copy = found
    owner = copy.owner
    if copy.pinned:
        return f"copy {action.copy} is in use"
    if copy in owner.active and owner.copies <= owner.min_copies:
        return f"copy {action.copy} is within the minimum of {owner.min_copies} of {owner.id}"
    if action.to == contract.HOST and not device.device.host_memory:
        return f"node {device.device.node} has no memory for weights"
    evict(world, device, copy, action.to)
    if owner.copies < owner.target:
        owner.eager = False
        world.short[owner.id] = owner
    for each in list(world.homeless.values()):
        serve_fifo(world, each)
    return None


def try_limit(world: World, action: contract.Limit) -> str | None:
    """Do *action*, or return why not."""
    found = world.copies.get(action.copy)
    if found is None:
        return f"there is no copy {action.copy}"
    device, copy = found
    need, owner = copy.owner.declared.need, copy.owner
    if action.share and need.sharing not in ("share", "auto"):
        return f"{owner.id} has no share of its own: its sharing is {need.sharing}"
    if not 1 <= action.slots <= need.slots:
        return f"a copy of {owner.id} runs 1 to {need.slots} grants at once, not {action.slots}"
    if not 1 <= action.batch <= need.batch_max:
        return f"a grant of {owner.id} has 1 to {need.batch_max} calls, not {action.batch}"
    if copy.split and action.share != copy.share:
        return f"copy {action.copy} has several parts, which keep their shares"
    if action.share != copy.share and owner.keeps_share_until > world.now:
        return f"a worker of {owner.id} with another share did not load a moment ago"
    left = device.spare + copy.share + sum(each.compute for each in device.holding if each.copy is copy)
    if not 0 <= action.share <= left:
        return f"device {device.id} has {max(0, left)} % of compute left to share, not {action.share} %"
    copy.slots, copy.batch = action.slots, action.batch
    change_share(world, device, copy, action.share)
    world.out.append(m.SetLimit(owner.id, device.id, copy.number, action.share, action.slots, action.batch))
    return None


def try_fetch(world: World, action: contract.Fetch) -> str | None:
    """Do *action*, or return why not."""
    owner = world.functions.get(action.function)
    if owner is None or owner.removed:
        return f"no function {action.function} is deployed"
    if not action.nodes:
        return "a fetch names the nodes that it is for"
    nodes = {each.node: each.device for each in world.devices.values()}
    source = action.source
    for name in (*action.nodes, *([NodeId(source)] if source else ())):
        if name not in nodes:
            return f"there is no node {name}"
    fetches = []
    for node in action.nodes:
        fetch = m.FetchBundle(owner.id, node, source, action.ranges)
        reason = _why_not_fetched(fetch, nodes[node])
        if reason is not None:
            return reason
        fetches.append(fetch)
        source = node
    world.out += fetches
    return None


def _why_not_fetched(fetch: m.FetchBundle, device: Device) -> str | None:
    """Return why the node of *device* would not carry out *fetch*; None: it would."""
    if not device.fetches:
        return f"node {fetch.node} fetches nothing ahead of a load"
    if fetch.source and not device.fetches_from:
        return f"node {fetch.node} fetches from any node, not from {fetch.source}: fetch for one node, without a source"
    if fetch.ranges and not device.fetches_ranges:
        return f"node {fetch.node} fetches all of the weights, not ranges of them"
    return None
