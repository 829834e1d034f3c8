"""The management routes of namespaces, quotas and secrets."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import APIRouter
from msgspec.structs import asdict

from gpufaas_core.errors import GpufaasError, InvalidSpec, NameTaken, StorageFailed, UnknownName
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.errors import NotEmpty
from gpufaas_gateway.names import check_secret
from gpufaas_gateway.ports import SecretStore
from gpufaas_gateway.spec import DEFAULT_NAMESPACE, Namespace, Quota
from gpufaas_gateway.typed_routes import refuses, router
from gpufaas_gateway.wire import (
    FunctionNamespace,
    InNamespace,
    NamespaceQuota,
    QuotaStatus,
    QuotaUsed,
    Secret,
    SecretName,
)

# OpenFaaS's documentation and its SDKs differ, and faas-cli adds a slash: all spellings are served (§3.2, appendix C).
_ALL: Final = ("/system/namespaces", "/system/namespaces/", "/system/namespace", "/system/namespace/")
_ONE: Final = ("/system/namespace/{name}", "/system/namespaces/{name}")
_QUOTA: Final = "/system/namespace/{name}/quota"
_SECRETS: Final = "/system/secrets"


def namespace_routes(deployer: Deployer) -> APIRouter:
    routes, namespaces = router(deployer.catalogue), deployer.namespaces

    async def list_namespaces() -> list[str]:
        # Strings, not objects: Go clients cannot read anything else.
        return namespaces.names()

    async def describe_namespace(name: str) -> Namespace:
        return namespaces.get(name)

    def named(name: str, asked: FunctionNamespace | None) -> Namespace:
        """Return the namespace that is meant; its name may be in the path, in the body, or in both."""
        if asked is None:
            return Namespace(name)
        if asked.name not in ("", name):
            raise InvalidSpec(f"name: the body says {asked.name[:80]!r}, the path {name[:80]!r}: use one name")
        if not name:
            raise InvalidSpec("name is missing")
        return Namespace(name, asked.labels, asked.annotations)

    def add(
        method: str, verb: str, status: int, act: Callable[[Namespace], Awaitable[None]], *errors: type[GpufaasError]
    ) -> None:
        async def by_body(asked: FunctionNamespace) -> None:
            await act(named(asked.name, asked))

        async def by_path(name: str, asked: FunctionNamespace | None = None) -> None:
            await act(named(name, asked))

        said = refuses(*errors, StorageFailed)
        for paths, handler, name in ((_ALL, by_body, verb), (_ONE, by_path, f"{verb}_by_path")):
            for path in paths:
                routes.add_api_route(path, handler, methods=[method], name=name, status_code=status, responses=said)

    for path in _ALL:
        routes.get(path)(list_namespaces)
    for path in _ONE:
        routes.get(path, responses=refuses(UnknownName))(describe_namespace)
    add("POST", "create_namespace", 201, namespaces.create, NameTaken)
    add("PUT", "update_namespace", 202, namespaces.update, UnknownName)
    add("DELETE", "remove_namespace", 202, lambda each: namespaces.remove(each.name), UnknownName, NotEmpty)
    return routes


def quota_routes(deployer: Deployer) -> APIRouter:
    """Return the routes of quotas, which OpenFaaS does not have."""
    routes, namespaces, quotas = router(deployer.catalogue), deployer.namespaces, deployer.quotas

    @routes.get(_QUOTA, responses=refuses(UnknownName))
    async def describe_quota(name: str) -> QuotaStatus:
        """The limits of a namespace, and what it uses."""
        namespaces.get(name)
        functions, gate = deployer.catalogue.all(name), quotas.gate(name)
        used = QuotaUsed(len(functions), sum(each.reserved for each in functions))
        if gate is not None:
            used.in_flight, used.waiting = gate.in_flight, gate.waiting
        return QuotaStatus(namespace=name, used=used, **asdict(quotas.get(name)))

    @routes.put(_QUOTA, status_code=202, responses=refuses(UnknownName, StorageFailed))
    async def set_quota(name: str, asked: NamespaceQuota) -> None:
        namespaces.get(name)
        if asked.namespace not in (None, name):
            raise InvalidSpec(
                f"namespace: the body says {asked.namespace[:80]!r}, the path {name[:80]!r}: use one name"
            )
        with namespaces.entered(name):
            await quotas.put(name, asked.to(Quota))

    @routes.delete(_QUOTA, status_code=202, responses=refuses(UnknownName, StorageFailed))
    async def remove_quota(name: str) -> None:
        namespaces.get(name)
        with namespaces.entered(name):
            await quotas.put(name, Quota())

    return routes


def secret_routes(deployer: Deployer, secrets: SecretStore) -> APIRouter:
    routes, namespaces = router(deployer.catalogue), deployer.namespaces

    @routes.get(_SECRETS, responses=refuses(StorageFailed))
    async def list_secrets(namespace: InNamespace = None) -> list[SecretName]:
        """Names of secrets, without values."""
        namespace = namespace or DEFAULT_NAMESPACE
        names = await asyncio.to_thread(secrets.names, namespace) if namespace in namespaces.names() else []
        return [SecretName(name=name, namespace=namespace) for name in names]

    @routes.post(_SECRETS, status_code=201, responses=refuses(NameTaken, StorageFailed))
    async def create_secret(asked: Secret, namespace: InNamespace = None) -> None:
        namespace, value = where(asked, namespace), asked.bytes_of_value()
        with namespaces.entered(namespace):
            await asyncio.to_thread(secrets.create, namespace, asked.name, value)

    @routes.put(_SECRETS, status_code=202, responses=refuses(UnknownName, StorageFailed))
    async def update_secret(asked: Secret, namespace: InNamespace = None) -> None:
        namespace, value = where(asked, namespace), asked.bytes_of_value()
        namespaces.get(namespace)
        await asyncio.to_thread(secrets.update, namespace, asked.name, value)

    @routes.delete(_SECRETS, status_code=202, responses=refuses(UnknownName, StorageFailed))
    async def remove_secret(asked: Secret, namespace: InNamespace = None) -> None:
        namespace = where(asked, namespace)
        namespaces.get(namespace)
        await asyncio.to_thread(secrets.remove, namespace, asked.name)

    def where(asked: Secret, namespace: str | None) -> str:
        check_secret(asked.name)
        return asked.namespace or namespace or DEFAULT_NAMESPACE

    return routes
