"""Where the soak runs: one platform, or a cluster of processes with all that moves workers about."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import psutil
from tests.integration.cluster import Cluster
from tests.integration.conftest import Platform

DEVICE_MIB: Final = 320
DEVICES: Final = 2


class Place(Protocol):
    ports: list[int]
    """Of its gateways."""

    def start(self) -> object: ...

    def finish(self) -> list[str]:
        """Ask all to end. Return what was wrong about that, and about what they said."""
        ...

    def close(self) -> None: ...

    def deploy(self, name: str, source: str, lang: str, *, env: dict[str, str], **annotations: str) -> str: ...

    def call(self, path: str, body: bytes, **kwargs: Any) -> httpx.Response: ...

    def remove_all(self) -> None: ...

    def status(self) -> dict[str, Any]: ...

    def function(self, name: str) -> dict[str, Any]:
        """Return what it says of a function."""
        ...

    def is_idle(self) -> bool: ...

    def unready(self) -> list[str]:
        """Return who is not ready, and why."""
        ...

    def serving(self) -> Sequence[int]:
        """Return its processes that are no fork servers and no workers."""
        ...


class OneMachine(Platform):
    """`gpufaas serve`."""

    def __init__(self, home: Path) -> None:
        devices = [f"--device=cpu:{number}={DEVICE_MIB}MiB" for number in range(DEVICES)]
        super().__init__(home, *devices, "--allow-local-callbacks")
        self.ports = [self.port]

    def finish(self) -> list[str]:
        found = [] if self.stop() == 0 else ["the platform did not end with status 0"]
        return found + faults_of("the platform", self.said())

    def function(self, name: str) -> dict[str, Any]:
        return dict(self.http.get(f"/system/function/{name}").json())

    def unready(self) -> list[str]:
        ready = self.http.get("/readyz")
        return [] if ready.status_code == 200 else [f"/readyz says {ready.status_code} {ready.text}"]

    def serving(self) -> Sequence[int]:
        return [self.pid]


class ManyProcesses(Cluster):
    """Two gateways, two schedulers, two nodes, whose devices have one core each and park what they evict."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, nodes=DEVICES, device=f"cpu:0={DEVICE_MIB}MiB,cores=1")
        for each in self.nodes:
            each.arguments += ["--park", "--host-cache", f"{DEVICE_MIB}MiB", "--gateway-url", self.gateways[0].url]
        self.ports = [each.port for each in self.gateways]
        self._main = self.gateways[0]
        self.deploy, self.call, self.status = self._main.deploy, self._main.call, self._main.status

    def finish(self) -> list[str]:
        found = self.disagreements()
        for each in self.services[::-1]:
            if (status := each.stop()) != 0:
                found.append(f"{each.id} ended with status {status}")
            found += faults_of(each.id, each.said())
        return found

    def function(self, name: str) -> dict[str, Any]:
        return dict(self._main.web.get(f"/system/function/{name}").json())

    def is_idle(self) -> bool:
        status = self.status()
        return not any(each["busy"] for each in status["devices"]) and not any(
            any(seen["queued"].values()) or any(seen["running"].values())
            for seen in [status, *(each.status() for each in self.gateways[1:])]
        )

    def unready(self) -> list[str]:
        said = {each.id: each.readiness() for each in self.services}
        return [f"{id_} says {ready}" for id_, ready in said.items() if ready != (200, "ready")]

    def serving(self) -> Sequence[int]:
        return [each.pid for each in self.services]


def faults_of(who: str, said: str) -> list[str]:
    """Return what no part may say."""
    found = [f"{who} says: {line[:300]}" for line in said.splitlines() if "node.differs" in line]
    if "Traceback" in said:
        found.append(f"the output of {who} has a traceback: " + said[said.index("Traceback") :][:2000])
    return found


def fork_servers(place: Place) -> list[psutil.Process]:
    """Those that work: not those that are stopped, or have ended."""
    found = []
    for pid in place.serving():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [each for each in psutil.Process(pid).children() if _is_fork_server(each)]
    return found


def workers(place: Place) -> list[psutil.Process]:
    """Those of all fork servers."""
    found = []
    for pid in place.serving():
        with contextlib.suppress(psutil.NoSuchProcess):
            for server in psutil.Process(pid).children():
                found += [each for each in server.children() if each.name() != "standby"]
    return found


def is_parked_or_gone(process: psutil.Process) -> bool:
    """Whether a worker has no memory of its device: one that is parked is stopped, and nothing else stops one here."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return True


def _is_fork_server(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        runs = process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        return runs and "gpufaas_gpu_manager.zygote" in process.cmdline()
    return False
