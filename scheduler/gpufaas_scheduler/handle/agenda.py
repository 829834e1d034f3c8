"""What a policy asks for beyond calls and copies: when it runs again, a plan, and nodes; and the events about these."""

from math import inf

from msgspec.structs import replace

from gpufaas_core import messages as m
from gpufaas_core.model import OrderId, PlacementPlan, name_of
from gpufaas_scheduler import contract
from gpufaas_scheduler.handle.copies import balance
from gpufaas_scheduler.handle.fleet import device_drained
from gpufaas_scheduler.policy_contract import PLAN
from gpufaas_scheduler.world.world import World


def try_wake(world: World, action: contract.Wake) -> str | None:
    """Do *action*, or return why not."""
    if action.at == inf:
        world.agenda.wakes.pop(action.key, None)
    elif action.at > world.now:
        world.agenda.wakes[action.key] = action.at
    else:
        return "a wake lies in the future"
    return None


def try_procure(world: World, action: contract.Procure) -> str | None:
    """Do *action*, or return why not."""
    offers = world.agenda.offers
    if not offers:
        return "nodes cannot be ordered on this platform: none are offered"
    offer = offers.get(action.kind)
    if offer is None:
        return f"no nodes of kind {action.kind} are offered"
    if not 1 <= action.n <= offer.limit:
        return f"1 to {offer.limit} nodes of kind {action.kind} can be procured, not {action.n}"
    offers[action.kind] = replace(offer, limit=offer.limit - action.n)
    agenda = world.agenda
    for _ in range(action.n):
        agenda.orders += 1
        order = OrderId(f"{world.epoch}-{agenda.orders}")
        agenda.ordered[order] = action.kind
        world.out.append(m.ProcureNodes(action.kind, order))
    return None


def try_release(world: World, action: contract.Release) -> str | None:
    """Do *action*, or return why not."""
    node, agenda = action.node, world.agenda
    devices = [each for each in world.devices.values() if each.device.node == node]
    if not devices:
        return f"there is no node {node}"
    if node in agenda.releasing:
        return f"node {node} is being released already"
    if all(each.kind not in agenda.offers for each in devices):
        return f"node {node} is of no kind that is offered, so nobody takes it back"
    agenda.releasing[node] = False
    freed = world.freed
    for each in devices:
        if not each.closed:
            device_drained(world, m.DeviceDrained(each.id))
    world.freed = freed  # the policy, which runs now, sees what became free
    release_empty(world)
    return None


def release_empty(world: World) -> None:
    """Give back the released nodes whose devices are empty."""
    releasing = world.agenda.releasing
    for node, told in list(releasing.items()):
        devices = [each for each in world.devices.values() if each.device.node == node]
        if not told and not any(len(each.residency) or each.busy for each in devices):
            world.out.append(m.ReleaseNode(node))
            releasing[node] = True
        if not devices:
            del releasing[node]


def try_set_plan(world: World, action: contract.SetPlan) -> str | None:
    """Do *action*, or return why not."""
    plan, agenda = action.plan, world.agenda
    if agenda.plan is not None and plan.version <= agenda.plan.version:
        return f"plan {plan.version} is not newer than plan {agenda.plan.version}, which is in force"
    names = {name_of(each) for each in world.functions}
    for each in plan.replicas:
        if each.function not in names:
            return f"plan {plan.version} names {each.function}, which is not deployed"
        if each.device not in world.devices:
            return f"plan {plan.version} names device {each.device}, which is not there"
    freed = world.freed
    _put_in_force(world, plan)
    world.freed = freed  # the policy, which runs now, sees what follows
    agenda.planned = bool(agenda.watches & PLAN)
    return None


def planned(world: World, event: m.Planned) -> None:
    agenda = world.agenda
    if agenda.plan is not None and event.plan.version <= agenda.plan.version:
        world.ignored["Planned"] += 1
    else:
        _put_in_force(world, event.plan)


def _put_in_force(world: World, plan: PlacementPlan) -> None:
    world.set_plan(plan)
    for owner in world.functions.values():
        if owner.plan and owner.desired is not None and owner.before is None:  # a rollout goes on
            owner.wake()  # the number that scaling asked for is forgotten
            balance(world, owner)


def offered(world: World, event: m.Offered) -> None:
    agenda = world.agenda
    agenda.offers = {each.kind: each for each in event.offers}
    if event.ordered is not None:
        agenda.ordered = dict(event.ordered)
        # Whether the provider heard of a release is not sure after a change of leader: it is told again.
        agenda.releasing = dict.fromkeys(agenda.releasing, False)


def order_failed(world: World, event: m.OrderFailed) -> None:
    kind = world.agenda.ordered.pop(event.order, None)
    if kind is None:
        world.ignored["OrderFailed"] += 1
    else:
        world.agenda.unmet[kind] = event.reason


def node_joined(world: World, event: m.DeviceJoined) -> None:
    """A device has joined: perhaps of a node that was procured, or of one that is being released."""
    world.agenda.joined(event.order)
    if event.device.node in world.agenda.releasing:
        device_drained(world, m.DeviceDrained(event.device.id))
