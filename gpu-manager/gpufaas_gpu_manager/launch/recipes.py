"""What a worker is started with: environment, arguments, limits and secrets."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from gpufaas_core.bundle import SITE_DIR, Manifest
from gpufaas_core.constraints import CPU_QUOTA
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.files import remove_tree
from gpufaas_core.log_marks import MARK_VARIABLE
from gpufaas_core.messages import Outer
from gpufaas_core.model import ALL_COMPUTE, Bytes
from gpufaas_core.units import GiB, MiB
from gpufaas_functions.runner import WorkerStart
from gpufaas_gpu_manager.cgroup_group import Group
from gpufaas_gpu_manager.cores import CpuShare
from gpufaas_gpu_manager.devices import NodeDevice, with_allocator
from gpufaas_gpu_manager.enforcement import Enforcement, WorkerLimits
from gpufaas_gpu_manager.forked import SCRATCH, Exec
from gpufaas_gpu_manager.forks import inherited
from gpufaas_gpu_manager.host_cache import Attached, HostCache
from gpufaas_gpu_manager.isolation.ports import ports_of
from gpufaas_gpu_manager.isolation.walls import HOME, USER, Own, Walls
from gpufaas_gpu_manager.settings import NodeSettings
from gpufaas_gpu_manager.staging import Bundles
from gpufaas_gpu_manager.standbys import ANYWHERE, Home
from gpufaas_gpu_manager.worker import Worker

STACKS: Final[Bytes] = 64 * MiB
"""Private memory that a program may have beyond its reservation: the kernel counts stacks of threads as a whole (8 MiB
each by default), although little of them is ever touched."""
_CONNECTIONS: Final = 3
"""What a new worker is given beside weights and output: its connection, that for files, its counts (`begun`)."""
_SOCKET_PATH: Final[Bytes] = 107
"""Of the path of a unix socket, at most."""
_IN_SCRATCH: Final[Bytes] = 36
"""Of the path of a socket below it, as `multiprocessing` makes them."""
_OF_CONTEXTS: Final = re.compile(r"CUDA|NVIDIA|PYTORCH|TORCH")
"""Variables that may be read when a context is made."""
_SHIM: Final = Path(__file__).parent.with_name("shim")
_GIVES: Final = threading.Lock()
"""Two workers of a function may begin at once: to the second what the first has just made is not another's."""


def _given_to(uid: int, path: str) -> bool:
    """
    Make *path* a directory that *uid* writes to, if need be. What is there of another one is removed: functions read
    by unpickling what they have compiled. Return False if the disk is full.
    """
    with _GIVES, contextlib.suppress(OSError):
        if os.path.lexists(path) and os.lstat(path).st_uid != (uid or os.geteuid()):
            remove_tree(Path(path))
        os.makedirs(path, 0o700, exist_ok=True)
        os.chown(path, uid or -1, uid or -1, follow_symlinks=False)
        return True
    return False


def scratch_at(path: str) -> dict[str, str]:
    """Return the variables of a worker whose scratch directory is *path*."""
    return {SCRATCH: path, **({"TMPDIR": path} if len(os.fsencode(path)) + _IN_SCRATCH <= _SOCKET_PATH else {})}


def _cpu_name(source: NodeDevice) -> str:
    return source.device.id.rpartition("/")[2].replace(":", "-")


class Recipes:
    """
    See module.

    :param threads: of the math libraries in each worker
    """

    def __init__(
        self, bundles: Bundles, settings: NodeSettings, enforcement: Enforcement, threads: int, host_cache: HostCache
    ) -> None:
        self.settings = settings
        self.enforcement = enforcement
        self.host_cache = host_cache
        self._bundles = bundles
        self._threads = threads
        for left in filter(None, (settings.scratch, settings.sockets)):
            remove_tree(left)  # of a process that was killed

    def limits(self, worker: Worker, group: Group | None = None) -> WorkerLimits:
        """
        :param group: that its process has joined; None: it joins a new one
        :raises OSError: the kernel makes no more control groups
        """
        memory = worker.memory if worker.device.source.enforced else 0
        limits = WorkerLimits(
            self.enforcement, worker.number, memory, worker.device.ledger.capacity, worker.on_over_memory,
            self.cpu_share(worker), group,
        )  # fmt: skip
        limits.confine = msgspec.structs.replace(limits.confine, walls=self.settings.isolation, own=worker.own)
        return limits

    def home(self, worker: Worker) -> Home:
        """Return which standbys can become *worker*."""
        if any(_OF_CONTEXTS.match(name) for name in worker.spec.env):
            return ANYWHERE
        return self.home_of(worker.device.source)

    def home_of(self, source: NodeDevice) -> Home:
        """
        Return which standbys can become workers on *source*: workers with a CPU quota have a group of groups, and those
        on a GPU a context. With MPS its share is settled when that is made: such a standby has none.
        """
        if source.contexts:
            return Home(env=tuple(sorted(source.env.items())))
        if not source.cores or self.enforcement.shares_by != CPU_QUOTA:
            return ANYWHERE
        return Home(_cpu_name(source), source.cores)

    def cpu_share(self, worker: Worker) -> CpuShare | None:
        """
        Return what *worker* may use of the cores of its device; None: the device has no number of them, or the worker
        only checks whether a function starts.
        """
        source = worker.device.source
        if not source.cores or worker.checks:
            return None
        return CpuShare(_cpu_name(source), source.cores, worker.share)

    def cpus(self, worker: Worker) -> float:
        """Return how many cores a container or pod may use; 0: no limit. What several use together is not limited."""
        share, limit = self.cpu_share(worker), worker.spec.cpus
        if share is None:
            return limit
        own = share.cores * (share.share or ALL_COMPUTE) / ALL_COMPUTE
        return min(limit, own) if limit else own

    def start(self, worker: Worker) -> WorkerStart:
        spec, source = worker.spec, worker.device.source
        emulation, share = source.emulation, self.cpu_share(worker)
        manifest = self._bundles.manifest(spec.digest)
        bundle = self._bundles.install(spec.digest)
        env = self._environment(worker, bundle, manifest)
        if manifest.allow_pickle:
            env["GPUFAAS_ALLOW_PICKLE"] = "1"
        return WorkerStart(
            function=f"{spec.name}.{spec.namespace}",
            bundle=str(bundle),
            handler=manifest.handler,
            kind=spec.kind,
            device=source.torch_device,
            slots=spec.need.slots,
            batch=spec.need.batch_max,
            threads=self._threads if share is None else share.threads,
            limit=worker.memory if source.enforced else 0,
            env=env,
            check=worker.checks,
            label=source.device.id.rpartition("/")[2],
            device_memory=0 if source.enforced else worker.memory,
            warm=worker.load.warms,
            emulated=None if emulation is None or worker.checks else emulation.start_of(spec, worker.memory),
            known=worker.calls.memory.known,
            ports_limited=worker.own.ports is not None,
            parks=spec.kind == "model" and emulation is None and not worker.checks and self._parks(source),
        )

    def _parks(self, source: NodeDevice) -> bool:
        return self.settings.parks(source.torch_device) and self.host_cache.status().budget > 0

    def attached(self, worker: Worker) -> list[Attached]:
        """Return the weights that *worker* is given from host memory; it has none if its calls are emulated."""
        if worker.checks or worker.device.source.emulation is not None:
            return []
        weights = self._bundles.manifest(worker.spec.digest).weights
        found = self.host_cache.attached(worker.number, weights, _CONNECTIONS)
        worker.load.staged = len(found) == len(weights)
        return found

    def socket_of(self, worker: Worker) -> str:
        """Return where a server may listen in place of its port, and nothing is; empty: it has only the port."""
        if self.settings.sockets is None:
            return ""
        path = self.settings.sockets.absolute() / str(worker.number) / "s"
        if len(os.fsencode(path)) > _SOCKET_PATH:
            return ""
        try:
            path.parent.mkdir(mode=0o700, parents=True)
        except OSError:
            return ""
        return str(path)

    def drop_own(self, worker: Worker) -> None:
        """No process of *worker* is left: remove the directories that only it had."""
        for folder in filter(None, (self.settings.scratch, self.settings.sockets)):
            path = folder.absolute() / str(worker.number)
            try:
                path.rmdir()
            except FileNotFoundError:
                pass
            except OSError:  # it has left files, and they may be many
                threading.Thread(target=remove_tree, args=(path,), name="scratch", daemon=True).start()

    def _scratch_of(self, worker: Worker) -> Path | None:
        return self.settings.scratch and self.settings.scratch.absolute() / str(worker.number)

    def _scratch(self, worker: Worker) -> dict[str, str]:
        """Make the scratch directory of *worker*, unless it is in its own root; return the variables that name it."""
        path = self._scratch_of(worker)
        if path is None:
            return {}
        if not self.settings.isolation.root:
            with contextlib.suppress(OSError):  # on a full disk functions start as long as they write nothing
                path.mkdir(mode=0o700, parents=True)
        env = scratch_at(str(path))
        if (walls := self.settings.isolation) != Walls():
            env |= {"HOME": HOME if walls.root else str(path), "USER": USER, "LOGNAME": USER}
        return env

    def program(self, worker: Worker, port: int, unix: str = "") -> Exec:
        """Return the program of a server that listens on *port*, or on *unix*. Blocks: it may install the bundle."""
        spec, source = worker.spec, worker.device.source
        manifest = self._bundles.manifest(spec.digest)
        bundle = self._bundles.install(spec.digest)
        command = spec.env["fprocess"].split() if spec.env.get("fprocess") else list(manifest.command)
        if not command:
            raise InvalidSpec(
                f"{spec.name} has no command: its template.yml needs fprocess, or the function envProcess"
            )
        if command[0] in ("python", "python3"):
            command[0] = sys.executable
        env = with_allocator(
            {**inherited(os.environ), **manifest.env, **self._environment(worker, bundle, manifest, unix)}
        )
        paths = [str(bundle / SITE_DIR), env.get("PYTHONPATH", "")]
        if manifest.port:
            env["GPUFAAS_FIXED_PORT"] = str(manifest.port)
            paths.insert(0, str(_SHIM))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        env.setdefault("PYTHONUNBUFFERED", "1")  # a line is in the log when it is printed
        env["PORT"] = env["http_port"] = str(port)  # http_port: what OpenFaaS's templates for node read
        if unix:
            env["GPUFAAS_SOCKET"] = unix
        memory = spec.memory if worker.checks else worker.memory
        limit = memory + STACKS if source.enforced and memory else 0
        return Exec(worker.number, command, env, str(bundle / manifest.workdir), limit)

    def mounted_secrets(self, worker: Worker, *, for_container: bool = False) -> str:
        """Return the directory with the secrets of *worker*; empty: its function has none."""
        spec, secrets = worker.spec, self.settings.secrets
        if not spec.secrets or secrets is None:
            return ""
        uid = 0 if for_container else self._uid(worker)
        return str(secrets.mount(spec.function, spec.namespace, spec.secrets, for_container=for_container, uid=uid))

    def _uid(self, worker: Worker) -> int:
        """Return the uid of its function; 0: that of the platform."""
        spec, uids = worker.spec, self.settings.uids
        return 0 if uids is None else uids.of(f"{spec.name}.{spec.namespace}")

    def _own(self, worker: Worker, bundle: Path, manifest: Manifest, secrets: str, write: Sequence[str]) -> Own:
        """Return what *worker* has within the walls; make the directories *write*, and not what its variables name."""
        walls, uid, source = self.settings.isolation, self._uid(worker), worker.device.source
        if walls == Walls():
            return Own()
        scratch = str(self._scratch_of(worker) or "")
        links = (bundle / each for each in (SITE_DIR, *(one.path for one in manifest.weights)))
        elsewhere = (os.path.realpath(each) for each in links if each.is_symlink())  # weights: on another disk
        return Own(
            uid=uid,
            read=tuple(filter(None, (str(bundle), *elsewhere, secrets))),
            write=tuple(each for each in (*write, *[scratch] * (not walls.root)) if each and _given_to(uid, each)),
            secrets=secrets,
            scratch=scratch,
            devices=tuple(source.nodes),
            room=_room(worker, self.enforcement),
            ports=ports_of(worker.spec.connect, walls, self.settings.env.get("OPENFAAS_URL", "")),
        )  # fmt: skip

    def container_env(self, worker: Worker, gateway: str) -> dict[str, str]:
        """Return the environment of a container or pod; *gateway* is the gateway's URL as seen from there."""
        spec, source = worker.spec, worker.device.source
        env = {
            **self.settings.env,
            **self.address_for(worker, gateway),
            "OPENFAAS_NAME": spec.name,
            "OPENFAAS_NAMESPACE": spec.namespace,
            SCRATCH: "/tmp",
            **source.env,
            **spec.env,
            # For images of our template; the memory is what it may take of a GPU, which nothing else enforces.
            "GPUFAAS_DEVICE": source.torch_device,
            "GPUFAAS_DEVICE_MEMORY": str(worker.memory),
            MARK_VARIABLE: worker.output.secret,
        }
        return with_allocator(env)

    def address_for(self, worker: Worker, gateway: str) -> dict[str, str]:
        """Return the variable with the URL *gateway* for *worker*, with its origin; none for an empty *gateway*."""
        origins = self.settings.origins
        if gateway and origins is not None and not worker.checks:
            gateway = origins.address(gateway, Outer(worker.device.id, worker.spec.function, worker.copy))
        return {"OPENFAAS_URL": gateway} if gateway else {}

    def _environment(self, worker: Worker, bundle: Path, manifest: Manifest, unix: str = "") -> dict[str, str]:
        """Return the variables of *worker*, and make what they name: it is its own from now on."""
        spec, source = worker.spec, worker.device.source
        # What torch.compile makes is kept as long as the bundle, for each function by itself: it is read by unpickling.
        # By default torch has one folder for all.
        compiled = self._bundles.compiled(spec.digest) / f"{spec.name}.{spec.namespace}" / source.compiles_for
        env = {
            "TORCHINDUCTOR_CACHE_DIR": str(compiled),
            **self._scratch(worker),
            **self.settings.env,
            "OPENFAAS_NAME": spec.name,
            "OPENFAAS_NAMESPACE": spec.namespace,
            **self.address_for(worker, self.settings.env.get("OPENFAAS_URL", "")),
            **spec.env,
            **source.env,
            **({} if worker.checks else source.share_env(spec.need, worker.share, worker.memory)),
            MARK_VARIABLE: worker.output.secret,
        }
        if mounted := self.mounted_secrets(worker):
            env["secret_mount_path"] = mounted
        worker.own = self._own(worker, bundle, manifest, mounted, (str(compiled), os.path.dirname(unix)))
        return env


def _room(worker: Worker, enforcement: Enforcement) -> Bytes:
    """Return the most that its files in memory take: what it may be lent, where a control group counts them."""
    if not (worker.device.source.enforced and worker.memory):
        return GiB
    return worker.device.ledger.capacity if enforcement.has_groups else worker.memory
