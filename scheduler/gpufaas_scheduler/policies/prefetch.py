"""Which weights are brought into the host tiers of nodes ahead of the misses that need them."""

from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_scheduler.contract import HOST, Load, Plan, Why
from gpufaas_scheduler.view_contract import DeviceView, View

LOOK: Final = 8
"""The number of functions without a copy that are examined, and of devices for them."""

_NEXT: Final = Why("its calls wait, no device holds it, and its weights can be here before a device is free")


class NextMisses:
    """
    While devices compute, the weights of functions whose calls wait and that no device holds are staged: those that
    have waited longest on the node whose device is free first, and so on.

    One host tier that has them is enough. They are not staged if the device is free before they could be there, or if
    nothing is known to be gained: then the load itself reads them as soon.
    """

    def plan(self, view: View) -> Plan:
        if not view.stageable:
            return
        soonest: list[tuple[DeviceView, Seconds]] = []
        for rank, call in enumerate(view.orphans(LOOK)):
            owner = call.owner
            if owner.staged or owner.staging:
                continue
            soonest = soonest or view.soonest_free(2 * LOOK)
            for device, left_s in soonest[rank % max(1, len(soonest)) :]:
                figures = owner.costs[device.kind]
                if figures is None or not view.allows(device, call) or not view.can_stage(device, owner):
                    continue
                saved_s = figures.disk_s - figures.host_s
                if 0.0 < saved_s <= left_s and (yield Load(owner.id, device.part, HOST, None, _NEXT)) is None:
                    break
