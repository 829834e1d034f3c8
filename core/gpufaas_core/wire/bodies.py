"""How the body of a call travels, and in which pieces."""

from collections.abc import Iterator
from typing import Final

from gpufaas_core._types import Bytes

CHUNK_BYTES: Final[Bytes] = 256 * 1024
"""The largest piece of a body in one frame. Larger ones would only cost memory at both ends."""

INLINE: Final = 0
"""In the frame of its call, or in an area that its node has lent to the worker (AREA): then the frame has none."""
STREAM: Final = 1
"""In pieces, as they come and as far as they are taken."""
FILE: Final = 2
"""In a file: a worker gets it open. From a gateway it comes in pieces, which the node keeps in a file."""
UPGRADE: Final = 3
"""
The call asks to switch protocols. A worker gets no frame of this mode: only workers that speak HTTP accept such calls.
Once one has answered 101, bodies are the bytes of that protocol, both ways, and the answer ends with the connection.
"""


def pieces_of(body: bytes | memoryview) -> Iterator[memoryview]:
    """Yield *body*, not copied, in pieces that fit a frame."""
    view = memoryview(body)
    return (view[at : at + CHUNK_BYTES] for at in range(0, len(body), CHUNK_BYTES))
