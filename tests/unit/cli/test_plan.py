"""``gpufaas plan``: files of plans, what is sent to the gateway, and what is shown of its answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from tests.unit.cli.conftest import Run
from tests.unit.cli.wire_log import Reply, WireLog

PLAN = """\
why: nights are quiet
replicas:
  - {function: digits, device: local/cpu:0, share: 40, slots: 2}
  - function: faces.dev
    device: local/cpu:0
    reserve: 30
    batch: 8
    wait: 20ms
"""
DIGITS = {
    "function": "digits.openfaas-fn", "device": "local/cpu:0", "share": 40, "reserve": 0, "slots": 2, "batch": 0,
    "wait_s": None, "pinned": False,
}  # fmt: skip
FACES = {**DIGITS, "function": "faces.dev", "share": 0, "reserve": 30, "slots": 0, "batch": 8, "wait_s": 0.02}


def version(number: int, *replicas: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"version": number, "by": "alice", "at": 1.8e9, "replicas": list(replicas), **more}


@pytest.fixture
def plan(here: Path, wire: WireLog) -> Path:
    wire.answer("GET", "/system/plan", version(0))
    wire.answer("PUT", "/system/plan", version(1, DIGITS, FACES))
    (here / "plan.yaml").write_text(PLAN)
    return here / "plan.yaml"


def failed(result: Result, code: int = 2) -> str:
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.count("\n") == 1
    return result.stderr


def lines(result: Result) -> list[str]:
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


# --- apply ---


@pytest.mark.usefixtures("plan")
def test_a_plan_is_sent_with_what_it_leaves_open_and_with_the_one_in_force_as_its_base(run: Run, wire: WireLog) -> None:
    result = run("plan", "apply", "plan.yaml")

    assert wire.requests() == [("GET", "/system/plan"), ("PUT", "/system/plan")]
    assert wire.sent[-1].json == {"replicas": [DIGITS, FACES], "why": "nights are quiet", "expected": {}, "base": 0}
    assert (result.exit_code, result.stdout) == (
        0, "Plan 1 is in force, with 2 copies: 'gpufaas plan show' says what became of it\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "base", "why"),
    [((), 7, "nights are quiet"), (("--base", "3"), 3, "nights are quiet"), (("--why", "tests"), 7, "tests")],
)
def test_a_version_in_the_file_is_its_base_unless_flags_say_otherwise(
    run: Run, wire: WireLog, plan: Path, flags: tuple[str, ...], base: int, why: str
) -> None:
    plan.write_text(f"version: 7\n{PLAN}")

    assert run("plan", "apply", "plan.yaml", *flags).exit_code == 0

    assert wire.requests() == [("PUT", "/system/plan")]
    assert (wire.sent[-1].json["base"], wire.sent[-1].json["why"]) == (base, why)


@pytest.mark.usefixtures("plan")
def test_what_show_prints_can_be_applied_again(run: Run, wire: WireLog) -> None:
    copies = {**DIGITS, "state": "resident", "reason": ""}, {**FACES, "state": "absent", "reason": "it is full"}
    shown = version(4, *copies, why="as before", expected={"p99_ms": 41.5}, notes=["n"], planner={"solver": ""})
    wire.answer("GET", "/system/plan", shown)

    assert run("plan", "apply", "-", data=run("plan", "show", "--json").stdout).exit_code == 0

    sent = {"replicas": [DIGITS, FACES], "why": "as before", "expected": {"p99_ms": 41.5}, "base": 4}
    assert wire.sent[-1].json == sent


@pytest.mark.parametrize("indent", ["", "  ", "\t"])
def test_json_is_read_as_it_is_indented(run: Run, wire: WireLog, plan: Path, indent: str) -> None:
    plan.write_text(json.dumps({"replicas": [{"function": "digits", "device": "d"}]}, indent=indent))

    assert run("plan", "apply", "plan.yaml").exit_code == 0

    assert [each["function"] for each in wire.sent[-1].json["replicas"]] == ["digits.openfaas-fn"]


ONE = "replicas:\n- function: a\n  device: d\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{ONE}  share: much\n", 'replicas[0].share is "much": write a whole number'),
        (f"{ONE}  reserved: 1\n", "unknown key 'reserved' in replicas[0]: did you mean 'reserve'?"),
        (f"{ONE}  wait: soon\n", "'soon' is not a duration: write for example 300ms"),
        (f"{ONE}expected: {{p99_ms: .nan}}\n", 'expected.p99_ms is ".nan": write a number'),
        (f"{ONE}expected: {{p99_ms: 0.2, p50_ms: low}}\n", 'expected.p50_ms is "low": write a number'),
        (f"{ONE}expected: {{p99_ms: nan}}\n", "a number is nan or infinite"),
        (f"{ONE}  device: e\n", "a key comes twice"),
        ("replicas:\n- function: a\n", "device is missing in replicas[0]: write text"),
        ("replicas: a\n", 'replicas is "a": write a list'),
        ("why: a\n", "replicas is missing: write a list"),
        ("copies: []\n", "unknown key 'copies': there are by, at, why, expected, notes, version, replicas"),
        ("- a\n", 'the whole is ["a"]: write an object'),
        ("replicas: &a [*a]\n", "recursive"),
        ("? [a]\n: b\n", "unhashable"),
        ("replicas: [\n", "it is not YAML"),
        ("", "it is empty: docs/placing.md has examples"),
    ],
)
def test_a_mistake_in_a_plan_is_its_file_and_key_what_is_there_and_what_is_allowed(
    run: Run, wire: WireLog, plan: Path, text: str, says: str
) -> None:
    plan.write_text(text)

    said = failed(run("plan", "apply", "plan.yaml"))

    assert said.startswith("gpufaas: plan.yaml:")
    assert says in said
    assert wire.requests() == []


def test_bytes_that_are_no_text_and_files_that_are_not_there_are_one_line(run: Run, plan: Path) -> None:
    plan.write_bytes(b"replicas: \xff\x00")

    assert "plan.yaml:1: it is not YAML: character '\\x00' is not allowed" in failed(run("plan", "apply", "plan.yaml"))
    assert "no-such" in failed(run("plan", "apply", "no-such"))
    assert "no-such" in failed(run("plan", "diff", "no-such"))


@pytest.mark.usefixtures("plan")
def test_somebody_who_applied_in_between_is_told_in_the_gateways_words(run: Run, wire: WireLog) -> None:
    wire.answer("PUT", "/system/plan", Reply(409, b"plan 8 by bob came in between: look at it, then apply again"))

    said = failed(run("plan", "apply", "plan.yaml"), 1)

    assert said == "gpufaas: plan 8 by bob came in between: look at it, then apply again\n"


# --- show, history ---


def test_a_plan_is_shown_by_device_with_what_became_of_each_copy(run: Run, wire: WireLog) -> None:
    faces = {**FACES, "state": "absent", "reason": "device local/cpu:0 has\n12 MiB free", "pinned": True}
    elsewhere = {**DIGITS, "device": "local/cpu:1", "share": 0, "slots": 0, "state": "resident", "reason": ""}
    copies = elsewhere, faces, {**DIGITS, "state": "resident", "reason": ""}
    more = {"why": "tests", "expected": {"p99_ms": 41.5}, "notes": ["digits is slow"]}
    more["planner"] = {"solver": "usher", "failures": 2}
    wire.answer("GET", "/system/plan", version(4, *copies, **more))

    result = run("plan", "show")

    assert lines(result) == [
        "Plan 4, by alice, 2027-01-15 08:00:00 UTC: tests",
        "Expected: p99_ms 41.5",
        "Planner: solver usher, failures 2",
        "Note: digits is slow",
        "Device Function Compute Slots Batch Wait Pinned State",
        "local/cpu:0 digits.openfaas-fn share 40 % 2 - - - resident",
        "local/cpu:0 faces.dev reserve 30 % - 8 20 ms yes absent: device local/cpu:0 has 12 MiB free",
        "local/cpu:1 digits.openfaas-fn - - - - - resident",
    ]


@pytest.mark.parametrize("number", [0, 5])
def test_without_copies_it_says_what_to_do(run: Run, wire: WireLog, number: int) -> None:
    wire.answer("GET", "/system/plan", version(number))

    result = run("plan", "show")

    assert result.exit_code == 0
    assert "No copies are planned: calls place every function. 'gpufaas plan apply FILE' puts" in result.stdout
    assert ("Plan 5, by alice" in result.stdout) == (number == 5)


def test_an_earlier_version_is_shown_and_one_that_is_not_kept_is_said(run: Run, wire: WireLog) -> None:
    wire.answer("GET", "/system/plan/3", version(3, DIGITS))
    wire.answer("GET", "/system/plan/2", Reply(404, b"version 2 is not kept: 3 to 53 are"))

    assert "digits.openfaas-fn" in run("plan", "show", "--version", "3").stdout
    assert failed(run("plan", "show", "--version", "2"), 1) == "gpufaas: version 2 is not kept: 3 to 53 are\n"


def test_the_history_says_who_why_and_how_many(run: Run, wire: WireLog) -> None:
    wire.answer("GET", "/system/plan/history", [version(2, why="rollback\nto 1"), {"version": 1, "at": 1.8e9}])

    assert lines(run("plan", "history")) == [
        "Version Applied By Copies Why",
        "2 2027-01-15 08:00:00 UTC alice 0 rollback to 1",
        "1 2027-01-15 08:00:00 UTC 0",
    ]


# --- diff ---


@pytest.mark.usefixtures("plan")
def test_a_file_is_compared_with_the_plan_in_force(run: Run, wire: WireLog) -> None:
    old = {**DIGITS, "share": 30}, {**DIGITS, "function": "old.dev"}
    wire.answer("GET", "/system/plan", version(4, *old))

    result = run("plan", "diff", "plan.yaml")

    assert result.exit_code == 1
    assert lines(result) == [
        "Device Function Compute Slots Batch Wait Pinned",
        "~ local/cpu:0 digits.openfaas-fn share 30 % -> share 40 % 2 - - -",
        "+ local/cpu:0 faces.dev reserve 30 % - 8 20 ms -",
        "- local/cpu:0 old.dev share 40 % 2 - - -",
    ]
    assert [each["change"] for each in json.loads(run("plan", "diff", "plan.yaml", "-j").stdout)] == ["~", "+", "-"]


@pytest.mark.usefixtures("plan")
def test_versions_are_compared_in_the_order_in_which_they_are_named(run: Run, wire: WireLog) -> None:
    wire.answer("GET", "/system/plan/3", version(3, DIGITS))
    wire.answer("GET", "/system/plan/4", version(4, {**DIGITS, "wait_s": 0.0}))
    unset = {key: value for key, value in DIGITS.items() if value}
    wire.answer("GET", "/system/plan/5", version(5, unset))

    assert "share 40 % 2 - - -> 0.0 ms -" in lines(run("plan", "diff", "3", "4"))[1]
    assert lines(run("plan", "diff", "3"))[1].startswith("+ local/cpu:0 digits")
    assert (same := run("plan", "diff", "3", "5")).stdout == "No differences found\n"
    assert same.exit_code == 0


# --- what changes the plan otherwise ---


@pytest.mark.parametrize(
    ("asked", "path", "body"),
    [
        ("rollback 3", "rollback", {"version": 3, "base": None}),
        ("rollback 3 --base 5", "rollback", {"version": 3, "base": 5}),
        ("pin digits d --reserve 30", "pin", {
            "function": "digits", "device": "d", "share": 0, "reserve": 30, "slots": 0, "batch": 0,
        }),
        ("pin digits d -n dev --share 40 --slots 2 --batch 8", "pin", {
            "function": "digits", "namespace": "dev", "device": "d", "share": 40, "reserve": 0, "slots": 2, "batch": 8,
        }),
        ("unpin digits", "unpin", {"function": "digits"}),
        ("unpin digits.dev d", "unpin", {"function": "digits.dev", "device": "d"}),
    ],
)  # fmt: skip
def test_a_change_is_one_request_and_the_new_version_is_named(
    run: Run, wire: WireLog, asked: str, path: str, body: dict[str, Any]
) -> None:
    wire.answer("POST", f"/system/plan/{path}", version(6, DIGITS))

    result = run("plan", *asked.split())

    assert result.stdout == "Plan 6 is in force, with 1 copy: 'gpufaas plan show' says what became of it\n"
    assert [(each.path, each.json) for each in wire.sent] == [(f"/system/plan/{path}", body)]


def test_the_planner_is_asked_for_a_plan(run: Run, wire: WireLog) -> None:
    wire.answer("POST", "/system/plan/make", version(6, DIGITS), Reply(400, b"no planner runs here"))

    made = run("plan", "make")

    assert made.stdout == "Plan 6 is in force, with 1 copy: 'gpufaas plan show' says what became of it\n"
    assert failed(run("plan", "make"), 1) == "gpufaas: no planner runs here\n"


# --- explain F ---

FOUND: dict[str, Any] = {
    "name": "faces", "namespace": "dev",
    "gpufaas": {
        "state": "loading", "devices": ["local/cpu:1"], "owner": "plan", "ownerWhy": "plan 4 names it",
        "lacks": "no device has room", "hits": 3,
        "plan": [{**FACES, "state": "absent", "reason": "it is full"}],
        "placement": {"asked": ["kind=cpu"], "devices": ["local/cpu:0", "local/cpu:1"]},
    },
}  # fmt: skip


@pytest.fixture
def deployed(wire: WireLog) -> None:
    wire.answer("GET", "/system/explain/faces.dev", Reply(404, b"call 'faces.dev' is not known"))
    wire.answer("GET", "/system/function/faces.dev", FOUND)


@pytest.mark.usefixtures("deployed")
def test_a_function_is_explained_by_its_owner_its_plan_and_its_copies(run: Run) -> None:
    assert lines(run("explain", "faces.dev")) == [
        "Function: faces.dev",
        "Loading on: local/cpu:1",
        "Owner: plan: plan 4 names it",
        "Copies: fewer than it should have: no device has room",
        "May run on: local/cpu:0, local/cpu:1: kind=cpu",
        "",
        "Device Function Compute Slots Batch Wait Pinned State",
        "local/cpu:0 faces.dev reserve 30 % - 8 20 ms - absent: it is full",
    ]
    as_json = json.loads(run("explain", "faces.dev", "--json").stdout)
    assert (as_json["function"], as_json["owner"], as_json["plan"]) == ("faces.dev", "plan", FOUND["gpufaas"]["plan"])


def test_a_function_without_room_is_not_said_to_be_loaded_by_its_next_call(run: Run, wire: WireLog) -> None:
    wire.answer("GET", "/system/explain/faces.dev", Reply(404, b"call 'faces.dev' is not known"))
    wire.answer("GET", "/system/function/faces.dev", {**FOUND, "gpufaas": {"state": "idle", "keptOut": "no room"}})

    assert lines(run("explain", "faces.dev"))[1:] == [
        "Resident on: no device: its calls are refused", "Calls refused: no room",
    ]  # fmt: skip


def test_what_is_neither_a_call_nor_a_function_is_said_in_one_line(run: Run, wire: WireLog) -> None:
    wire.answer("GET", "/system/explain/x", Reply(404, b"call 'x' is not known"))
    wire.answer("GET", "/system/function/x", 404)

    said = failed(run("explain", "x"), 1)

    assert said.startswith(
        "gpufaas: 'x' is no function that is deployed ('gpufaas list' has them), and no call that is"
    )
