"""Deploys functions from a line of code, without a stack file."""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from typing import Any

import httpx

SERVER = """
import asyncio
import os
import uvloop
from aiohttp import web

%(answer)s

async def main():
    app = web.Application(client_max_size=%(most)d)
    app.router.add_route("*", "/{any:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(os.environ["PORT"]), backlog=1024).start()
    await asyncio.Event().wait()

uvloop.run(main())
"""
"""A program that listens on PORT. `answer`: the handler of that name; `most`: bytes of a body."""


def deploy(
    client: httpx.Client, name: str, program: str, *, kind: str, annotations: Mapping[str, str] | None = None
) -> None:
    """
    Deploy *program* as *name*.

    :param kind: ``server``: a program that listens on PORT; ``http``: a handler without a model
    """
    manifest: dict[str, Any] = {"kind": kind, "template": "benchmark"}
    file = "handler.py"
    if kind == "server":
        manifest["command"], file = ["python", "main.py"], "main.py"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path, text in (("gpufaas.json", json.dumps(manifest)), (f"function/{file}", program)):
            member = tarfile.TarInfo(path)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    digest = hashlib.sha256(packed.getvalue()).hexdigest()
    client.put(f"/system/artifacts/{digest}", content=packed.getvalue()).raise_for_status()
    spec = {"service": name, "image": name, "annotations": {"gpufaas.bundle": digest, **(annotations or {})}}
    answer = client.post("/system/functions", json=spec)
    if answer.is_error:
        raise SystemExit(f"{name}: {answer.text}")
