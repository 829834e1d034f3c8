"""Every error of the platform has a status and our headers."""

import json

import pytest

from gpufaas_core import errors as core
from gpufaas_core.errors import DeadlineExceeded, GpufaasError, Overloaded
from gpufaas_gateway.errors import STATUS, MethodNotAllowed, Unavailable, body_of, headers_of, status_of


def tree(root: type[GpufaasError]) -> list[type[GpufaasError]]:
    return [root] + [found for child in root.__subclasses__() for found in tree(child)]


@pytest.mark.parametrize("error", [each for each in tree(GpufaasError) if each.__module__ == core.__name__])
def test_every_error_has_a_line_in_the_table(error: type[GpufaasError]) -> None:
    assert error in STATUS


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (core.InvalidSpec, 400), (core.NoDeviceFits, 400), (core.UnknownFunction, 404), (core.FunctionExists, 409),
        (core.BodyTooLarge, 413), (core.Overloaded, 429), (core.CallCancelled, 499), (core.LoadFailed, 502),
        (core.WorkerCrashed, 502), (core.GrantRefused, 503), (core.DeadlineExceeded, 504), (core.StorageFailed, 507),
        (core.StorageAway, 503), (core.CorruptArtifact, 500), (core.UnknownArtifact, 400), (core.GpufaasError, 500),
        (core.FetchFailed, 503), (core.CheckBroken, 503), (core.NotAdmitted, 429), (core.Unsatisfiable, 422),
        (core.TooLate, 503),
    ],
)  # fmt: skip
def test_statuses(error: type[GpufaasError], status: int) -> None:
    assert status_of(error("why")) == status


def test_an_error_that_is_not_in_the_table_is_answered_as_its_base() -> None:
    class Newer(core.NoDeviceFits):
        pass

    assert status_of(Newer("why")) == 400


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (2.1, "3")])
def test_retry_after_is_in_whole_seconds_and_never_zero(seconds: float, header: str) -> None:
    assert headers_of(Overloaded("full", retry_after_s=seconds))["Retry-After"] == header


PEOPLE_MUST_ACT = {core.NoRoom, Unavailable}
"""A minimum is to be lowered, or a function deployed again: until then every attempt fails."""


@pytest.mark.parametrize("error", [each for each, status in STATUS.items() if status in (429, 503)])
def test_every_refusal_that_passes_by_itself_says_when_to_try_again(error: type[GpufaasError]) -> None:
    """Clients take an answer without `Retry-After` for one that another attempt does not change."""
    after = headers_of(error("why")).get("Retry-After", "")

    assert after.isdecimal() == (error not in PEOPLE_MUST_ACT)


@pytest.mark.parametrize(
    ("error", "after"),
    [(core.TooLate("late", 2.5), "3"), (core.NotAdmitted("no"), "1"), (core.Unsatisfiable("never"), None)],
)
def test_what_a_policy_refuses_may_be_tried_again_when_it_says_so(error: core.NotAdmitted, after: str | None) -> None:
    """What asks for what there is not is refused the next time, too."""
    assert headers_of(error).get("Retry-After") == after


def test_an_error_with_details_is_answered_in_json_and_others_as_text() -> None:
    error = core.Unsatisfiable("no variant is so good", details={"has": {"accuracy": 71.5}})

    assert headers_of(error)["Content-Type"] == "application/json"
    assert json.loads(body_of(error)) == {"error": "no variant is so good", "has": {"accuracy": 71.5}}
    assert headers_of(core.Unsatisfiable("no"))["Content-Type"] == "text/plain; charset=utf-8"
    assert body_of(core.Unsatisfiable("no")) == b"no"


def test_headers_say_that_the_platform_answered() -> None:
    assert headers_of()["X-OpenFaaS-Internal"] == "gateway"
    assert "Retry-After" not in headers_of(core.InvalidSpec("why"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DeadlineExceeded("late"), "deadline-exceeded"),
        (MethodNotAllowed("no"), "method-not-allowed"),
        (Overloaded("full", 1.0), "overloaded"),
        (GpufaasError("?"), "gpufaas-error"),
    ],
)
def test_programs_are_told_why_in_one_word(error: GpufaasError, code: str) -> None:
    assert headers_of(error)["X-Gpufaas-Error"] == code
