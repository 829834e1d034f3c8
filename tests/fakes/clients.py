"""Both clients behind one interface, so that each test tests both."""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, cast

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

import gpufaas

Connect = Callable[..., gpufaas.Client]


class Driven:
    """An object whose methods are awaited, used as if they blocked; what they return is, too."""

    def __init__(self, portal: BlockingPortal, target: object) -> None:
        self._portal = portal
        self._target = target

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        return (lambda *args, **kwargs: self._driven(found(*args, **kwargs))) if callable(found) else found

    def __iter__(self) -> Iterator[Any]:
        parts = cast(AsyncIterator[Any], aiter(self._target))  # type: ignore[call-overload]

        async def following() -> Any:
            return await anext(parts, self)

        while (part := self._portal.call(following)) is not self:
            yield part

    def _driven(self, made: object) -> Any:
        if isinstance(made, Coroutine):

            async def ended() -> Any:
                return await made

            found = self._portal.call(ended)
            return Driven(self._portal, found) if isinstance(found, gpufaas.AsyncCall) else found
        if isinstance(made, AbstractAsyncContextManager):
            return self._opened(made)
        return made

    @contextmanager
    def _opened(self, made: AbstractAsyncContextManager[Any]) -> Iterator[Any]:
        with self._portal.wrap_async_context_manager(made) as found:
            yield Driven(self._portal, found)


@pytest.fixture(params=["Client", "AsyncClient"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """``connect(url, …)`` gives a client, closed after the test."""
    made: list[Any] = []
    with start_blocking_portal() as portal:

        def connect(*args: Any, **kwargs: Any) -> Any:
            client = getattr(gpufaas, request.param)(*args, **kwargs)
            made.append(client if request.param == "Client" else Driven(portal, client))
            return made[-1]

        yield connect
        for each in made:
            each.close() if request.param == "Client" else each.aclose()
