"""Calls as OpenFaaS has them: ``/function/NAME[/path]``, with any method."""

from dataclasses import dataclass
from typing import Final

from gpufaas_core.messages import Outer
from gpufaas_gateway.answering import RunEarly
from gpufaas_gateway.fronts.target import Target

PREFIX: Final = b"/function/"


@dataclass(frozen=True)
class OpenFaasFront:
    """Reads what the URL of a call says (`target.ReadTarget`)."""

    run: RunEarly

    def __call__(self, below: bytes, query: bytes, outer: Outer | None) -> Target:
        name, _, path = below.partition(b"/")
        return Target(self.run, name.decode("latin-1"), "/" + path.decode("latin-1"), query, outer)
