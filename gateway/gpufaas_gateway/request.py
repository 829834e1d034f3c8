"""What a front asks of `calls.Calls`, without types of a protocol."""

from collections.abc import Sequence

from msgspec import Struct

from gpufaas_core.driven import Driven
from gpufaas_core.messages import Outer
from gpufaas_gateway.call_body import Caller
from gpufaas_gateway.call_headers import Header, ReadHead


class Request(Struct):
    """A call as its caller makes it."""

    name: str
    """The name of the function, ``NAME`` or ``NAME.NAMESPACE``."""
    method: str = "POST"
    path: str = "/"
    """Raw, what follows the name; begins with ``/``."""
    query: bytes = b""
    headers: Sequence[Header] = ()
    """Names in lower case; not changed."""
    body: bytes | None = b""
    """The whole body; None: it comes from `caller`."""
    caller: Caller | None = None
    """Who may go away before there is an answer; None: nobody can."""
    client: tuple[str, int] | None = None
    """The caller's address and port, if there is a connection."""
    outer: Outer | None = None
    """The worker that makes the call; None: the call comes from outside."""
    upgrade: Sequence[Header] = ()
    """
    Headers that ask the function to switch protocols. The answer is then a stream in both directions, and the time
    limit of the call holds only until it begins.
    """
    read: ReadHead | None = None
    """What was read in the headers, if they were read; not changed."""
    driven: Driven | None = None
    """What runs the call; None: the current task."""
