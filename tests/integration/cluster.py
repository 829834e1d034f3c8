"""
A cluster of real processes: etcd, schedulers, nodes, gateways, each to be stopped, killed, paused and started again.

With `Network` each node has a network of its own, so that it can be cut off from some of the others by packet filters.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import httpx
import psutil
from tests.etcd_process import EtcdProcess, free_port
from tests.files import open_file, open_root
from tests.integration.conftest import HELD, LIMIT_S, TORCH, FunctionBuilds, all_ended, private_bytes, until

from gpufaas import Client
from gpufaas_adapters.etcd.secrets import create_key_file

MiB: Final = 1024 * 1024


class Service:
    """One process of the cluster, by its role and id."""

    def __init__(self, cluster: "Cluster", role: str, id_: str, host: str, arguments: Sequence[str]) -> None:
        self.cluster = cluster
        self.role, self.id, self.host = role, id_, host
        self.port, self.status_port = free_port(), free_port()
        self.arguments = list(arguments)
        self.prefix: list[str] = []
        self.program = ["-m", "gpufaas_cli"]
        self.env: dict[str, str] = {}
        self.log = cluster.home / f"{id_}.log"
        self.http = httpx.Client(base_url=f"http://{host}:{self.status_port}", timeout=5, trust_env=False)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def data(self) -> Path:
        return self.cluster.home / "data" / self.id

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.id} was not started"
        return self.process.pid

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, *, wait: bool = True) -> "Service":
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, *self.program, self.role, "--id", self.id,
                 *self.cluster.common, "--status-port", str(self.status_port), *self.arguments],
                stdout=output, stderr=output, stdin=subprocess.DEVNULL, env={**os.environ, **self.env},
            )  # fmt: skip
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.runs, f"{self.id} ended: {self.said()[-2000:]}"
            return self.readiness() == (200, "ready")

        until(ready, lambda: f"{self.id} is ready; it says {self.readiness()} and: {self.said()[-2000:]}")

    def readiness(self) -> tuple[int, str]:
        """Return status and text of /readyz; 0: it does not answer."""
        try:
            answer = self.http.get("/readyz")
        except httpx.TransportError as exc:
            return 0, str(exc)
        return answer.status_code, answer.text.strip()

    def metrics(self, timeout_s: float = LIMIT_S) -> dict[str, float]:
        """Return its metrics by name and labels, as they are written."""
        lines = self.http.get("/metrics", timeout=timeout_s).text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).children(recursive=True)
        return []

    def kill(self) -> list[psutil.Process]:
        """kill -9; return what were its descendants."""
        tree = self.tree()
        self.signal(signal.SIGKILL)
        self.end()
        return tree

    def stop(self) -> int:
        """Ask it to end, as an operator does; return its exit status."""
        self.signal(signal.SIGTERM)
        return self.end()

    def end(self) -> int:
        assert self.process is not None
        return self.process.wait(LIMIT_S)

    def workers(self) -> list[psutil.Process]:
        """What holds memory on a node: the children of its fork server that are not zombies."""
        alive = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for fork_server in psutil.Process(self.pid).children():
                for each in fork_server.children():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if each.status() != psutil.STATUS_ZOMBIE and each.name() != "standby":
                            alive.append(each)
        return alive

    def held_bytes(self) -> int:
        """Return the workers' private memory, as it is seen from outside."""
        sizes = {each.pid: private_bytes(each.pid) or 0 for each in self.workers()}
        # One by one, and each takes a while: what ended since then was not there together with the last.
        return sum(size for pid, size in sizes.items() if private_bytes(pid) is not None)

    def close(self) -> None:
        self.http.close()
        if self.runs:
            self.resume()
            all_ended(self.kill())


class Gateway(Service):
    """One more door for users: `url`, and what the CLI does through it."""

    def __init__(self, cluster: "Cluster", id_: str, host: str, arguments: Sequence[str]) -> None:
        super().__init__(cluster, "gateway", id_, host, arguments)
        self.url = f"http://{self.address}"
        self.arguments += ["--port", str(self.port), "--host", host, "--data", str(self.data)]
        limits = httpx.Limits(max_connections=100, max_keepalive_connections=100)
        self.web = httpx.Client(base_url=self.url, timeout=LIMIT_S, trust_env=False, limits=limits)
        self.cli = Client(self.url)

    def deploy(
        self,
        name: str,
        source: str,
        lang: str = TORCH,
        *,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Sequence[str] = (),
        **annotations: str,
    ) -> str:
        """
        Deploy as `Platform.deploy` does; return the path. Keys with a dot are taken as they are.

        :raises Refused: the gateway says no
        """
        built = self.cluster.builds.build(name.partition(".")[0], source, lang)
        self.cli.put_artifact(built.digest, built.bundle_tar, lambda _: None)
        if lang == TORCH:
            annotations.setdefault("memory", "48Mi")
        service, _, namespace = name.partition(".")
        spec: dict[str, Any] = {
            "service": service, "image": f"{name}:latest", "labels": dict(labels or {}), "envVars": dict(env or {}),
            # Marked: an update that changes nothing would do nothing.
            "annotations": {"gpufaas.bundle": built.digest, "deployment": token_hex(4)}
            | {key if "." in key else f"gpufaas.{key.replace('_', '-')}": text for key, text in annotations.items()},
        }  # fmt: skip
        if namespace:
            spec["namespace"] = namespace
        if secrets:
            spec["secrets"] = list(secrets)
        self.cli.deploy(spec)

        def settled(answer: httpx.Response) -> bool:
            # Another process of the gateway may not know the function yet.
            return answer.status_code == 200 and "pending" not in answer.json()["gpufaas"]

        described = f"/system/function/{name}"
        until(lambda: settled(self.web.get(described)), "the new revision serves, or failed")
        return f"/function/{name}"

    def call(self, path: str, body: bytes | Iterator[bytes] = b"", **kwargs: Any) -> httpx.Response:
        return self.web.post(path, content=body, **kwargs)

    def functions(self) -> list[str]:
        return sorted(each["name"] for each in self.cli.functions())

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Return the nodes in this gateway's view."""
        return {each["name"]: each for each in self.web.get("/system/nodes").json()}

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.web.get("/system/status").json()
        return found

    def residents(self) -> dict[str, list[str]]:
        """Return the names of what is loaded, by node."""
        found: dict[str, list[str]] = {}
        for device in self.status()["devices"]:
            names = [each["name"].partition(".")[0] for each in device["resident"] if not each["loading"]]
            found.setdefault(str(device["device"]["id"]).partition("/")[0], []).extend(sorted(names))
        return found

    def log_of(self, name: str) -> str:
        lines = self.web.get("/system/logs", params={"name": name}).text.splitlines()
        return "\n".join(json.loads(line)["text"] for line in lines)

    def close(self) -> None:
        self.web.close()
        self.cli.__exit__()
        super().close()


class Cluster:
    """
    See module. Nothing is started before `start`, or the services' own.

    :param network: gives each node a network of its own
    :param disk: the data of the last node and the last gateway are on disks of so many MiB of their own (needs root)
    """

    def __init__(
        self,
        home: Path,
        *,
        schedulers: int = 2,
        nodes: int = 2,
        gateways: int = 2,
        device: str = "cpu:0=400MiB",
        network: "Network | None" = None,
        disk: int = 0,
    ) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self.network = network
        self.host = "127.0.0.1" if network is None else network.host
        self.etcd = EtcdProcess(host=self.host)
        self.token, self.key = home / "token", home / "secrets.key"
        self.token.write_text(secrets.token_hex(32))
        create_key_file(self.key)
        self.record = open_file("record")
        """A file to which its functions may append."""
        self.builds = FunctionBuilds(home)
        self.schedulers = [self._scheduler(f"s{number}") for number in range(1, schedulers + 1)]
        self.gateways = [self._gateway(f"g{number}") for number in range(1, gateways + 1)]
        self.nodes = [self.node(f"n{number}", device, number) for number in range(1, nodes + 1)]
        self._disks: list[Path] = []
        for each in (self.nodes[-1], self.gateways[-1]) if disk else ():
            each.data.mkdir(parents=True)
            _run("mount", "-t", "tmpfs", "-o", f"size={disk}m", "gpufaas-test", str(each.data))
            self._disks.append(each.data)

    @property
    def common(self) -> list[str]:
        return ["--etcd", self.etcd.endpoint, "--token-file", str(self.token)]

    def _scheduler(self, id_: str) -> Service:
        made = Service(self, "scheduler", id_, self.host, ())
        made.arguments += ["--listen", made.address]
        return made

    def _gateway(self, id_: str) -> Gateway:
        return Gateway(
            self, id_, self.host, ("--secrets-key", str(self.key), "--allow-local-callbacks", "--auth", "off")
        )

    def node(self, id_: str, device: str, number: int = 0) -> Service:
        """Return another node, not yet started. *number* is that of its network, if it is to have one."""
        host, prefix = self.host, []
        if self.network is not None and number:
            host, prefix = self.network.add(number)
        made = Service(self, "node", id_, host, ("--device", device, "--functions", "process", "--park", "off"))
        made.arguments += ["--listen", made.address, "--data", str(made.data), "--secrets-key", str(self.key)]
        made.arguments += ["--bind", f"{open_root()}:rw", *HELD]
        made.prefix = prefix
        return made

    # --- life ---

    @property
    def services(self) -> "list[Service]":
        return [*self.schedulers, *self.gateways, *self.nodes]

    def start(self) -> "Cluster":
        """Start all, and return once all are ready and every gateway sees every node."""
        self.etcd.start()
        for each in self.services:
            if not each.runs:
                each.start(wait=False)
        for each in self.services:
            each.wait_ready()
        until(self.whole, "every gateway sees every node")
        return self

    def whole(self) -> bool:
        there = {each.id for each in self.nodes if each.runs}
        return all(set(each.nodes()) == there for each in self.gateways if each.runs)

    def leader(self, *but: Service) -> Service | None:
        """Return the scheduler that says that it leads; *but* these, which may not answer."""
        for each in self.schedulers:
            with contextlib.suppress(httpx.TransportError):
                if each not in but and each.runs and each.metrics(5.0).get("gpufaas_scheduler_leads"):
                    return each
        return None

    def the_leader(self) -> Service:
        found: list[Service] = []

        def look() -> bool:
            leader = self.leader()
            found[:] = [] if leader is None else [leader]
            return bool(found)

        until(look, "a scheduler leads")
        return found[0]

    def close(self) -> None:
        for each in self.services:
            each.close()
        self.etcd.close()
        for disk in self._disks:
            _run("umount", "--lazy", str(disk))
        if self.network is not None:
            self.network.close()

    # --- functions ---

    def remove_all(self) -> None:
        for each in self.gateways[0].cli.functions():
            self.gateways[0].cli.remove(each["name"])

    # --- what all of them say ---

    def wait_agreed(self) -> None:
        """Return when nothing differs any more. :raises AssertionError: something still does after `LIMIT_S`"""
        found: list[str] = []

        def agreed() -> bool:
            found[:] = self.disagreements()
            return not found

        until(agreed, lambda: "all agree:\n" + "\n".join([*found, *self._details()]))

    def _details(self) -> list[str]:
        """Return what the scheduler promised each copy, to what each worker is limited, and who said what last."""
        said = [
            f"{device['device']['id']}: {each['name']} copy {each['copy']} is charged {each['memory']} and may use "
            f"{each['limit']} bytes, running {each['running']}"
            f"{' loading' if each['loading'] else ''}{' draining' if each['draining'] else ''}"
            for device in self.gateways[0].status()["devices"]
            for each in device["resident"]
        ]
        for node in self.nodes:
            for worker in node.workers():
                with contextlib.suppress(psutil.NoSuchProcess):
                    said.append(f"{node.id}: worker {worker.pid} may use {worker.rlimit(psutil.RLIMIT_DATA)[0]} bytes")
        return said + [f"{each.id} says: {each.said()[-1500:]}" for each in self.services]

    def disagreements(self) -> list[str]:
        """Return in what etcd, the scheduler, the nodes and the gateways differ, in an idle cluster."""
        found = []
        leader = self.leader()
        if leader is None:
            return ["nobody leads"]
        seen = leader.metrics()
        if seen["gpufaas_scheduler_running"] or seen["gpufaas_scheduler_waiting"]:
            found.append(
                f"the scheduler has {seen['gpufaas_scheduler_running']:g} calls running and "
                f"{seen['gpufaas_scheduler_waiting']:g} waiting"
            )
        # What workers may use, not what they are charged: free memory is lent to them.
        limits = {
            each["device"]["id"]: sum(resident["limit"] for resident in each["resident"])
            for each in self.gateways[0].status()["devices"]
        }
        for node in self.nodes:
            own = node.metrics()
            for name, reserved in own.items():
                if not name.startswith("gpufaas_node_reserved_bytes"):
                    continue
                labels = name[name.index("{") :]
                promised = next((limit for id_, limit in limits.items() if f'device="{id_}"' in labels), -1)
                if promised != reserved:
                    found.append(
                        f"{labels}: the node holds {reserved:.0f} bytes, the scheduler promised {promised:.0f}"
                    )
                workers = sum(
                    count for key, count in own.items()
                    if key.startswith(f"gpufaas_node_workers{labels[:-1]},")
                    and not re.search('state="(gone|being parked|parked)"', key)
                )  # fmt: skip
                residents = seen.get("gpufaas_device_residents" + labels, -1.0)
                if workers != residents:
                    found.append(f"{labels}: the node has {workers:g} workers, the scheduler knows {residents:g}")
        stored = re.findall(
            r"/v1/functions/([^/\s]+)/(\S+)", self.etcd.ctl("get", "--prefix", "/gpufaas/v1/functions/", "--keys-only")
        )
        listed = sorted(name for _, name in stored)
        for gateway in self.gateways:
            if gateway.functions() != listed:
                found.append(f"{gateway.id} has the functions {gateway.functions()}, etcd {listed}")
            if set(gateway.nodes()) != {each.id for each in self.nodes}:
                found.append(f"{gateway.id} sees the nodes {sorted(gateway.nodes())}")
            status = gateway.status()
            if any(status["running"].values()) or any(status["queued"].values()):
                found.append(f"{gateway.id} sees calls: {status['running']} {status['queued']}")
        return found


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Leave no byte on the disk of *folder* meanwhile."""
    filler = folder / "filler"
    try:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            for size in (MiB, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"x" * size)
        yield
    finally:
        filler.unlink()


class Network:
    """
    A network per node, joined by a bridge: this machine is `host` in it. Needs root, ``ip netns`` and ``iptables``.

    A cut link drops packets, as a network does; no side gets an error.
    """

    def __init__(self) -> None:
        self._name = f"gpufaas-{secrets.token_hex(2)}"
        self._net = f"10.{128 + secrets.randbelow(122)}.{1 + secrets.randbelow(249)}"
        self.host = f"{self._net}.254"
        hub = f"{self._name}-hub"
        self._spaces = [hub]
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", hub, "link", "set", "dev", "br0", "up")
        _ip("link", "add", self._name, "type", "veth", "peer", "name", "outside", "netns", hub)
        _ip("-n", hub, "link", "set", "dev", "outside", "master", "br0", "up")
        _ip("addr", "add", f"{self.host}/24", "dev", self._name)
        _ip("link", "set", "dev", self._name, "up")

    @staticmethod
    def missing() -> str:
        """Return why there can be none here; empty: there can."""
        if os.geteuid() != 0:
            return "networks of their own need root"
        missing = [name for name in ("ip", "iptables") if shutil.which(name) is None]
        if missing:
            return f"there is no {missing[0]} here: install iproute2 and iptables"
        try:
            Network().close()
        except RuntimeError as exc:
            return f"no network can be made here: {exc}"
        return ""

    def add(self, number: int) -> tuple[str, list[str]]:
        """Return the address of a new network, and what to put before a command to run it there."""
        hub, space, port = self._spaces[0], f"{self._name}-{number}", f"node{number}"
        address = f"{self._net}.{10 + number}"
        self._spaces.append(space)
        _ip("netns", "add", space)
        _ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", hub)
        _ip("-n", hub, "link", "set", "dev", port, "master", "br0", "up")
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "dev", "eth0", "up")
        _ip("-n", space, "link", "set", "dev", "lo", "up")
        return address, ["ip", "netns", "exec", space]

    def cut(self, number: int, ports: Sequence[int]) -> None:
        """Let nothing pass between node *number* and these ports, be they its own or others'."""
        rules = [
            f"-A {chain} -p tcp {which} {port} -j DROP"
            for port in ports for chain in ("INPUT", "OUTPUT") for which in ("--sport", "--dport")
        ]  # fmt: skip
        text = "\n".join(("*filter", *rules, "COMMIT", ""))
        # All at once: one by one, they take longer than what is measured from then on.
        _run("ip", "netns", "exec", f"{self._name}-{number}", "iptables-restore", "--noflush", given=text)

    def mend(self, number: int) -> None:
        self._filter(number, "-F")

    def _filter(self, number: int, *arguments: str) -> None:
        _run("ip", "netns", "exec", f"{self._name}-{number}", "iptables", "-w", *arguments)

    def close(self) -> None:
        for each in self._spaces:
            with contextlib.suppress(RuntimeError):
                _ip("netns", "del", each)
        with contextlib.suppress(RuntimeError):
            _ip("link", "del", self._name)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*arguments: str, given: str = "") -> None:
    done = subprocess.run(arguments, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}")
