"""`up`, `deploy` and `rollback` wait until what was deployed takes calls."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import pytest
from tests.unit.cli.conftest import Run
from tests.unit.cli.wire_log import WireLog

from gpufaas import Client
from gpufaas_cli import following
from gpufaas_core.errors import GpufaasError

OLD = {"revision": "old", "state": "resident"}
NEW = {"revision": "new", "state": "resident"}
PENDING = {"revision": "new", "status": "pending"}
SERVES = {"revision": "new"}


class Shows:
    """A gateway that shows these states of a function, one after the other, and then the last; and this history."""

    def __init__(self, states: Iterable[dict[str, Any]], history: Sequence[dict[str, Any]]) -> None:
        self.states = list(states)
        self._history = history

    def function(self, *_: object, **__: object) -> dict[str, Any]:
        return {"gpufaas": self.states.pop(0) if len(self.states) > 1 else self.states[0]}

    def history(self, *_: object) -> Sequence[dict[str, Any]]:
        return self._history


def follow(*states: dict[str, Any], history: Sequence[dict[str, Any]] = (PENDING,)) -> str:
    shows = Shows(states, history)
    said = following.follow(cast("Client", shows), "f", None, "new")
    assert shows.states == [states[-1]], "it waited until then"
    return said


def test_it_waits_while_the_revision_is_pending() -> None:
    assert follow(OLD, OLD, NEW) == ""


def test_a_process_of_the_gateway_that_has_not_heard_of_the_revision_does_not_end_the_waiting() -> None:
    assert follow(OLD, OLD, NEW, history=[SERVES]) == ""


def test_a_revision_on_trial_is_waited_for_while_it_loads_or_has_no_room_yet() -> None:
    trial = {**NEW, "before": "old"}

    assert follow({**trial, "state": "idle", "lacks": "no room"}, {**trial, "state": "loading"}, NEW) == ""


def test_a_revision_on_trial_that_nobody_calls_is_not_waited_for_and_a_line_says_what_tries_it() -> None:
    said = follow({**NEW, "before": "old", "state": "idle"})

    assert said == "Its first call loads it; if that fails, revision old serves again."


@pytest.mark.parametrize("first", [OLD, {**NEW, "before": "old", "state": "loading"}])
@pytest.mark.parametrize("reason", ["no such weights", "revision newer came before it was loaded"])
def test_a_revision_that_does_not_load_or_was_replaced_is_an_error_with_its_reason(
    first: dict[str, Any], reason: str
) -> None:
    failed = {**PENDING, "status": "failed", "reason": reason}

    with pytest.raises(GpufaasError, match=f"revision new does not take calls: {reason}; old goes on serving"):
        follow(first, OLD, history=[failed])


@pytest.mark.parametrize("history", [[], [{**SERVES, "status": "superseded"}]])
def test_a_revision_that_has_served_until_a_later_one_came_is_no_error(history: list[dict[str, Any]]) -> None:
    assert follow({**OLD, "revision": "newer"}, history=history) == "A later deployment has taken its calls: newer."


def test_a_load_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "LONGEST_S", 0.1)

    with pytest.raises(GpufaasError, match="revision new has not loaded"):
        follow(OLD)


def test_a_gateway_that_names_no_revision_is_not_asked() -> None:
    assert following.follow(cast("Client", None), "f", None, "") == ""


@pytest.mark.parametrize("waits", [True, False])
def test_a_rollback_waits_unless_it_is_told_not_to(run: Run, wire: WireLog, waits: bool) -> None:
    wire.answer("POST", "/system/function/f/rollback", {"revision": "new", "to": "older"})
    wire.answer("GET", "/system/function/f", {"gpufaas": OLD})
    wire.answer("GET", "/system/function/f/revisions", [{**PENDING, "status": "failed", "reason": "no such weights"}])

    result = run("rollback", "f", *([] if waits else ["--no-wait"]))

    assert (result.exit_code, "no such weights" in result.stderr) == (int(waits), waits)
    assert result.stdout == ("" if waits else "Deployed: f as in revision older.\n")


def test_describe_says_how_an_update_stands(run: Run, wire: WireLog) -> None:
    failed = {"revision": "r3", "reason": "no such\nweights"}
    ours = {"state": "resident", "revision": "r1", "pending": "r2", "before": "r0", "failed": failed}
    wire.answer("GET", "/system/function/f", {"name": "f", "gpufaas": ours})

    shown = [" ".join(line.split()) for line in run("describe", "f").stdout.splitlines()]

    assert "Pending: revision r2, which is loaded before it takes calls" in shown
    assert "On trial: if it does not load, revision r0 serves again" in shown
    assert "Last update: revision r3 has failed: no such weights" in shown
