"""The management routes among fakes, with clients of them."""

from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from fastapi import FastAPI
from tests.unit.gateway.fakes import FakeScheduler, FakeWorkers, MemoryArtifacts, MemorySecrets, MemoryStore

from gpufaas_core.logs import FunctionLogs
from gpufaas_core.model import Device, DeviceId, FunctionId
from gpufaas_core.units import GiB
from gpufaas_gateway.api import management_app
from gpufaas_gateway.auth import CleanPaths, Credentials, Guard
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.keeper import Keeper
from gpufaas_gateway.metrics import Metrics

CREDENTIALS = Credentials("admin", "pass:wörd")
DEVICE = Device(DeviceId("n1/cpu:0"), "cpu", 2 * GiB)


class Gateway:
    """The app among fakes; `client` meets it as on loopback, `stranger` and `admin` where passwords are asked for."""

    def __init__(self, root: Path) -> None:
        self.store = MemoryStore()
        self.artifacts = MemoryArtifacts()
        self.secrets = MemorySecrets()
        self.workers = FakeWorkers(DEVICE)
        self.scheduler = FakeScheduler(DEVICE)
        self.metrics = Metrics(self.scheduler.status)
        self.logs = FunctionLogs(root / "logs")
        self.usage: dict[FunctionId, tuple[float, int]] = {}
        self.deployer = Deployer(
            self.store, self.artifacts, self.workers, self.scheduler, self.metrics,
            secrets=self.secrets, clock=lambda: 1_795_215_653.5,
        )  # fmt: skip
        self.catalogue = self.deployer.catalogue
        self.keeper = Keeper(self.store, self.catalogue)
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
        found = self.catalogue.find(f"{name}.{fields.get('namespace', 'openfaas-fn')}")
        assert found is not None
        return found.function_id

    async def delete(self, body: object) -> httpx.Response:
        return await self.client.request("DELETE", "/system/functions", json=body)


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


async def raw_get(app: Any, target: str, **headers: str) -> httpx.Response:
    """GET *target* as it stands: httpx would clean it first."""
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    raw_path, _, query = target.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
        "scheme": "http", "path": unquote(raw_path), "raw_path": raw_path.encode(), "query_string": query.encode(),
        "root_path": "", "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8080),
    }  # fmt: skip
    await app(scope, receive, send)
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
