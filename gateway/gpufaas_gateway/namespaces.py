"""The namespaces: the default one, and those that users created."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from gpufaas_core.errors import InvalidSpec, NameTaken, UnknownName
from gpufaas_gateway.catalogue import Catalogue
from gpufaas_gateway.errors import NotEmpty
from gpufaas_gateway.names import check_namespace
from gpufaas_gateway.ports import SecretStore, Store
from gpufaas_gateway.quotas import NamespaceQuotas
from gpufaas_gateway.spec import DEFAULT_NAMESPACE, Namespace

log = logging.getLogger(__name__)

_DEFAULT: Final = Namespace(DEFAULT_NAMESPACE, {"openfaas": "1"}, {"openfaas": "1"})


@dataclass(eq=False)
class Namespaces:
    """The default namespace always exists, and cannot be changed. One event loop owns this."""

    store: Store
    secrets: SecretStore
    quotas: NamespaceQuotas
    catalogue: Catalogue
    _namespaces: dict[str, Namespace] = field(default_factory=lambda: {DEFAULT_NAMESPACE: _DEFAULT})
    _entering: Counter[str] = field(default_factory=Counter)

    async def load(self) -> None:
        """
        Read the namespaces from the store: at start, and when another gateway changed them.

        :raises StorageFailed: the store cannot be read
        """
        found = await asyncio.to_thread(self.store.namespaces)
        self._namespaces = {DEFAULT_NAMESPACE: _DEFAULT} | {each.name: each for each in found}

    def names(self) -> list[str]:
        return sorted(self._namespaces)

    def get(self, name: str) -> Namespace:
        """:raises UnknownName: it does not exist"""
        found = self._namespaces.get(name)
        if found is None:
            raise UnknownName(f"namespace {name[:80]} not found: GET /system/namespaces shows what there is")
        return found

    @contextmanager
    def entered(self, name: str) -> Iterator[None]:
        """
        Keep the namespace from being removed while something is put into it.

        :raises InvalidSpec: it does not exist
        """
        if name not in self._namespaces:
            raise InvalidSpec(
                f"namespace: {name[:80]!r} does not exist: create it first, with POST /system/namespace/ "
                "or 'gpufaas namespace create'"
            )
        self._entering[name] += 1
        try:
            yield
        finally:
            self._entering[name] -= 1

    async def create(self, namespace: Namespace) -> None:
        """
        :raises InvalidSpec: the name is malformed
        :raises NameTaken: it exists
        :raises StorageFailed: it could not be stored
        """
        check_namespace(namespace.name)
        if namespace.name in self._namespaces:
            raise NameTaken(f"namespace {namespace.name} exists: update it with PUT")
        await self._put(namespace)
        log.info("namespace.created name=%s", namespace.name)

    async def update(self, namespace: Namespace) -> None:
        """
        Replace labels and annotations.

        :raises InvalidSpec: it is the default namespace
        :raises UnknownName: it does not exist
        :raises StorageFailed: it could not be stored
        """
        self._check_alterable(namespace.name)
        await self._put(namespace)
        log.info("namespace.updated name=%s", namespace.name)

    async def remove(self, name: str) -> None:
        """
        Remove a namespace, its secrets and its quota.

        :raises InvalidSpec: it is the default namespace
        :raises UnknownName: it does not exist
        :raises NotEmpty: it has functions, or something is being put into it
        :raises StorageFailed: the store could not remove it; it stays
        """
        self._check_alterable(name)
        if self._entering[name] or self.catalogue.all(name):
            raise NotEmpty(f"namespace {name} has functions: remove them first, then the namespace")
        # Removed here before the store is asked, so that nothing enters meanwhile.
        removed = self._namespaces.pop(name)
        try:
            # In this order: after a kill half-way the namespace is still there, and can be removed again.
            await asyncio.to_thread(self.secrets.drop, name)
            await asyncio.to_thread(self.store.remove_quota, name)
            await asyncio.to_thread(self.store.remove_namespace, name)
        except BaseException:
            self._namespaces[name] = removed
            raise
        self.quotas.adopt(name, None)
        log.info("namespace.removed name=%s", name)

    async def _put(self, namespace: Namespace) -> None:
        with_this_name = self._namespaces.get(namespace.name)
        self._namespaces[namespace.name] = namespace  # at once: a second `create` meanwhile finds the name taken
        try:
            await asyncio.to_thread(self.store.put_namespace, namespace)
        except BaseException:
            if with_this_name is None:
                del self._namespaces[namespace.name]
            else:
                self._namespaces[namespace.name] = with_this_name
            raise

    def _check_alterable(self, name: str) -> None:
        if name == DEFAULT_NAMESPACE:
            raise InvalidSpec(f"name: {name} is the default namespace, which can be neither changed nor removed")
        self.get(name)
