"""Headers of calls, in and out, as docs/openfaas.md describes them."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.unit.gateway.conftest import Gateway, calling
from tests.unit.gateway.test_contract_checklist import Functions

from gpufaas_core.model import Asked
from gpufaas_core.wire.heads import AnswerHead
from gpufaas_gateway.calls import Calls

Headers = list[tuple[bytes, bytes]]


class Rig:
    def __init__(self, client: httpx.AsyncClient, functions: Functions) -> None:
        self.client = client
        self.functions = functions

    async def call(self, method: str = "POST", body: bytes = b"", **headers: str) -> httpx.Response:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.request(method, "/function/echo", content=body, headers=given)

    @property
    def seen(self) -> Headers:
        return self.functions.called[-1][1].headers

    @property
    def timeout_s(self) -> float:
        return self.functions.called[-1][1].timeout_s


@pytest.fixture
async def rig(gateway: Gateway, tmp_path: Path) -> AsyncIterator[Rig]:
    functions = Functions()
    annotations = {
        "gpufaas.bundle": gateway.bundle, "gpufaas.timeout": "10s", "gpufaas.accuracy": "76.1",
        "gpufaas.model": "resnet",
    }  # fmt: skip
    await gateway.deployed(annotations=annotations)
    served_by = "gpufaas/1"
    calls = Calls(gateway.catalogue, functions, functions, tmp_path, served_by=served_by)
    async with calling(calls.run) as client:
        yield Rig(client, functions)


async def test_every_answer_says_who_served_it_and_how_long_it_took(rig: Rig) -> None:
    rig.functions.answer = AnswerHead(200, [(b"content-type", b"text/x")], 0.25)

    answer = await rig.call()
    error = await rig.client.get("/function/nobody")

    assert answer.headers["x-served-by"] == error.headers["x-served-by"] == "gpufaas/1"
    assert answer.headers["x-duration-seconds"] == "0.250000"
    assert error.headers["x-start-time"].isdigit()


async def test_what_a_watchdog_measured_stays_and_what_is_ours_cannot_be_forged(rig: Rig) -> None:
    forged = [(b"x-served-by", b"me"), (b"x-start-time", b"1"), (b"x-call-id", b"1"), (b"content-length", b"9")]
    forged += [(b"x-gpufaas-%b" % each, b"1") for each in (b"start", b"device", b"share", b"batch")]
    rig.functions.answer = AnswerHead(200, [*forged, (b"x-duration-seconds", b"1.500000")], 0.25)

    answer = await rig.call(body=b"four")

    assert answer.headers.get_list("x-duration-seconds") == ["1.500000"]
    assert answer.headers.get_list("x-served-by") == ["gpufaas/1"]
    assert answer.headers.get_list("content-length") == ["4"]
    assert len(answer.headers.get_list("x-start-time")) == len(answer.headers.get_list("x-call-id")) == 1
    assert answer.headers["x-start-time"] != "1"
    assert len(answer.headers.get_list("x-gpufaas-start")) == len(answer.headers.get_list("x-gpufaas-device")) == 1
    assert not answer.headers.keys() & {"x-gpufaas-share", "x-gpufaas-batch"}


async def test_the_start_time_is_the_gateways_whatever_the_caller_says(rig: Rig) -> None:
    answer = await rig.call(x_start_time="1", x_forwarded_for="10.0.0.1", x_forwarded_host="there")

    seen = {name: [value for other, value in rig.seen if other == name] for name, _ in rig.seen}
    assert seen[b"x-start-time"] == [answer.headers["x-start-time"].encode()]
    assert seen[b"x-forwarded-for"] == [b"10.0.0.1"]
    assert seen[b"x-forwarded-host"] == [b"there"]


@pytest.mark.parametrize(
    ("status", "given", "asked", "expected"),
    [
        (200, [], {}, "text/plain"),
        (200, [], {"content_type": "application/x-mine"}, "application/x-mine"),
        (404, [(b"x-own", b"1")], {"content_type": "application/x-mine"}, "application/x-mine"),
        (200, [(b"content-type", b"text/x")], {"content_type": "application/x-mine"}, "text/x"),
        (200, [(b"x-own", b"1"), (b"content-type", b"text/x")], {}, "text/x"),
        (204, [], {"content_type": "application/x-mine"}, None),
        (304, [], {}, None),
    ],
)
async def test_an_answer_without_a_type_has_that_of_the_request_else_text(
    rig: Rig, status: int, given: Headers, asked: dict[str, str], expected: str | None
) -> None:
    rig.functions.answer = AnswerHead(status, given)

    answer = await rig.call(**asked)

    assert answer.headers.get("content-type") == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("3s", 3.0), ("1500ms", 1.5), ("10s", 10.0), ("1h", 10.0), ("2", 2.0),
        ("soon", 10.0), ("-1s", 10.0), ("0s", 10.0), ("", 10.0),
    ],
)  # fmt: skip
async def test_a_caller_may_ask_for_less_time_but_not_for_more(rig: Rig, asked: str, expected: float) -> None:
    """As with OpenFaaS, a value that is none, or above the function's limit, changes nothing."""
    await rig.call(x_timeout=asked)

    assert expected - 1.0 < rig.timeout_s <= expected, "what is left of it when a device is there"
    assert (b"x-timeout", asked.encode()) in rig.seen


@pytest.mark.parametrize(
    ("headers", "body", "size"),
    [
        ({}, b"four", 4.0), ({}, b"", 0.0), ({"x_gpufaas_size": "128"}, b"four", 128.0),
        ({"x_gpufaas_size": "2.5e3"}, b"", 2500.0), ({"x_gpufaas_size": "0"}, b"four", 0.0),
    ],
)  # fmt: skip
async def test_the_scheduler_is_told_the_size_of_the_request(
    rig: Rig, headers: dict[str, str], body: bytes, size: float
) -> None:
    await rig.call(body=body, **headers)

    assert rig.functions.sizes == [size]
    for value in headers.values():
        assert (b"x-gpufaas-size", value.encode()) in rig.seen


async def test_of_a_body_that_comes_in_pieces_and_says_no_length_the_size_is_what_came(rig: Rig) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 1_000_000

    await rig.client.request("POST", "/function/echo", content=pieces())

    assert rig.functions.sizes == [3_000_000.0]


@pytest.mark.parametrize("wrong", ["-1", "nan", "inf", "large", "1e999", "1 2"])
async def test_a_size_that_is_none_is_refused_before_anything_runs(rig: Rig, wrong: str) -> None:
    answer = await rig.call(x_gpufaas_size=wrong)

    assert answer.status_code == 400
    assert "X-Gpufaas-Size is a number, 0 or more" in answer.text
    assert not rig.functions.called


@pytest.mark.parametrize(("asked", "goal_s"), [("200ms", 0.2), ("1m30s", 90.0), ("2", 2.0), ("", None)])
async def test_the_scheduler_is_told_the_goal_of_the_call(rig: Rig, asked: str, goal_s: float | None) -> None:
    await rig.call(x_latency_goal=asked)
    await rig.call()

    assert rig.functions.asked == [None if goal_s is None else Asked(goal_s), None]
    assert (b"x-latency-goal", asked.encode()) in rig.functions.called[0][1].headers


@pytest.mark.parametrize("wrong", ["0", "0s", "-1s", "soon", "25h", "1 2", "nan"])
async def test_a_goal_that_is_none_is_refused_before_anything_runs(rig: Rig, wrong: str) -> None:
    answer = await rig.call(x_latency_goal=wrong)

    assert (answer.status_code, answer.text.count("\n")) == (400, 0)
    assert answer.text.startswith(f"X-Latency-Goal: {wrong!r} ")
    assert not rig.functions.called


async def test_the_scheduler_is_told_all_that_a_call_asks_for_and_the_function_sees_it(rig: Rig) -> None:
    headers = {
        "x_latency_goal": "200ms", "x_min_accuracy": "76.1", "x_max_cost": "0.5", "x_prefer": "cheapest",
        "x_model": "resnet", "x_variant": "echo.openfaas-fn",
    }  # fmt: skip
    assert (await rig.call(**headers)).status_code == 200

    assert rig.functions.asked == [Asked(0.2, 76.1, 0.5, "cheapest", "resnet", "echo.openfaas-fn")]
    assert {name.replace("_", "-").encode() for name in headers} <= {name for name, _ in rig.seen}


async def test_an_empty_header_asks_for_nothing(rig: Rig) -> None:
    await rig.call(x_min_accuracy="", x_prefer="", x_model="")

    assert rig.functions.asked == [None]


@pytest.mark.parametrize(
    ("header", "value", "says"),
    [
        ("X-Min-Accuracy", "good", "'good' is not an accuracy in per cent, 0 or 1 to 100"),
        ("X-Min-Accuracy", "nan", "'nan' is not an accuracy"),
        ("X-Min-Accuracy", "100.1", "'100.1' is not an accuracy"),
        ("X-Min-Accuracy", "0.76", "'0.76' is not an accuracy in per cent"),
        ("X-Max-Cost", "0", "'0' is not a number above 0"),
        ("X-Max-Cost", "inf", "'inf' is not a number above 0"),
        ("X-Max-Cost", "$3", "'$3' is not a number above 0"),
        ("X-Prefer", "best", "'best' is not one of cheapest, fastest, accurate"),
        ("X-Model", "-x", "'-x' is not a name: use at most 128 of"),
        ("X-Variant", "a b", "'a b' is not a name"),
        ("X-Variant", "x" * 200, f"'{'x' * 80}' is not a name"),
    ],
)
async def test_what_cannot_be_read_is_refused_in_one_line_that_names_the_header(
    rig: Rig, header: str, value: str, says: str
) -> None:
    answer = await rig.call(**{header.lower().replace("-", "_"): value})

    assert (answer.status_code, answer.text.count("\n")) == (400, 0)
    assert answer.text.startswith(f"{header}: {says}")
    assert not rig.functions.called


@pytest.mark.parametrize(
    ("header", "value", "said", "asked", "has"),
    [
        ("X-Min-Accuracy", "80", "has accuracy 76.1", {"min_accuracy": 80.0}, {"accuracy": 76.1}),
        ("X-Model", "bert", "has model resnet", {"model": "bert"}, {"model": "resnet"}),
        ("X-Variant", "echo-large", "has no other variant", {"variant": "echo-large"}, {"variant": "echo.openfaas-fn"}),
    ],
)
async def test_what_the_function_can_never_be_is_refused_at_once(
    rig: Rig, header: str, value: str, said: str, asked: object, has: object
) -> None:
    answer = await rig.call(**{header.lower().replace("-", "_"): value})

    assert (answer.status_code, answer.headers["x-gpufaas-error"]) == (422, "unsatisfiable")
    assert answer.headers["content-type"] == "application/json"
    assert "retry-after" not in answer.headers
    told = answer.json()
    assert f"{header} asks for {value}, and echo.openfaas-fn {said}" in told.pop("error")
    assert told == {"asked": asked, "has": has}
    assert not rig.functions.called


async def test_annotations_are_what_calls_ask_for_that_do_not_say_it(gateway: Gateway) -> None:
    functions = Functions()
    calls = await gateway.calls(functions, accuracy="80", min_accuracy="70", max_cost="2", prefer="fastest")
    async with calling(calls.run) as client:
        await client.post("/function/echo")
        await client.post("/function/echo", headers={"X-Prefer": "accurate", "X-Latency-Goal": "1s"})
        refused = await client.post("/function/echo", headers={"X-Model": "resnet"})

    assert functions.asked == [Asked(None, 70.0, 2.0, "fastest"), Asked(1.0, 70.0, 2.0, "accurate")]
    assert "echo.openfaas-fn has no annotation gpufaas.model" in refused.json()["error"]


@pytest.mark.parametrize(("length", "expected"), [(1234, "1234"), (0, "0"), (-1, None)])
async def test_an_answer_to_head_has_the_functions_length(rig: Rig, length: int, expected: str | None) -> None:
    rig.functions.answer = AnswerHead(200, [], length=length)

    answer = await rig.call("HEAD")

    assert (answer.content, answer.headers.get("content-length")) == (b"", expected)


async def test_errors_of_the_platform_are_told_from_the_functions(rig: Rig) -> None:
    rig.functions.answer = AnswerHead(500, [(b"content-type", b"text/plain")])

    own = await rig.call(body=b"mine")
    unknown = await rig.client.get("/function/nobody")
    method = await rig.call("PROPFIND")

    assert (own.status_code, "x-openfaas-internal" in own.headers) == (500, False)
    assert (unknown.status_code, unknown.headers["x-openfaas-internal"]) == (404, "gateway")
    assert (method.status_code, method.headers["x-openfaas-internal"]) == (405, "gateway")
    assert re.fullmatch("GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS", method.headers["allow"])
