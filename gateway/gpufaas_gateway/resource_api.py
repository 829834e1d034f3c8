"""The management routes of what functions live in and read: namespaces and quotas, secrets (openfaas.md §3.8, §3.9)."""

import asyncio
from typing import Final

from fastapi import FastAPI, Request, Response

from gpufaas_core.errors import InvalidSpec
from gpufaas_gateway.answers import json_answer, read_body, starting
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.ports import Secrets
from gpufaas_gateway.spec import DEFAULT_NAMESPACE, check_secret
from gpufaas_gateway.wire import FunctionNamespace, NamespaceQuota, Secret, namespace_fields, parse, quota_fields

# The documentation says one thing, the SDKs another, faas-cli adds a slash: all of them are meant (§3.2, appendix C).
_ALL: Final = ("/system/namespaces", "/system/namespaces/", "/system/namespace", "/system/namespace/")
_ONE: Final = ("/system/namespace/{name}", "/system/namespaces/{name}")


def add_namespace_routes(app: FastAPI, deployer: Deployer) -> None:
    catalogue, namespaces = deployer.catalogue, deployer.namespaces

    async def show_all() -> Response:
        # Strings, not objects: Go clients cannot read anything else.
        return json_answer(namespaces.names()) if catalogue.loaded else starting()

    async def show(name: str) -> Response:
        return json_answer(namespace_fields(namespaces.get(name))) if catalogue.loaded else starting()

    async def create(request: Request) -> Response:
        asked = await read(request)
        if not catalogue.loaded:
            return starting()
        await namespaces.create(asked.namespace())
        return Response(status_code=201)

    async def update(request: Request) -> Response:
        asked = await read(request)
        if not catalogue.loaded:
            return starting()
        await namespaces.update(asked.namespace())
        return Response(status_code=202)

    async def remove(request: Request) -> Response:
        asked = await read(request)
        if not catalogue.loaded:
            return starting()
        await namespaces.remove(asked.name)
        return Response(status_code=202)

    async def read(request: Request) -> FunctionNamespace:
        """Return what is asked for: the name may be in the path, in the body, or in both."""
        name: str | None = request.path_params.get("name")
        body = await read_body(request)
        if name is not None and not body:
            return FunctionNamespace(name=name)
        asked = parse(FunctionNamespace, body)
        if name is not None and asked.name not in ("", name):
            raise InvalidSpec(f"name: the body says {asked.name[:80]!r}, the path {name[:80]!r}: which one is meant?")
        if not (name or asked.name):
            raise InvalidSpec("name is missing")
        return asked.model_copy(update={"name": name or asked.name})

    for path in _ALL:
        app.get(path)(show_all)
    for path in _ONE:
        app.get(path)(show)
    for path in (*_ALL, *_ONE):
        app.post(path)(create)
        app.put(path)(update)
        app.delete(path)(remove)


def add_quota_routes(app: FastAPI, deployer: Deployer) -> None:
    """Ours: OpenFaaS has no quotas."""
    catalogue, namespaces, quotas = deployer.catalogue, deployer.namespaces, deployer.quotas

    @app.get("/system/namespace/{name}/quota")
    async def show_quota(name: str) -> Response:
        if not catalogue.loaded:
            return starting()
        namespaces.get(name)
        return json_answer(quota_fields(name, quotas.get(name), deployer.used(name)))

    @app.put("/system/namespace/{name}/quota")
    async def set_quota(name: str, request: Request) -> Response:
        asked = parse(NamespaceQuota, await read_body(request))
        if not catalogue.loaded:
            return starting()
        namespaces.get(name)
        if asked.namespace not in (None, name):
            raise InvalidSpec(
                f"namespace: the body says {asked.namespace[:80]!r}, the path {name[:80]!r}: which one is meant?"
            )
        with namespaces.entered(name):
            await quotas.put(name, asked.quota())
        return Response(status_code=202)

    @app.delete("/system/namespace/{name}/quota")
    async def clear_quota(name: str) -> Response:
        if not catalogue.loaded:
            return starting()
        namespaces.get(name)
        with namespaces.entered(name):
            await quotas.remove(name)
        return Response(status_code=202)


def add_secret_routes(app: FastAPI, deployer: Deployer, secrets: Secrets) -> None:
    catalogue, namespaces = deployer.catalogue, deployer.namespaces

    @app.get("/system/secrets")
    async def list_secrets(request: Request) -> Response:
        if not catalogue.loaded:
            return starting()
        namespace = request.query_params.get("namespace") or DEFAULT_NAMESPACE
        names = await asyncio.to_thread(secrets.names, namespace) if namespace in namespaces.names() else []
        return json_answer([{"name": name, "namespace": namespace} for name in names])

    @app.post("/system/secrets")
    async def create_secret(request: Request) -> Response:
        asked, namespace = await read(request)
        value = asked.bytes_of_value()
        if not catalogue.loaded:
            return starting()
        with namespaces.entered(namespace):
            await asyncio.to_thread(secrets.create, namespace, asked.name, value)
        return Response(status_code=201)

    @app.put("/system/secrets")
    async def update_secret(request: Request) -> Response:
        asked, namespace = await read(request)
        value = asked.bytes_of_value()
        if not catalogue.loaded:
            return starting()
        namespaces.get(namespace)
        await asyncio.to_thread(secrets.update, namespace, asked.name, value)
        return Response(status_code=202)

    @app.delete("/system/secrets")
    async def remove_secret(request: Request) -> Response:
        asked, namespace = await read(request)
        if not catalogue.loaded:
            return starting()
        namespaces.get(namespace)
        await asyncio.to_thread(secrets.remove, namespace, asked.name)
        return Response(status_code=202)

    async def read(request: Request) -> tuple[Secret, str]:
        asked = parse(Secret, await read_body(request))
        check_secret(asked.name)
        return asked, asked.namespace or request.query_params.get("namespace") or DEFAULT_NAMESPACE
