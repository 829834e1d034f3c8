"""Actions on copies beside their loads: they are evicted or limited, and what they need is fetched ahead."""

from gpufaas_core import messages as m
from gpufaas_core.model import Device, NodeId
from gpufaas_scheduler import contract
from gpufaas_scheduler.handle.copies import evict, send_off, serve_fifo
from gpufaas_scheduler.handle.grants import change_share
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy
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
    if copy.kept is not None:
        return f"plan {copy.kept} keeps copy {action.copy} on device {device.id}"
    if copy.pinned and not action.drain:
        return f"copy {action.copy} is in use"
    if action.drain and copy in owner.draining:
        return f"copy {action.copy} takes no more calls already"
    if copy in owner.active and owner.copies <= owner.min_copies:
        return f"copy {action.copy} is within the minimum of {owner.min_copies} of {owner.id}"
    if action.to == contract.HOST and not device.device.host_memory:
        return f"node {device.device.node} has no memory for weights"
    if copy.pinned:
        if owner.copies <= owner.target and owner.allows(device):
            return f"{owner.id} should have {owner.target} copies, so a copy that drains would take calls again at once"
        freed = world.freed
        send_off(world, device, copy)
        world.freed = freed  # the policy, which runs now, sees what follows
        return None
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
    if action.reserve and (refused := _why_no_reserve(action, device, copy)) is not None:
        return refused
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
    change_share(world, device, copy, action.share, action.reserve)
    world.out.append(m.SetLimit(owner.id, device.id, copy.number, action.share, action.slots, action.batch))
    return None


def _why_no_reserve(action: contract.Limit, device: DeviceState, copy: Copy) -> str | None:
    """Return why grants of *copy* cannot count for the reserve of *action*; None: they can."""
    sharing = copy.owner.declared.need.sharing
    if sharing not in ("auto", "spatial"):
        return f"grants of {copy.owner.id} have no reserve of their own: its sharing is {sharing}"
    if action.share:
        return f"a copy with a share holds no more than that: say {action.share} % as share, or a reserve, not both"
    if copy.split:
        return f"copy {copy.id} has several parts, whose grants count for what its function says"
    if not 1 <= action.reserve <= device.compute:
        return f"device {device.id} has {device.compute} % of compute, a reserve there cannot be {action.reserve} %"
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
