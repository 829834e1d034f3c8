"""Which weights are brought ahead of the misses that need them: into host tiers, and from there onto devices."""

from collections.abc import Sequence
from typing import Final

from gpufaas_scheduler.contract import HOST, Load, Plan, Why
from gpufaas_scheduler.view_contract import View, WaitingCall
from gpufaas_scheduler.view_nouns import DeviceView, FunctionView

LOOK: Final = 4
"""The number of functions without a copy that are examined."""

_NEXT: Final = Why("its calls wait, no device holds it, and its weights can be here before this device is free")
_HERE: Final = Why("its calls wait, no device holds it, and there is room for it beside what this device computes")


class NextMisses:
    """
    While a device computes, the weights of a function whose calls wait and that no device holds are staged on its node.
    From there they are loaded onto the device, if it has room without a victim.

    One host tier that has them is enough. They are not staged if the device is free before they could be there, or if
    nothing is known to be gained: then the load itself reads them as soon. On a CPU device, a load takes cores from the
    calls that run there, so it is not done beside them.
    """

    def plan(self, view: View, devices: Sequence[DeviceView]) -> Plan:
        for device in devices:
            if not device.busy:
                continue
            for call in view.orphans(LOOK):
                owner = call.owner
                load = None
                if owner.staged:
                    load = _load(view, owner, device)
                elif not owner.staging:
                    load = _stage(view, call, device)
                if load is not None and owner.loadable and (yield load) is None:
                    break


def _load(view: View, owner: FunctionView, device: DeviceView) -> Load | None:
    """Return the load of *owner*, which is staged somewhere, onto *device*, if it is there and has room."""
    if device.node not in owner.staged or device.kind.startswith("cpu"):
        return None
    need = view.occupation(device, owner)
    if need is None or need > view.free(device) or any(each.loading for each in view.residents(device)):
        return None
    return Load(owner.id, device.part, why=_HERE, beside=True)


def _stage(view: View, call: WaitingCall, device: DeviceView) -> Load | None:
    """Return the load of a function into the host tier of the node of *device*, if that is over before it is free."""
    owner = call.owner
    figures = owner.costs[device.kind]
    if figures is None or not 0.0 < figures.disk_s - figures.host_s <= view.left_s(device):
        return None
    if not (view.allows(device, call) and view.can_stage(device, owner)):
        return None
    return Load(owner.id, device.part, HOST, None, _NEXT)
