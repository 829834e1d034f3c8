"""`gpufaas up` waits until what it deployed takes calls."""

from collections.abc import Iterable
from typing import Any, cast

import pytest

from gpufaas import Client
from gpufaas_cli import pipeline
from gpufaas_core.errors import GpufaasError


class Shows:
    """A gateway that shows these states of a function, one after the other, and then the last."""

    def __init__(self, states: Iterable[dict[str, Any]]) -> None:
        self.states = list(states)

    def function(self, *_: object, **__: object) -> dict[str, Any]:
        return {"gpufaas": self.states.pop(0) if len(self.states) > 1 else self.states[0]}


def follow(*states: dict[str, Any]) -> Shows:
    shows = Shows(states)
    pipeline._follow(cast("Client", shows), "f", None)
    return shows


LOADS = {"revision": "old", "pending": "new"}


def test_it_waits_while_the_revision_is_pending() -> None:
    shows = follow(LOADS, LOADS, {"revision": "new"})

    assert shows.states == [{"revision": "new"}]


def test_a_revision_that_does_not_load_is_an_error_with_its_reason() -> None:
    failed = {"revision": "old", "failed": {"revision": "new", "reason": "no such weights"}}

    with pytest.raises(GpufaasError, match="revision new does not load, and old goes on serving: no such weights"):
        follow(LOADS, failed)


def test_a_failure_of_an_earlier_deployment_is_none_of_this_one() -> None:
    follow(LOADS, {"revision": "new", "failed": {"revision": "older", "reason": "no such weights"}})


def test_a_load_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_FOLLOW_S", 0.1)

    with pytest.raises(GpufaasError, match="revision new has not loaded"):
        follow(LOADS)
