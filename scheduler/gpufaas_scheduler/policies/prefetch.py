"""Which weights are brought into the host tiers of nodes ahead of the misses that need them."""

from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_scheduler.contract import HOST, Load, Plan, Why
from gpufaas_scheduler.view_contract import DeviceView, View, WaitingCall

LOOK: Final = 8
"""The number of functions without a copy that are examined, and of devices for them."""

_NEXT: Final = Why("its calls wait, no device holds it, and its weights can be here before a device is free")


_HERE: Final = Why("its calls wait, no device holds it, and there is room for it beside what this device computes")


class NextMisses:
    """
    While devices compute, the weights of functions whose calls wait and that no device holds are staged: those that
    have waited longest on the node whose device is free first, and so on. From there they are loaded onto that device,
    if it has room without a victim.

    One host tier that has them is enough. They are not staged if the device is free before they could be there, or if
    nothing is known to be gained: then the load itself reads them as soon. On a CPU device, a load takes cores from the
    calls that run there, so it is not done beside them.
    """

    def plan(self, view: View) -> Plan:
        soonest: list[tuple[DeviceView, Seconds]] = []
        for rank, call in enumerate(view.orphans(LOOK)):
            owner = call.owner
            if owner.staging or not (owner.staged or view.stageable):
                continue
            soonest = soonest or view.soonest_free(2 * LOOK)
            first = soonest[rank % max(1, len(soonest)) :]
            yield from _load(view, call, first) if owner.staged else _stage(view, call, first)


def _stage(view: View, call: WaitingCall, devices: list[tuple[DeviceView, Seconds]]) -> Plan:
    owner = call.owner
    for device, left_s in devices:
        figures = owner.costs[device.kind]
        if figures is None or not view.allows(device, call) or not view.can_stage(device, owner):
            continue
        saved_s = figures.disk_s - figures.host_s
        if 0.0 < saved_s <= left_s and (yield Load(owner.id, device.part, HOST, None, _NEXT)) is None:
            return


def _load(view: View, call: WaitingCall, devices: list[tuple[DeviceView, Seconds]]) -> Plan:
    owner = call.owner
    for device, _ in devices:
        if not device.busy or device.node not in owner.staged or device.kind.startswith("cpu"):
            continue
        need = view.occupation(device, owner)
        if (
            need is not None
            and need <= view.free(device)
            and not any(each.loading for each in view.residents(device))
            and (yield Load(owner.id, device.part, why=_HERE, beside=True)) is None
        ):
            return
