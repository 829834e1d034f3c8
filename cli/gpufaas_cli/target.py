"""
What a bundle is built for: the environments of the nodes on which it may run, as their gateway tells them.

Where nobody can be asked, it is this Python environment that is taken for theirs, and that is said. A deployment checks
again: what a bundle needs is written in it.
"""

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gpufaas import Client, GatewayUnreachable, NotAuthorised
from gpufaas_cli import output
from gpufaas_core.environment import Environment, measure

Connect = Callable[[], AbstractContextManager[Client]]
"""Gives a client of the gateway."""
_ASKED: Final = ("service", "image", "namespace", "constraints", "limits", "requests", "labels", "annotations")
"""Of a deployment, what says where it may run; its environment variables are nobody's business before."""


@dataclass(frozen=True, slots=True)
class Target:
    environments: tuple[Environment, ...]
    """Those of all nodes on which the function may run; at least one."""
    who: str
    """Whose they are, for people."""

    @property
    def shared(self) -> Environment:
        """What can be relied on with all of them: the first one's, as far as the others have it too."""
        first, *others = self.environments
        return replace(
            first,
            platforms=tuple(each for each in first.platforms if all(each in one.platforms for one in others)),
            distributions={
                name: each
                for name, each in first.distributions.items()
                if all(name in one.distributions for one in others)
            },
        )


def environments(client: Client, deployment: Mapping[str, Any] | None = None) -> list[Environment] | None:
    """Return what the gateway tells (see `Client.environments`). :raises GatewayUnreachable: it makes no sense"""
    try:
        return msgspec.convert(client.environments(deployment), list[Environment] | None)
    except msgspec.ValidationError as exc:
        what = f"what answers at {client.shown}/system/environments is no gpufaas gateway"
        raise GatewayUnreachable(f"{what}: {exc}") from exc


def this_python() -> Target:
    """Return this environment as a target, for where it is the platform's."""
    return Target((measure(),), f"this Python environment ({sys.prefix})")


class Targets:
    """Finds the target of each function; safe to use from several threads."""

    def __init__(self, connect: Connect | None, offline: bool, must_answer: bool) -> None:
        """
        :param connect: gives the gateway; None: there is none to ask
        :param offline: do not ask
        :param must_answer: the gateway is needed in any case, so that one that cannot be reached is an error
        """
        self._connect = None if offline else connect
        self._why = "--offline" if offline else "no gateway is asked"
        self._must_answer = must_answer
        self._said = False
        self._lock = threading.Lock()

    def of(self, deployment: Mapping[str, Any]) -> Target:
        """
        Return what to build *deployment*, the body of one, for.

        :raises Refused: there is no device for what it asks
        :raises GatewayUnreachable, NotAuthorised: the gateway must answer, and does not
        """
        with self._lock:  # one question at a time, and one line where there is no answer
            if self._connect is None:
                return self._assumed()
            try:
                with self._connect() as client:
                    found = environments(client, {key: deployment[key] for key in _ASKED if key in deployment})
                    shown = client.shown
            except (GatewayUnreachable, NotAuthorised) as exc:
                if self._must_answer:
                    raise
                self._why = str(exc)
            else:
                if found:
                    return Target(tuple(found), f"the platform at {shown}")
                self._why = f"the gateway at {shown} does not say what its nodes provide" + (
                    ", no node answers" if found is not None else ""
                )
            self._connect = None
            return self._assumed()

    def _assumed(self) -> Target:
        target = this_python()
        if not self._said:
            self._said = True
            output.note(
                f"gpufaas: {self._why}; requirements are met beside the packages of {target.who}, as if it were the "
                "platform's: deploying checks that"
            )
        return target
