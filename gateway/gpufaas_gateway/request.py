"""A call between a front and `calls.Calls`: request and answer, without types of a protocol."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol, Self

from msgspec import Struct

from gpufaas_core.driven import Driven
from gpufaas_core.errors import GpufaasError
from gpufaas_core.messages import Outer
from gpufaas_gateway.call_body import Caller
from gpufaas_gateway.call_headers import Header, ReadHead, error_headers
from gpufaas_gateway.catalogue import Deployed
from gpufaas_gateway.errors import status_of

SWITCHED: Final = 101


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
    send: "Callable[[Answer], None] | None" = None
    """
    Is given a whole answer before the call is counted, perhaps with its headers as lines. What it does not send, it
    sends when the call has ended.
    """


class Answer(Struct):
    """The function's answer, or the platform's own if there is an error."""

    status: int
    headers: list[Header]
    """Empty if there are `lines`."""
    body: bytes | memoryview = b""
    """The whole body, unless there is a `stream`. Memory for large ones is lent: do not keep it."""
    stream: "AnswerStream | None" = None
    lines: bytes = b""
    """The headers, Content-Length included, as they are sent."""
    error: GpufaasError | None = None
    """Why the function has not answered; `body` is its text."""


def refusal(error: GpufaasError, more: list[Header]) -> Answer:
    """Return the platform's answer to a call that ends with *error*; *more* are headers beside those of the error."""
    text = str(error).encode()
    return Answer(status_of(error), error_headers(error, len(text)) + more, text, error=error)


def let_go(error: BaseException | None) -> None:
    """
    Drop what *error*, which was handled, refers to: the frames that it went through refer to it again, and only the
    garbage collector could free them all.
    """
    while error is not None:
        following = error.__cause__ or error.__context__
        error.__traceback__ = error.__cause__ = error.__context__ = None
        error = following


class BrokenAnswer(Exception):
    """An answer broke off after it had begun. The caller must see that it is not whole. Not a bug of the platform."""


Run = Callable[[Request], Awaitable[Answer]]
"""`Calls.run`, as the fronts use it."""


class AnswerStream(Protocol):
    """
    The body of an answer that streams. Use it as a context, and read it within that.

    At the end of the context the rest is given up. A `GpufaasError` within it becomes `BrokenAnswer`.
    """

    @property
    def deployed(self) -> Deployed:
        """The revision that answers."""
        ...

    async def chunk(self) -> bytes | None:
        """
        Return the next piece; None at the end.

        :raises GpufaasError: it broke off
        """

    def pour(self, sink: Callable[[bytes], bool]) -> None:
        """Give further pieces to *sink* as they come, as long as it takes them; `chunk` returns the others."""

    async def send(self, data: bytes) -> None:
        """Send *data* to a function that has switched protocols; return when there is room for more."""

    def fail(self, error: GpufaasError) -> None:
        """Raise *error* in the reader."""

    def count_as(self, status: int) -> None:
        """Count the call with *status* in place of the answer's."""

    def cancel(self) -> None:
        """Give up the rest of the answer, and the call's place."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, exc: BaseException | None, trace: object, /) -> None: ...
