"""
``gpufaas serve``: the whole platform in one process tree. The composition root of embedded mode.

The serving process holds gateway, scheduler and GPU manager as one would in a cluster, composed in one event loop; the
zygote beside it has torch, and forks the workers. Nothing here decides anything.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import ipaddress
import logging
import os
import socket
import sys
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from gpufaas_apps.options import FrontOptions, ServeOptions
from gpufaas_apps.resources import keep_private, raise_descriptors
from gpufaas_apps.watchdog import notify, watched
from gpufaas_core.constraints import ENFORCED_BY, MEMORY, PLATFORM_LABELS
from gpufaas_core.errors import GpufaasError, InvalidSpec, StorageFailed
from gpufaas_core.model import NodeId
from gpufaas_core.units import format_bytes

if TYPE_CHECKING:
    from gpufaas_apps.front import Front
    from gpufaas_gateway.auth import Credentials
    from gpufaas_gateway.builds import Builds
    from gpufaas_gpu_manager.node import Node
    from gpufaas_scheduler.journal import Header, Journal

_COLLECT_EVERY_S: Final = 3600.0
_KEEP_UNUSED_S: Final = 86_400.0
"""For so long a revision that was replaced or removed can be deployed again without another upload."""
_MAX_QUEUE_IN_ALL: Final = 10_000
_NODE: Final = NodeId("local")


def run(options: ServeOptions) -> None:
    """
    Serve until SIGTERM or Ctrl-C.

    :raises GpufaasError: it cannot start: the port is taken, the data directory cannot be used, a device is not there
    """
    import uvloop

    from gpufaas_apps.front import GRACE_S

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # The server's own complaints about half answers and lost connections are ours to report, not to print as errors.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    raise_descriptors()
    with _own(options.data) as spool, _listen(options.host, options.port) as listening:
        credentials = _credentials(options)
        options = replace(options, port=listening.getsockname()[1])  # port 0 is any that is free
        if sys.version_info >= (3, 12):
            uvloop.run(watched(_serve(options, credentials, spool, listening), GRACE_S))
        else:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(watched(_serve(options, credentials, spool, listening), GRACE_S))


@contextlib.contextmanager
def _own(data: Path) -> Any:
    """Have the data directory for ourselves; give the directory of spooled bodies, emptied."""
    try:
        data.mkdir(parents=True, exist_ok=True)
        keep_private(data)
        lock: IO[str] = (data / "lock").open("a")
    except OSError as exc:
        raise _unusable(data, exc) from exc
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StorageFailed(
                f"another gpufaas serves from {data}: stop it, or give this one a directory of its own with --data"
            ) from None
        spool = data / "spool"
        try:
            spool.mkdir(exist_ok=True)
            for left in spool.iterdir():
                left.unlink()
        except OSError as exc:
            raise _unusable(data, exc) from exc
        yield spool


def _unusable(data: Path, exc: OSError) -> StorageFailed:
    return StorageFailed(
        f"the data directory {data} cannot be used ({exc.strerror}): make it writable, or name another with --data"
    )


def _credentials(options: FrontOptions) -> "Credentials | None":
    """Return the user and password to ask for, made if need be; None: nobody is asked."""
    from gpufaas_gateway.auth import make_credentials, read_credentials

    if options.auth == "off" or (options.auth == "auto" and _is_loopback(options.host)):
        return None
    if options.auth_dir is None:
        make_credentials(_auth_dir(options))
    return read_credentials(_auth_dir(options))


def _auth_dir(options: FrontOptions) -> Path:
    return options.auth_dir or options.data / "auth"


def _builds(options: FrontOptions, spool: Path) -> "Builds | None":
    """Return what builds images of sources; None: nobody does."""
    from gpufaas_apps.docker_builder import DockerBuilder
    from gpufaas_gateway.builds import Builds, BuildSettings

    if options.builder_secret is None:
        return None
    try:
        secret = options.builder_secret.read_bytes()
    except OSError as exc:
        raise InvalidSpec(f"--builder-secret {options.builder_secret}: {exc.strerror}") from exc
    settings = BuildSettings(secret, _build_key(options.data / "builder"), spool, options.max_body)
    return Builds(DockerBuilder(pushes=options.builder_push), settings)


def _build_key(directory: Path) -> str:
    """Return the private key that build secrets are sealed for, made if need be."""
    from gpufaas_core.sealing import make_keys

    file = directory / "key"
    try:
        if not file.exists():
            directory.mkdir(mode=0o700, exist_ok=True)
            aside = directory / ".key"
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as made:
                made.write(make_keys().private)
            os.replace(aside, file)
        return file.read_text()
    except OSError as exc:
        raise _unusable(directory, exc) from exc


def _listen(host: str, port: int) -> socket.socket:
    """Bind before anything is started, so that a taken port costs nothing and is said in one line."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, proto)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as exc:
        raise GpufaasError(
            f"cannot listen on {host}:{port} ({exc.strerror or exc}): stop what is there, or choose another --port"
        ) from exc
    return listening


async def _serve(
    options: ServeOptions, credentials: "Credentials | None", spool: Path, listening: socket.socket
) -> None:
    from gpufaas_apps.engines import opened_engine
    from gpufaas_apps.front import Front
    from gpufaas_apps.inner_door import InnerDoor
    from gpufaas_cache_manager.artifacts import ArtifactStore
    from gpufaas_cache_manager.bundles import BundleStore
    from gpufaas_cache_manager.collect import collect
    from gpufaas_core.logs import FunctionLogs
    from gpufaas_core.origin import Origins
    from gpufaas_gateway.async_queue import SqliteAsyncQueue
    from gpufaas_gateway.secret_files import SecretFiles
    from gpufaas_gateway.store import SqliteStore
    from gpufaas_gpu_manager.devices import open_devices
    from gpufaas_gpu_manager.enforcement import Enforcement
    from gpufaas_gpu_manager.node import Node
    from gpufaas_gpu_manager.settings import NodeSettings
    from gpufaas_scheduler.journal import Header
    from gpufaas_scheduler.scaler import Scaler, Watched
    from gpufaas_scheduler.service import SchedulerService

    builds = _builds(options, spool)
    origins = Origins()
    enforcement = Enforcement(options.memory_enforcement)
    devices = open_devices(options.devices, _NODE, options.labels, enforcement.name)
    fatal: list[BaseException] = []
    epoch = time.time_ns() // 1_000_000  # grows from run to run: leases of an earlier run are refused
    header = Header(
        policy=options.policy,
        o3_limit=options.o3_limit,
        wait_bound_s=options.wait_bound_s,
        replacement=options.replacement,
        epoch=epoch,
        max_queue=max(_MAX_QUEUE_IN_ALL, options.max_queue),
    )
    engine = header.engine()
    journal = _open_journal(options.journal, header) if options.journal else None

    def stop_for(error: BaseException) -> None:
        """The scheduler failed: whoever waits is answered, and the process ends loudly."""
        fatal.append(error)
        front.server.should_exit = True

    door = InnerDoor(options.host, options.port, guarded=credentials is not None)
    service = SchedulerService(engine, journal=journal, on_fatal=stop_for)
    artifacts = ArtifactStore(options.data / "artifacts")
    logs = FunctionLogs(options.data / "logs")
    store = SqliteStore(options.data / "gpufaas.db")
    secrets = SecretFiles(options.data / "secrets", options.data / "secret-mounts")
    # Of this data directory: what another platform on this machine runs is left alone.
    instance = hashlib.sha256(bytes(options.data)).hexdigest()[:16]
    containers = await opened_engine(options.functions, instance, options.port, door.found)
    bundles = BundleStore(options.data / "bundles", artifacts)
    node = Node(
        devices,
        bundles,
        logs,
        service.report,
        logging.getLogger("node").warning,
        NodeSettings(
            env={"OPENFAAS_URL": f"http://{_reached_at(options.host)}:{options.port}"}, secrets=secrets, origins=origins
        ),
        containers,
        enforcement=enforcement,
    )
    service.join(node, node.devices())
    gone: list[str] = []  # lines for people, one for each device that was given up

    def lose(note: str) -> None:
        gone.append(note)
        logging.getLogger("node").error("%s", note)

    async_queue = SqliteAsyncQueue(options.data / "async")
    front = Front(
        options, credentials, spool, store=store, artifacts=artifacts, workers=node.functions, scheduler=service,
        node=node.leases, secrets=secrets, logs=logs, async_queue=async_queue, usage_of=node.host.usage_of,
        end_logs=logs.end_followers, builds=builds, door=door, fault=lambda: node.fault, origins=origins, gone=gone,
        makes=lambda: node.makes,
    )  # fmt: skip
    catalogue, async_calls = front.catalogue, front.async_calls

    def watched() -> dict[str, Watched]:
        """Functions whose labels say something about scaling, and their load."""
        ruled = [(each, each.scaling) for each in catalogue.everywhere() if each.unavailable is None]
        by_cpu = any(rule is not None and rule.type == "cpu" for _, rule in ruled)
        cpu_s = node.host.cpu_seconds() if by_cpu else {}
        pending = async_calls.backlog.counts()
        return {
            each.full_name: Watched(
                each.function_id, rule, each.stats.begun, each.stats.finished, each.stats.inflight,
                pending.get(each.full_name, 0), cpu_s.get(each.function_id, 0.0),
            )
            for each, rule in ruled
            if rule is not None
        }  # fmt: skip

    scaler = Scaler(watched, service.status, service.scale)
    stopped = asyncio.Event()

    def learn() -> None:
        for each in service.take_learnt():
            front.keeper.learn(each)

    async def tidy() -> None:
        """Collect what no function uses any more, once at the start and every hour."""
        while not stopped.is_set():
            used = {each.spec.digest for each in catalogue.everywhere() if not each.spec.image}
            try:
                await asyncio.to_thread(collect, artifacts, bundles, used, time.time() - _KEEP_UNUSED_S)
            except StorageFailed as exc:
                logging.getLogger("artifacts").warning("not collected, will be tried again: %s", exc)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _COLLECT_EVERY_S)

    async def load() -> None:
        await front.deployer.load()
        async_calls.begin()
        await tidy()  # only what is loaded is known to be used

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(front.ended(load()))
            tasks.create_task(front.ended(async_calls.run()))
            tasks.create_task(front.ended(front.keeper.keep(stopped, learn)))
            tasks.create_task(front.ended(scaler.run(stopped)))
            tasks.create_task(front.ended(_until(stopped, node.watch_devices(lose))))
            tasks.create_task(_start_workers(options, credentials, node, front))
            await front.serve(listening, stopped)
    finally:
        # From the outside in: the door is closed, calls are drained; now workers, then what they wrote to.
        await front.callbacks.close()
        await node.close()
        async_queue.close()
        logs.close()
        store.close()
        if journal is not None:
            journal.close()
    if fatal:
        raise GpufaasError(f"the scheduler failed and the platform stopped: {fatal[0]!r}") from fatal[0]


def _open_journal(path: Path, header: "Header") -> "Journal":
    from gpufaas_scheduler.journal import Journal

    try:
        return Journal(path, header)
    except FileExistsError:
        raise InvalidSpec(
            f"--journal {path}: it is there already; name a new file, journals are not overwritten"
        ) from None
    except OSError as exc:
        raise StorageFailed(f"--journal {path}: it cannot be written ({exc.strerror})") from exc


async def _until(stopped: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Do *work*, which has no end, until *stopped*."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        waiting.cancel()


async def _start_workers(
    options: ServeOptions, credentials: "Credentials | None", node: "Node", front: "Front"
) -> None:
    """Once the door is open, start the zygote: importing torch takes a second, and needs nobody to wait for it."""
    if not await front.started():
        return
    await node.start()
    shown = _reached_at(options.host)
    lines = [f"gateway    http://{shown}:{options.port}      OpenFaaS API; stop with Ctrl-C"]
    limit = f", limit {options.o3_limit}" if options.policy == "lalb-o3" else ""
    if options.policy == "least-wait":
        limit = f", wait bound {options.wait_bound_s:g} s"
    lines.append(f"scheduler  {options.policy}{limit}")
    for device in node.devices():
        how = ENFORCED_BY.get(device.labels.get(MEMORY, ""), "")
        kind = f"CPU device, memory limit enforced {how}" if how else device.kind
        own = ", ".join(f"{key}={value}" for key, value in device.labels.items() if key not in PLATFORM_LABELS)
        lines.append(f"device     {device.id}  {format_bytes(device.memory)}  {kind}{'  ' * bool(own)}{own}")
    lines.append(f"data       {options.data}")
    if options.builder_secret is not None:
        pushed = "pushed to their registries" if options.builder_push else "kept in Docker's engine here"
        lines.append(f"builder    images of sources signed with {options.builder_secret}, {pushed}")
    if credentials is not None:
        from gpufaas_gateway.auth import PASSWORD_FILE

        lines.append(f"auth       user {credentials.user}, password in {_auth_dir(options) / PASSWORD_FILE}")
    for line in lines:
        print(f"✓ {line}", flush=True)
    if node.enforcement.why:
        print(f"! {node.enforcement.why}", file=sys.stderr, flush=True)
    if credentials is None and not _is_loopback(options.host):
        print(
            f"! whoever reaches {options.host}:{options.port} can deploy code: --auth is off",
            file=sys.stderr,
            flush=True,
        )
    print(f"ready in {_age_s():.1f} s (pid {os.getpid()})", flush=True)
    notify("READY=1")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reached_at(host: str) -> str:
    """Return the host to call from this machine."""
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def _age_s() -> float:
    """Return the seconds since this process was started, the interpreter's own start included."""
    with open("/proc/self/stat", "rb") as stat:
        ticks = int(stat.read().rpartition(b")")[2].split()[19])  # field 22, starttime
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
