"""
What it costs to be a cluster: a warm call through gateway, scheduler and node as processes of their own against the
same call embedded, what etcd behind the scheduler costs, and how many placements a second one scheduler makes.

    .venv/bin/python benchmarks/cluster.py [--seconds 3] [--rounds 3] [--only warm|store|placements]
                                               [--base TREE] [--json [FILE]]

warm        `echo` (1 KB) by wrk at 1 and 16 connections, rounds of A B A B, the ratio taken round by round (needs etcd
            and wrk: apt install etcd-server wrk)
store       a scheduler's warm path (place, finish), in process, with its state written behind to etcd, and to nothing
placements  a scheduler of its own process, 100 nodes of 8 devices that connect over TCP, a gateway with 256 calls in
            flight; placements per second of the scheduler's CPU time; the process that plays the nodes does not count

--base: all three beside another working tree's (`_base.py`): processor time of a call of all three processes and their
workers, of the scheduler's path with its state in etcd, of a placement.
"""

import argparse
import asyncio
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from _base import aside, measure, options_of, pairs_of
from _judged import Bar, least, most, status_of
from _pairs import CPU, Limit, Pairs, Row, load, write_json
from _platform import ROOT, free_port, gpufaas, platform, started
from _servers import Served, Tree
from _started import code
from _wrk import BODY, LUA, need_wrk, wrk
from rich.console import Console

from gpufaas_cluster import control
from gpufaas_cluster.connection import Identity, connect
from gpufaas_cluster.leader import Leader
from gpufaas_cluster.scheduler_server import SchedulerServer
from gpufaas_core import messages as m
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.files import remove_tree
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Need, Profile
from gpufaas_core.snapshot import DeviceSnapshot, NodeSnapshot
from gpufaas_scheduler.journal import Header
from gpufaas_scheduler.service import SchedulerService

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.etcd_process import EtcdProcess

CONNECTIONS = (1, 16)
NODES, DEVICES, IN_FLIGHT = 100, 8, 256
FUNCTIONS = [f"f{index}" for index in range(NODES * DEVICES // 2)]
WARM = (Limit("p50_ms", "at most", 1.6), Limit("rps", "at least", 0.65))
STORE, PLACEMENTS = 1.10, 5_000
TOKEN = b"a token for a benchmark"


@contextlib.contextmanager
def cluster(tree: Path = ROOT) -> Iterator[Served]:
    """Serve `echo` by a cluster of one gateway, one scheduler and one node on this machine, and a real etcd."""
    home = Path(tempfile.mkdtemp(prefix="gpufaas-bench-"))
    (home / "token").write_text("0123456789abcdef" * 4)
    with contextlib.ExitStack() as stack:
        stack.callback(remove_tree, home)
        etcd = stack.enter_context(EtcdProcess())
        shared = ["--etcd", etcd.endpoint, "--token-file", str(home / "token")]

        def start(role: str, *arguments: str) -> int:
            port = free_port()
            command = [role, "--id", role, "--status-port", str(port), *shared, *arguments]
            out = (home / f"{role}.log").open("wb")
            stack.callback(out.close)
            url = f"http://127.0.0.1:{port}/readyz"
            return stack.enter_context(started(tree, command, url, stdout=out, stderr=out)).pid

        scheduler = start("scheduler", "--listen", f"127.0.0.1:{free_port()}")
        node = ("--listen", f"127.0.0.1:{free_port()}", "--data", str(home / "node"), "--device", "cpu:0=1GiB")
        port = free_port()
        pids = (start("node", *node), start("gateway", "--port", str(port), "--data", str(home / "gateway")), scheduler)
        yield Served({"echo": echo(f"http://127.0.0.1:{port}", tree)}, Tree(*pids))


def echo(url: str, tree: Path = ROOT) -> str:
    """Deploy `echo`; return its URL."""
    stack_file = ROOT / "functions" / "examples" / "stack.yaml"
    gpufaas(url, "up", "-f", str(stack_file), "--filter", "echo", cwd=stack_file.parent, tree=tree)
    return f"{url}/function/echo"


def warm(pairs: Pairs, options: argparse.Namespace) -> None:
    """Measure a cluster beside the call embedded, or beside that of the base."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(LUA % BODY)
        script.flush()
        path = Path(script.name)
        parts = {f"warm, {at} connections": load("echo", at, options.seconds, path) for at in CONNECTIONS}
        if options.base:
            measure(pairs, options, parts, cluster, lambda each: each.urls["echo"])
            return
        with platform("--device", "cpu:0=1GiB") as (url, child, _), cluster() as mine:
            sides = [mine, Served({"echo": echo(url)}, Tree(child.pid))]
            for each in sides:
                wrk(each.urls["echo"], 4, 1.0, path)
            pairs.measure(parts, sides)


# --- the store behind -------------------------------------------------------------------------------------------------


class _Node:
    """Ignores commands."""

    def execute(self, command: object) -> None:
        pass


async def _place_and_finish(service: SchedulerService, function: FunctionId, calls: int) -> float:
    """Return microseconds of this thread's CPU per call; the loop is let go now and then, to write behind."""
    spent = 0.0
    for at in range(calls):
        began = time.thread_time()
        grant = service.place(CallId(f"c{at}"), function, 60.0)
        assert isinstance(grant, m.Grant)
        if grant.cold:
            service.report(m.Loaded(grant.function, grant.device, 1.0, 10, grant.copy))
        service.report(m.Finished(grant.call, grant.device, 0.001))
        spent += time.thread_time() - began
        if at % 50 == 0:
            await asyncio.sleep(0)
    return spent / calls * 1e6


async def _store(rounds: int, calls: int) -> dict[str, object]:
    from gpufaas_adapters.etcd.client import Etcd, EtcdSettings, open_store
    from gpufaas_adapters.etcd.election import campaign
    from gpufaas_adapters.etcd.state import EtcdState
    from gpufaas_cache_manager.write_behind import WriteBehind

    rows = []
    with EtcdProcess() as process_:
        async with Etcd(EtcdSettings((process_.endpoint,))) as etcd:
            await open_store(etcd, print)
            leadership = await campaign(etcd, "bench", "127.0.0.1:1")
            written = 0
            for _ in range(rounds):
                row = []
                for behind in (False, True):
                    service = SchedulerService(Header(policy="lalb-o3").engine())
                    service.join(_Node(), [Device(DeviceId(f"n/cpu:{at}"), "cpu", 100) for at in range(2)])
                    function = Function(FunctionId("f"), "d", profiles={"*": Profile(1.0, 0.001, 10)})
                    service.deploy(function)
                    task = None
                    if behind:
                        state, driver = EtcdState(etcd, leadership.compare()), service.driver
                        writer = WriteBehind(state, driver.engine.take_changed, driver.doc, leadership.epoch)
                        service.driver.on_event = writer.note
                        task = asyncio.create_task(writer.run())
                    await _place_and_finish(service, function.id, 200)
                    row.append(await _place_and_finish(service, function.id, calls))
                    if task is not None:
                        written += writer.written
                        task.cancel()
                        await asyncio.gather(task, return_exceptions=True)
                rows.append(row)
            await leadership.resign()
    ratio = statistics.median(b / a for a, b in rows)
    return {
        "nothing_us": round(statistics.median(a for a, _ in rows), 1),
        "cpu_us": round(statistics.median(b for _, b in rows), 1),
        "ratio": round(ratio, 3),
        "docs_written": written,
    }


# --- placements -------------------------------------------------------------------------------------------------------


async def _scheduler_process() -> None:
    """A scheduler without a store: what is measured is the protocol and the engine."""
    server = SchedulerServer(Identity("scheduler", "bench", "b", TOKEN))
    port = await server.open("127.0.0.1:0")
    service = SchedulerService(Header(policy=os.environ.get("POLICY", "least-wait")).engine())
    leader = server.leads = Leader(service, 1)
    for name in FUNCTIONS:
        function = Function(FunctionId(name), "d", profiles={"*": Profile(0.001, 0.001, 10)}, max_queue=10_000)
        leader.deployed.deploy(function, WorkerSpec(FunctionId(name), name, "ns", "d", "model", Need()))
    leader.lead(set(), m.Restored())
    print(port, flush=True)
    await asyncio.Event().wait()


async def _play(port: int, seconds: float, cpu_s: "CpuClock") -> dict[str, object]:
    """Be 100 nodes and a gateway: a call that is granted is finished at once, and the next one placed."""
    links = {}
    for number in range(NODES):
        name = f"n{number}"
        link = await connect(f"127.0.0.1:{port}", Identity("node", name, "b", TOKEN))

        def on_message(message: object, link: object = link) -> None:
            if isinstance(message, control.ExecuteCommand) and isinstance(message.command, m.StartCall | m.LoadCopy):
                load = message.command.grant if isinstance(message.command, m.StartCall) else message.command
                link.send(control.NodeEvent(m.Loaded(load.function, load.device, 0.001, 10)))  # type: ignore[attr-defined]

        link.attend(on_message).add_done_callback(lambda lost: print("node lost:", lost.result()))
        devices = tuple(DeviceSnapshot(Device(DeviceId(f"{name}/cpu:{at}"), "cpu", 30)) for at in range(DEVICES))
        link.send(
            control.NodeJoins("127.0.0.1:1", msgspec.Raw(msgspec.msgpack.encode(NodeSnapshot(devices))), time.time())
        )
        links[name] = link
    gateway = await connect(f"127.0.0.1:{port}", Identity("gateway", "g", "b", TOKEN))
    placed = 0
    serial = 0

    def place() -> None:
        nonlocal serial
        serial += 1
        function = FunctionId(FUNCTIONS[serial * 7919 % len(FUNCTIONS)])
        gateway.send(control.PlaceCall(CallId(f"c{serial}#@g.b"), function, 60.0))

    def on_answer(message: object) -> None:
        nonlocal placed
        if isinstance(message, control.Granted):
            placed += 1
            grant = message.grant
            node = links[grant.device.partition("/")[0]]
            node.send(control.NodeEvent(m.Finished(grant.call, grant.device, 0.001)))
            place()
        elif isinstance(message, control.CallRejected):
            raise SystemExit(f"rejected: {message.message}")

    gateway.attend(on_answer).add_done_callback(lambda lost: print("gateway lost:", lost.result()))
    gateway.send(control.RunningCalls([]))
    for _ in range(IN_FLIGHT):
        place()
    await asyncio.sleep(8.0)  # until what is called is resident, and copies of it where they help
    began, cpu_began, placed_began = time.perf_counter(), cpu_s(), placed
    await asyncio.sleep(seconds)
    wall_s, cpu_used_s, done = time.perf_counter() - began, cpu_s() - cpu_began, placed - placed_began
    return {
        "placements": done,
        "per_s": round(done / wall_s),
        "per_cpu_s": round(done / cpu_used_s),
        "cpu_us": round(cpu_used_s / done * 1e6, 1),
    }


class CpuClock:
    """CPU seconds of a process."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")

    def __call__(self) -> float:
        fields = self._stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def placements(seconds: float) -> dict[str, object]:
    import uvloop

    command = [sys.executable, __file__, "--be-scheduler"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            port = int(child.stdout.readline())
            return uvloop.run(_play(port, seconds, CpuClock(child.pid)))
        finally:
            child.kill()


def bars(found: dict[str, Any]) -> list[Bar]:
    judged = []
    if "store" in found:
        judged.append(most("state in etcd: times the scheduler's CPU", found["store"]["ratio"], STORE))
    if "placements" in found:
        judged.append(least("placements per CPU second", found["placements"]["per_cpu_s"], PLACEMENTS))
    return judged


def with_base(options: argparse.Namespace) -> int:
    """Compare with the base; return the exit status."""

    def of(tree: Path, only: str) -> Row:
        found = aside(tree, "--only", only, "--rounds", "1", "--seconds", f"{options.seconds:g}")
        return {CPU: found[only]["cpu_us"]}

    pairs = pairs_of(options)
    chosen = [options.only] if options.only else ["placements", "store", "warm"]
    parts = {each: functools.partial(of, only=each) for each in chosen if each != "warm"}
    measure(pairs, options, parts, contextlib.nullcontext)
    if "warm" in chosen:
        warm(pairs, options)
    return pairs.finish(options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--only", choices=("warm", "store", "placements"))
    parser.add_argument("--json", nargs="?", const=True, type=Path, metavar="FILE", help="instead of a table")
    parser.add_argument("--be-scheduler", action="store_true", help=argparse.SUPPRESS)
    options = options_of(parser, rounds=3)
    if options.be_scheduler:
        import uvloop

        uvloop.run(_scheduler_process())
        return 0
    if options.only in (None, "warm"):
        need_wrk()
    if options.base:
        return with_base(options)
    console = Console(stderr=True)
    found: dict[str, Any] = {}
    if options.only in (None, "placements"):
        found["placements"] = placements(options.seconds)
        console.log(f"placements: {found['placements']}")
    if options.only in (None, "store"):
        found["store"] = asyncio.run(_store(options.rounds, 5_000))
        console.log(f"store: {found['store']}")
    pairs = Pairs(("cluster", "embedded"), options.rounds, *WARM)
    if options.only in (None, "warm"):
        warm(pairs, options)
    if options.json:
        write_json({**found, "warm": pairs.found, "code": code()}, options.json)
    elif pairs.found:
        Console(width=max(Console().width, 120)).print(pairs.table())
    return status_of([*bars(found), *pairs.bars()])


if __name__ == "__main__":
    raise SystemExit(main())
