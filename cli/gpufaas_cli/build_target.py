"""
What a bundle is built for: the Python environments of the nodes on which it may run, which the gateway knows.

Where no gateway answers, this Python environment is assumed to be theirs, and a line says so. The deployment checks
that: the manifest of a bundle says what it needs.
"""

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gpufaas import Client, GatewayUnreachable, NotAuthorised
from gpufaas_cli import output
from gpufaas_core.environment import Environment, measure

_ASKED: Final = ("service", "image", "namespace", "constraints", "limits", "requests", "labels", "annotations")
"""The keys of a deployment that say where it may run. Others, such as environment variables, are not sent."""


@dataclass(frozen=True, slots=True)
class BuildTarget:
    environments: tuple[Environment, ...]
    """The environments of all nodes on which the function may run; at least one."""
    who: str
    """Where they were found, for messages."""

    @property
    def shared(self) -> Environment:
        """What all of them have: the first one's packages and platforms, without those that another one lacks."""
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
    """Return the answer of `Client.environments`, decoded. :raises GatewayUnreachable: it is none of gpufaas"""
    try:
        return msgspec.convert(client.environments(deployment), list[Environment] | None)
    except msgspec.ValidationError as exc:
        what = f"what answers at {client.shown}/system/environments is no gpufaas gateway"
        raise GatewayUnreachable(f"{what}: {exc}") from exc


def this_python() -> BuildTarget:
    """Return the environment of this process as a target."""
    return BuildTarget((measure(),), f"this Python environment ({sys.prefix})")


class BuildTargets:
    """Finds the target of each function; safe to use from several threads."""

    def __init__(self, client: Client, offline: bool, must_answer: bool) -> None:
        """
        :param offline: do not ask
        :param must_answer: a later step needs the gateway: it is an error that it cannot be reached
        """
        self._client = client
        self._why = "--offline" if offline else ""
        """Why nobody is asked any more."""
        self._must_answer = must_answer
        self._said = False
        self._lock = threading.Lock()

    def of(self, deployment: Mapping[str, Any]) -> BuildTarget:
        """
        Return what to build *deployment*, the body of one, for.

        :raises Refused: there is no device for what it asks
        :raises GatewayUnreachable, NotAuthorised: the gateway must answer, and does not
        """
        with self._lock:  # one request at a time, and one line where there is no answer
            found: BuildTarget | None = None
            try:
                found = None if self._why else self._ask(deployment)
            except (GatewayUnreachable, NotAuthorised) as exc:
                if self._must_answer:
                    raise
                self._why = str(exc)
            target = found or this_python()
            if found is None and not self._said:
                self._said = True
                output.note(
                    f"gpufaas: {self._why}; the nodes are assumed to have the packages of {target.who}: the deployment "
                    "checks that"
                )
            return target

    def _ask(self, deployment: Mapping[str, Any]) -> BuildTarget | None:
        found = environments(self._client, {key: deployment[key] for key in _ASKED if key in deployment})
        if found:
            return BuildTarget(tuple(found), f"the platform at {self._client.shown}")
        self._why = f"the gateway at {self._client.shown} does not say what its nodes provide"
        self._why += ", no node answers" * (found is not None)
        return None
