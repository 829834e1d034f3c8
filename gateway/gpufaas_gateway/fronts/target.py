"""What the URL of a call says."""

from collections.abc import Callable

from msgspec import Struct

from gpufaas_core.messages import Outer
from gpufaas_gateway.answering import RunEarly


class Target(Struct, frozen=True):
    """See module. A connection keeps it for as long as its requests have the same URL."""

    run: RunEarly
    """Runs the call: `Calls.run`, or what its front does around that."""
    name: str
    """The name of the function, as in `Request`; also *path* and *query*."""
    path: str
    query: bytes
    outer: Outer | None
    """The worker that makes the call, by the token in its address."""


ReadTarget = Callable[[bytes, bytes, Outer | None], Target]
"""Returns what a URL says: given what follows the prefix of the front, the query, and the worker that calls."""
