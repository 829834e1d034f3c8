"""What a platform on this machine would find: what its parts ask when they start, asked beforehand."""

import asyncio
import importlib.util
import platform
import runpy
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Final

from msgspec import Struct

from gpufaas_apps.machine import Machine, connect, container_engine
from gpufaas_apps.options import DeviceOptions
from gpufaas_apps.process import listen
from gpufaas_core.constraints import GPU
from gpufaas_core.errors import GpufaasError
from gpufaas_core.model import NodeId
from gpufaas_core.units import GiB, format_bytes
from gpufaas_gpu_manager import mps
from gpufaas_gpu_manager.devices import described
from gpufaas_gpu_manager.isolation.levels import tried as tried

_APPARMOR: Final = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
_MENDS: Final = {
    "own root": "sudo sysctl -w kernel.unprivileged_userns_clone=1",
    "uid of each function": "sudo gpufaas serve",
    "control groups": "systemd-run --user --scope -p Delegate=yes gpufaas serve",
}


class Check(Struct, frozen=True):
    name: str
    works: bool | None
    """None: it is absent, and the platform serves without it."""
    found: str
    mend: str = ""
    """The command that mends it, if it does not work."""


def examined(data: Path, port: int | None) -> Iterator[Check]:
    """Yield what there is to say of this machine. :param port: at which a gateway is to listen; None: one does"""
    yield Check("Python", True, platform.python_version())
    machine = Machine.opened(DeviceOptions(), NodeId("local"))
    machine.enforcement.close()
    for each in machine.devices:
        yield Check("device", True, described(each.device))
        each.close()
    gpu = any(each.device.labels.get(GPU) == "true" for each in machine.devices)
    torch = importlib.util.find_spec("torch")  # to import it takes seconds
    cuda = torch and runpy.run_path(str(Path(str(torch.origin)).with_name("version.py")))["cuda"]
    built = f"{version('torch')}, built for {f'CUDA {cuda}' if cuda else 'CPUs'}" if torch else "not installed"
    yield Check("torch", bool(cuda if gpu else torch), built, "pip install --force-reinstall torch")
    served = shutil.which(mps.PROGRAM)
    told = served or f"no {mps.PROGRAM}{': functions take turns on a GPU' * gpu}"
    yield Check("MPS", bool(served) or None, told, "sudo apt install nvidia-cuda-mps" * gpu)
    by_apparmor = _APPARMOR.exists() and _APPARMOR.read_text().strip() == "1"  # as on Ubuntu
    mends = _MENDS | ({"own root": f"sudo sysctl -w kernel.{_APPARMOR.name}=0"} if by_apparmor else {})
    for mechanism in tried()[1]:
        yield Check(mechanism.name, mechanism.works or None, mechanism.why, mends.get(mechanism.name, ""))
    yield _of("Docker", None, "answers", lambda: asyncio.run(_docker()), "sudo systemctl start docker")
    if port is not None:
        other = f"gpufaas serve --port {port + 1}"
        yield _of("port", False, f"{port} is free", lambda: listen("127.0.0.1", port, "--port").close(), other)
    left = shutil.disk_usage(next(each for each in (data, *data.parents) if each.exists())).free
    yield Check("disk", left > GiB, f"{format_bytes(left)} free for {data}", "gpufaas prune")


def _of(name: str, fails: bool | None, found: str, attempt: Callable[[], object], mend: str) -> Check:
    try:
        attempt()
    except GpufaasError as exc:
        return Check(name, fails, str(exc), mend)
    return Check(name, True, found)


async def _docker() -> None:
    engine = container_engine("docker", "doctor", "", None)
    await connect(engine, "docker")
    if engine is not None:
        await engine.close()
