"""Who gets what from a status port."""

import os

import httpx
import pytest

from gpufaas_apps.status import Status, status_served
from gpufaas_core import peers

US = range(os.geteuid(), os.geteuid() + 1)


@pytest.mark.parametrize(("uids", "status"), [(range(0), 200), (US, 403)])
async def test_a_worker_gets_no_metrics_whomever_it_says_it_asks_for(
    uids: range, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "WORKERS", uids)
    async with (
        status_served(Status(ready=lambda: ""), "127.0.0.1", 0) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http,
    ):
        assert (await http.get("/metrics")).status_code == status
        assert (await http.get("/metrics", headers={"X-Forwarded-For": "192.0.2.7"})).status_code == status
        assert (await http.get("/readyz")).status_code == 200
