"""What holds the workers of a node, as its options say, and what this machine gives for it."""

import logging
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from gpufaas_apps.options import DeviceOptions
from gpufaas_core.constraints import ISOLATED_BY, ISOLATION
from gpufaas_core.errors import InvalidSpec
from gpufaas_gpu_manager.devices import NodeDevice
from gpufaas_gpu_manager.isolation import levels
from gpufaas_gpu_manager.isolation.binds import checked
from gpufaas_gpu_manager.isolation.ids import Uids, written
from gpufaas_gpu_manager.isolation.levels import tried as tried
from gpufaas_gpu_manager.isolation.ports import etcd_here
from gpufaas_gpu_manager.isolation.walls import PORTS, Walls

log = logging.getLogger("node")


def isolation_of(
    given: DeviceOptions, data: Path, devices: Sequence[NodeDevice], etcd: Sequence[str] = ()
) -> tuple[Walls, Uids | None]:
    """
    Return what holds workers that are processes, and the uids of their functions, if they have some. The labels of
    *devices* say it, and the log what a level lacks here.

    :param data: the platform's directory
    :param etcd: the endpoints of the cluster
    :raises InvalidSpec: --bind names what functions may not see; or the level is strict, and something is missing
    """
    level = given.isolation
    walls = levels.walls(level, checked(given.binds, data), str(data))
    for each in levels.tried()[1] if level == "best" else ():
        if each.needed and not each.works:
            log.warning("--isolation best goes without %s: %s", each.name, each.why)
    try:
        uids = Uids(data / "uids", given.uid_range, strict=walls.strict) if walls.uids else None
    except InvalidSpec as exc:
        if walls.strict:
            raise
        walls, uids = replace(walls, uids=False), None
        log.warning("functions have no uids of their own: %s", exc)
    if walls != Walls():
        walls = replace(walls, etcd=etcd_here(etcd))
        for port in walls.etcd if walls.landlock < PORTS else ():
            log.warning("an etcd at port %d asks for no login, and functions reach it: give it one (--etcd-user)", port)
    words = str(walls) if uids is None else str(walls).replace("uids", f"uids {written(uids.range)}")
    for device in devices:
        device.device = replace(device.device, labels={**device.device.labels, ISOLATION: level, ISOLATED_BY: words})
    return walls, uids
