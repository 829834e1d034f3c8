"""The error of a call that a policy refuses."""

import pytest

from gpufaas_core.errors import NotAdmitted, TooLate, Unsatisfiable
from gpufaas_core.messages import RejectCall
from gpufaas_core.model import CallId
from gpufaas_scheduler.rejections import rejection


@pytest.mark.parametrize(
    ("status", "kind"), [(0, NotAdmitted), (429, NotAdmitted), (422, Unsatisfiable), (503, TooLate)]
)
def test_the_status_that_a_policy_gives_says_which_error_it_is(status: int, kind: type[NotAdmitted]) -> None:
    error = rejection(RejectCall(CallId("c"), "policy", "no", 2.0, status, {"has": 1}))

    assert type(error) is kind
    assert isinstance(error, NotAdmitted)
    assert (str(error), error.retry_after_s, error.details) == ("no", 2.0, {"has": 1})
