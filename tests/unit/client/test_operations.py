"""The operations as generators that get answers from the test, without a socket, a clock or a loop."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest

import gpufaas
from gpufaas import operations
from gpufaas.gateway import STARTING_S, ApiRequest, Gateway, Hints, Steps

AT = Gateway("http://gateway:8080", 600.0, Hints())
STARTING = httpx.Response(503, headers={"Retry-After": "2", "X-OpenFaaS-Internal": "gateway"}, text="starting")


def played(steps: Steps[Any], answers: Sequence[httpx.Response | Exception]) -> tuple[list[ApiRequest], Any]:
    """Give *steps* the answers; return what was sent, and what came of it. The last answer is given for ever."""
    sent = [next(steps)]
    left = list(answers)
    while True:
        answer = left.pop(0) if len(left) > 1 else left[0]
        try:
            sent.append(steps.throw(answer) if isinstance(answer, Exception) else steps.send(answer))
        except StopIteration as end:
            return sent, end.value
        except gpufaas.GpufaasError as error:
            return sent, error


def state(name: str) -> httpx.Response:
    return httpx.Response(200, json={"callId": "c-1", "function": "a.openfaas-fn", "state": name})


def test_a_gateway_that_starts_is_asked_again_when_it_says() -> None:
    sent, found = played(operations.namespaces(AT), [STARTING, STARTING, httpx.Response(200, json=["openfaas-fn"])])

    assert [each.after_s for each in sent] == [0, 2, 2]
    assert found == ["openfaas-fn"]


def test_a_gateway_that_goes_on_starting_is_given_up() -> None:
    sent, found = played(operations.info(AT), [STARTING])

    assert STARTING_S - 2 <= sum(each.after_s for each in sent) <= STARTING_S
    assert isinstance(found, gpufaas.Refused)
    assert (found.status, found.retry_after_s, str(found)) == (503, 2.0, "starting")


def test_a_call_is_never_sent_twice() -> None:
    sent, found = played(operations.invoke(AT, "a", b"x"), [STARTING])

    assert len(sent) == 1
    assert isinstance(found, gpufaas.Refused)


def test_a_refusal_in_json_has_its_message_and_its_details() -> None:
    body = {"error": "X-Model asks for bert", "asked": {"model": "bert"}, "has": {"model": None}}
    headers = {"X-OpenFaaS-Internal": "gateway", "X-Gpufaas-Error": "unsatisfiable"}

    _, found = played(operations.invoke(AT, "a", b"x"), [httpx.Response(422, headers=headers, json=body)])

    assert isinstance(found, gpufaas.Refused)
    assert (found.status, found.code, str(found)) == (422, "unsatisfiable", "X-Model asks for bert")
    assert found.details == {"asked": {"model": "bert"}, "has": {"model": None}}


def test_readiness_is_asked_once_and_nobody_there_is_not_ready() -> None:
    for answer in (STARTING, gpufaas.GatewayUnreachable("nobody"), httpx.Response(404)):
        sent, found = played(operations.is_ready(AT), [answer])

        assert (len(sent), found) == (1, False)


def test_a_function_that_is_not_there_is_created_and_one_that_is_updated() -> None:
    body = {"service": "a", "image": "a:latest"}
    there = played(operations.deploy(AT, body), [httpx.Response(200, headers={"X-Gpufaas-Revision": "r1"})])
    absent = played(operations.deploy(AT, body), [httpx.Response(404), httpx.Response(202)])
    anew = played(operations.deploy(AT, body, replace=True), [httpx.Response(404), httpx.Response(202)])
    only_new = played(operations.deploy(AT, body, update=False), [httpx.Response(409, text="there is one")])

    assert [each.method for each in there[0]] == ["PUT"]
    assert there[1] == (200, "OK", "r1")
    assert [each.method for each in absent[0]] == ["PUT", "POST"]
    assert absent[1] == (202, "Accepted", "")
    assert [each.method for each in anew[0]] == ["DELETE", "POST"]
    assert [each.method for each in only_new[0]] == ["POST"]
    assert isinstance(only_new[1], gpufaas.Refused)
    assert only_new[1].status == 409


def test_a_call_is_looked_at_ever_less_often_until_it_has_ended() -> None:
    sent, found = played(operations.wait_for_call(AT, "c-1"), [*[state("running")] * 9, state("done")])

    pauses = [each.after_s for each in sent]
    assert pauses[:4] == [0, 0.05, 0.1, 0.2]
    assert pauses[-2:] == [2.0, 2.0]
    assert found["state"] == "done"


def test_waiting_for_a_call_has_an_end() -> None:
    sent, found = played(operations.wait_for_call(AT, "c-1", timeout_s=1.0), [state("queued")])

    assert sum(each.after_s for each in sent) == pytest.approx(1.0)
    assert isinstance(found, gpufaas.NotEnded)
    assert "c-1" in str(found)


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (httpx.Response(401), gpufaas.NotAuthorised, "does not let us in (401): give auth="),
        (httpx.Response(403), gpufaas.NotAuthorised, "(403)"),
        (
            httpx.Response(403, headers={"X-Gpufaas-Error": "quota-exceeded"}, text="too many\n functions"),
            gpufaas.QuotaExceeded,
            "too many functions",
        ),
        (
            httpx.Response(404, headers={"X-OpenFaaS-Internal": "gateway"}, text="404 page not found\n"),
            gpufaas.Refused,
            "has no /system/status: it is of another release than this client",
        ),
        (
            httpx.Response(404, headers={"X-OpenFaaS-Internal": "gateway"}, text="no such thing"),
            gpufaas.Refused,
            "no such thing",
        ),
        (httpx.Response(404), gpufaas.GatewayUnreachable, "is no gpufaas gateway"),
        (httpx.Response(200, text="<html>"), gpufaas.GatewayUnreachable, "is no gpufaas gateway"),
        (httpx.Response(200, json=[]), gpufaas.GatewayUnreachable, "is no gpufaas gateway"),
        (
            httpx.Response(301, headers={"Location": "https://gateway/"}),
            gpufaas.GatewayUnreachable,
            "sends us on to https://gateway/",
        ),
        (httpx.Response(500), gpufaas.Refused, "answered 500 without saying why"),
    ],
)
def test_what_an_answer_means(answer: httpx.Response, kind: type[Exception], says: str) -> None:
    _, found = played(operations.status(AT), [answer])

    assert type(found) is kind
    assert says in str(found)


def test_a_404_is_about_what_was_asked_for() -> None:
    def found(steps: Steps[Any]) -> Any:
        return type(played(steps, [httpx.Response(404)])[1])

    assert found(operations.function(AT, "a")) is gpufaas.UnknownFunction
    assert found(operations.call(AT, "c-1")) is gpufaas.UnknownCall
    assert found(operations.explain(AT, "c-1")) is gpufaas.UnknownCall
    assert found(operations.node(AT, "n1")) is gpufaas.Refused
    assert found(operations.quota(AT, "dev")) is gpufaas.Refused


def test_a_404_of_the_function_is_its_answer_and_one_of_the_gateway_is_raised() -> None:
    _, of_function = played(operations.invoke(AT, "a"), [httpx.Response(404, text="no page")])
    headers = {"X-OpenFaaS-Internal": "gateway", "X-Gpufaas-Error": "unknown-function"}
    _, of_gateway = played(operations.invoke(AT, "a"), [httpx.Response(404, headers=headers, text="no function 'a'")])

    assert (of_function.status, of_function.text) == (404, "no page")
    with pytest.raises(gpufaas.FunctionFailed, match="the function answered 404: no page"):
        of_function.raise_for_status()
    assert isinstance(of_gateway, gpufaas.UnknownFunction)
    assert of_gateway.code == "unknown-function"


@pytest.mark.parametrize(
    ("body", "content", "kind"),
    [
        (b"\x00", b"\x00", "application/octet-stream"),
        ("é", "é".encode(), "text/plain; charset=utf-8"),
        ({"a": [1, None]}, b'{"a": [1, null]}', "application/json"),
        ([1], b"[1]", "application/json"),
        (0, b"0", "application/json"),
        (None, None, None),
    ],
)
def test_a_body_says_what_it_is(body: object, content: bytes | None, kind: str | None) -> None:
    request = next(operations.invoke(AT, "a", body))

    assert request.content == content
    assert dict(request.headers).get("Content-Type") == kind


def test_what_the_caller_says_goes_before_what_we_would_say() -> None:
    request = next(operations.invoke(AT, "a", {}, headers={"content-type": "application/vnd+json"}))

    assert dict(request.headers) == {"content-type": "application/vnd+json", "Accept-Encoding": "identity"}


@pytest.mark.parametrize(
    ("name", "namespace", "path"),
    [
        ("a", None, "/function/a"),
        ("a", "dev", "/function/a.dev"),
        ("a.dev", "dev", "/function/a.dev"),
        ("a/b c/?", None, "/function/a/b%20c/%3F"),
    ],
)
def test_the_path_of_a_function(name: str, namespace: str | None, path: str) -> None:
    assert gpufaas.function_path(name, namespace) == path


def test_timing_is_what_the_headers_say() -> None:
    timing = gpufaas.Timing.of(
        {
            "Server-Timing": "queue;dur=0.5, load;dur=30, load-process;dur=24, load-init;dur=6, run;dur=1.3",
            "X-Gpufaas-Start": "disk",
            "X-Gpufaas-Device": "local/cpu:0",
        }
    )

    assert (timing.start, timing.device) == ("disk", "local/cpu:0")
    assert timing.phases == pytest.approx({"queue": 0.0005, "load": 0.03, "run": 0.0013})
    assert timing.parts["load"] == pytest.approx({"process": 0.024, "init": 0.006})
    assert gpufaas.Timing.of({}) == gpufaas.Timing(None, None, {}, {})


def test_pruning_may_take_as_long_as_a_deployment() -> None:
    sent, _ = played(operations.prune(AT), [httpx.Response(200, json={"artifacts": 1, "size": 2})])

    assert [each.timeout_s for each in sent] == [AT.deploy_s]
