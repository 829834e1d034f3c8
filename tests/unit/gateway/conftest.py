"""The management routes among fakes, with clients of them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
import uvicorn
import uvloop
from fastapi import FastAPI
from tests.unit.gateway.fakes import FakeScheduler, FakeWorkers, MemoryArtifacts, MemorySecrets, MemoryStore
from tests.unit.planner.fakes import MemoryPlans
from tests.waiting import LIMIT_S

from gpufaas_core.logs import FunctionLogs
from gpufaas_core.model import Device, DeviceId, FunctionId
from gpufaas_core.origin import Origins
from gpufaas_core.units import GiB
from gpufaas_gateway.answering import RunEarly
from gpufaas_gateway.api import management_app
from gpufaas_gateway.auth import CleanPaths, Credentials, Guard
from gpufaas_gateway.calls import Calls
from gpufaas_gateway.catalogue import ServedRevision
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.fronts.openfaas import PREFIX, OpenFaasFront
from gpufaas_gateway.fronts.table import Fronts
from gpufaas_gateway.http import lingering
from gpufaas_gateway.http.connection import HttpConnection
from gpufaas_gateway.http.exchange import HttpFront
from gpufaas_gateway.keeper import Keeper
from gpufaas_gateway.metrics import Metrics
from gpufaas_planner.plans import Plans

CREDENTIALS = Credentials("admin", "pass:wörd")
DEVICE = Device(DeviceId("n1/cpu:0"), "cpu", 2 * GiB)


class Gateway:
    """The app among fakes; `client` meets it as on loopback, `stranger` and `admin` where passwords are asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = MemoryStore()
        self.artifacts = MemoryArtifacts()
        self.secrets = MemorySecrets()
        self.workers = FakeWorkers(DEVICE)
        self.scheduler = FakeScheduler(DEVICE)
        self.metrics = Metrics(
            self.scheduler.status,
            lambda: [(each.stats, each.replicas, each.options.scaling) for each in self.catalogue.everywhere()],
        )
        self.logs = FunctionLogs(root / "logs")
        self.usage: dict[FunctionId, tuple[float, int]] = {}
        self.deployer = Deployer(
            self.store, self.artifacts, self.workers, self.scheduler,
            secrets=self.secrets, clock=lambda: 1_795_215_653.5,
        )  # fmt: skip
        self.catalogue = self.deployer.catalogue
        self.keeper = Keeper(self.store, self.catalogue)
        self.plans = Plans(
            MemoryPlans(),
            lambda: {each.full_name: each.function for each in self.catalogue.everywhere()},
            self.workers.devices,
        )
        self.app: FastAPI = management_app(
            self.deployer, self.scheduler, self.logs, self.artifacts, self.metrics, self.secrets,
            version="0.1.0", usage_of=self._usage_of,
        )  # fmt: skip
        self.client = client_of(CleanPaths(self.app))
        self.guarded = CleanPaths(Guard(self.app, CREDENTIALS))
        self.stranger, self.admin = client_of(self.guarded), client_of(self.guarded)
        self.admin.auth = (CREDENTIALS.user, CREDENTIALS.password)
        self.bundle = self.artifacts.add(b"bundle")
        self.workers.bundle(self.bundle)

    async def _usage_of(self, function: FunctionId) -> tuple[float, int] | None:
        return self.usage.get(function)

    def body(self, name: str = "echo", **fields: object) -> dict[str, object]:
        return {"service": name, "image": "echo:1", "annotations": {"gpufaas.bundle": self.bundle}, **fields}

    async def deployed(self, name: str = "echo", **fields: object) -> FunctionId:
        answer = await self.client.post("/system/functions", json=self.body(name, **fields))
        assert answer.status_code == 202, answer.text
        return self.found(f"{name}.{fields.get('namespace', 'openfaas-fn')}").function_id

    def found(self, name: str = "echo") -> ServedRevision:
        found = self.catalogue.find(name)
        assert found is not None
        return found

    async def calls(self, functions: Any, **annotations: str) -> Calls:
        """Deploy echo, with annotations of ours, and return what runs its calls: *functions* place and run them."""
        ours = {f"gpufaas.{name.replace('_', '-')}": value for name, value in annotations.items()}
        await self.deployed(annotations={"gpufaas.bundle": self.bundle, **ours})
        return Calls(self.catalogue, functions, functions, self.root)

    async def delete(self, body: object) -> httpx.Response:
        return await self.client.request("DELETE", "/system/functions", json=body)


OnLoop = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def on_loop(request: pytest.FixtureRequest) -> Iterator[OnLoop]:
    """Run a test on the loop of a gateway, whose transports are its own, and on asyncio's."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


async def nothing_else(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001 - as ASGI has it
    await send({"type": "http.response.start", "status": 418, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


def config_of(http: Any, app: Any, ws: Any = "none") -> uvicorn.Config:
    """Return the settings of a server of *app*. *http*: the class of its connections."""
    config = uvicorn.Config(
        app, interface="asgi3", http=http, ws=ws, lifespan="off", log_config=None, server_header=False,
        date_header=False, proxy_headers=False,
    )  # fmt: skip
    config.load()
    return config


@asynccontextmanager
async def listening(http: Any, app: Any = nothing_else, ws: Any = "none", **of_protocol: Any) -> AsyncIterator[int]:
    """Serve on a port, and give it. *http*: the class of its connections."""
    config = config_of(http, app, ws)
    state = uvicorn.server.ServerState()

    def connection() -> asyncio.Protocol:
        made: asyncio.Protocol = http(config=config, server_state=state, app_state={}, **of_protocol)
        return made

    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for each in list(state.connections):
            each.transport.abort()
        for sock in list(lingering._lingering):
            lingering.end(sock)
        async with asyncio.timeout(LIMIT_S):
            while state.tasks:
                await asyncio.sleep(0)


def front_of(run: RunEarly, origins: Origins | None = None) -> HttpFront:
    """Return what connections need to serve calls of functions as a gateway does."""
    calls = {PREFIX: OpenFaasFront(run)}
    fronts = Fronts(origins or Origins(), calls, websockets={}, posted={}, rest=nothing_else)
    return HttpFront(fronts.target)


@asynccontextmanager
async def serving(run: RunEarly, app: Any = nothing_else, origins: Origins | None = None) -> AsyncIterator[int]:
    """Serve calls of functions as a gateway does, and *app* for all else; give the port."""
    async with listening(HttpConnection, app, front=front_of(run, origins)) as port:
        yield port


@asynccontextmanager
async def calling(run: RunEarly, origins: Origins | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Give a client of a gateway that runs calls with *run*."""
    async with serving(run, origins=origins) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        yield client


def scope_of(method: str, target: str, **headers: str) -> dict[str, Any]:
    """Return what a server says of a request for *target* as it stands."""
    raw_path, _, query = target.partition("?")
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
        "scheme": "http", "path": unquote(raw_path), "raw_path": raw_path.encode(), "query_string": query.encode(),
        "root_path": "", "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8080),
    }  # fmt: skip


async def raw(app: Any, method: str, target: str, *received: dict[str, Any], **headers: str) -> httpx.Response:
    """Ask for *target* as it stands, which httpx would clean first; these messages come, or an empty body."""
    sent: list[MutableMapping[str, Any]] = []
    messages = iter(received or ({"type": "http.request", "body": b"", "more_body": False},))

    async def receive() -> MutableMapping[str, Any]:
        return next(messages)

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await app(scope_of(method, target, **headers), receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return httpx.Response(sent[0]["status"], headers=sent[0]["headers"], content=body)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    gateway = Gateway(tmp_path)
    await gateway.deployer.load()
    yield gateway
    for client in (gateway.client, gateway.stranger, gateway.admin):
        await client.aclose()
    gateway.logs.close()


def is_platform_error(answer: httpx.Response) -> bool:
    return (
        answer.headers["content-type"] == "text/plain; charset=utf-8"
        and answer.headers["x-openfaas-internal"] == "gateway"
        and answer.headers["x-content-type-options"] == "nosniff"
    )
