"""The text and the fields of a policy's spec, and what is said about one that is wrong."""

from io import BytesIO
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from gpufaas_core.errors import InvalidSpec
from gpufaas_scheduler.policies import PolicySpec, make_policy, policy_spec
from gpufaas_scheduler.policies.registry import described
from gpufaas_scheduler.policies.spec import Chosen, read_options
from gpufaas_simulator.decisions import DecisionLog
from gpufaas_simulator.run import engine_header, simulate
from gpufaas_simulator.synthetic import devices, make_workload

NAMES = st.from_regex(r"[a-z][-_a-z0-9]{0,8}", fullmatch=True)
VALUES = st.from_regex(r"[-a-z0-9.]{0,8}", fullmatch=True)
OPTIONS = st.dictionaries(NAMES, VALUES, max_size=3)
ROLES = st.dictionaries(NAMES, st.builds(Chosen, NAMES, OPTIONS), max_size=3)


@given(st.builds(PolicySpec, NAMES, OPTIONS, ROLES) | st.builds(PolicySpec, st.just(""), roles=ROLES.filter(bool)))
def test_text_and_fields_say_the_same(spec: PolicySpec) -> None:
    assert PolicySpec.parse(str(spec)) == spec
    assert msgspec.json.decode(msgspec.json.encode(spec), type=PolicySpec) == spec


def test_a_spec_has_the_options_with_their_types() -> None:
    spec = policy_spec("least-wait:wait_bound_s=7+replacement=cost-aware")

    assert spec == PolicySpec("least-wait", {"wait_bound_s": 7.0}, {"replacement": Chosen("cost-aware")})
    assert str(spec) == "least-wait:wait_bound_s=7+replacement=cost-aware"
    assert make_policy(spec).replacement.name == "cost-aware"
    assert policy_spec("lalb-o3:o3_limit=10") == PolicySpec("lalb-o3", {"o3_limit": 10})
    assert make_policy("lb").replacement.name == "lru"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' does not say a policy: write NAME"),
        ("lb:", "'lb:' does not say a policy: write NAME"),
        ("lb:o3_limit", "does not say a policy"),
        ("lb+lalb", "'lb\\+lalb' does not say a policy: .* as in lalb-o3:o3_limit=10\\+replacement=cost-aware"),
        ("=lb", "does not say a policy"),
        ("lb+replacement=", "does not say a policy"),
        ("lalb-o3:o3_limit=1,o3_limit=2", "gives o3_limit twice: say it once"),
        ("lb+replacement=lru+replacement=lru", "names replacement twice: say it once"),
        ("random", "no policy is called 'random': choose one of lb, lalb, lalb-o3, least-wait"),
        ("order=o3", "policy 'order=o3' has no placement: add placement=NAME, or begin with a policy"),
        ("least-wait+placement=locality", "order least-wait goes with placement least-wait only, not with locality"),
        ("lalb-o3:o3_limit=3+order=arrival", "lalb-o3 has no option 'o3_limit': it has none"),
        ("lalb-o3+order=o3:limit=3", "o3 has no option 'limit': it has o3_limit"),
        ("lb+order=best", "no order is called 'best': choose one of arrival, o3"),
        ("lb+taste=good", "there is no role 'taste': choose one of "),
        ("lb+replacement=fifo", "no replacement is called 'fifo': choose one of lru, cost-aware"),
        ("lb+replacement=lru:size=3", "lru has no option 'size': it has park"),
        ("lalb:o3_limit=3", "lalb has no option 'o3_limit': it has none"),
        ("lalb-o3:limit=3", "lalb-o3 has no option 'limit': it has o3_limit"),
        ("lalb-o3:o3_limit=-1", "lalb-o3: o3_limit is a whole number, 0 or more, not '-1'"),
        ("lalb-o3:o3_limit=1.5", "lalb-o3: o3_limit is a whole number, 0 or more, not '1.5'"),
        ("lalb-o3:o3_limit=", "lalb-o3: o3_limit is a whole number, 0 or more, not ''"),
        ("least-wait:wait_bound_s=nan", "least-wait: wait_bound_s is a number, 0 or more, not 'nan'"),
        ("least-wait:wait_bound_s=inf", "least-wait: wait_bound_s is a number, 0 or more, not 'inf'"),
    ],
)
def test_a_wrong_spec_is_refused_in_one_line_that_helps(text: str, message: str) -> None:
    with pytest.raises(InvalidSpec, match=message) as refused:
        policy_spec(text)

    assert "\n" not in str(refused.value)


def test_roles_alone_are_a_policy_too() -> None:
    """The names are short for compositions: spelled out, they decide the same."""
    workload = make_workload(working_set=12, rpm=200, minutes=1, on=devices(4))

    def log(spec: str) -> bytes:
        out = BytesIO()
        simulate(workload, engine_header(spec), observers=[DecisionLog(out)])
        return out.getvalue()

    assert log("lalb-o3:o3_limit=3") == log("order=o3:o3_limit=3+placement=locality")
    assert log("lalb") == log("lalb-o3+order=o3:o3_limit=0")
    assert log("lb") == log("lalb+order=arrival+placement=anywhere")
    assert log("least-wait:wait_bound_s=9") == log("order=least-wait:wait_bound_s=9+placement=least-wait")
    assert (
        len(
            {
                log("lb"),
                log("lb+placement=locality"),
                log("lalb-o3+placement=anywhere"),
                log("lalb-o3"),
                log("lalb-o3+placement=least-wait"),
            }
        )
        == 5
    )


def test_options_of_every_kind() -> None:
    class Options(Struct):
        count: Annotated[int, Meta(gt=1, le=9)] = 2
        share: Annotated[float, Meta(ge=0, lt=1)] = 0.5
        law: Literal["pareto", "normal"] = "normal"
        sticky: bool = False
        note: str = ""

    made = read_options(
        "mine", Options, {"count": "3", "share": "0.25", "law": "pareto", "sticky": "true", "note": "x"}
    )
    assert made == Options(3, 0.25, "pareto", True, "x")

    for given_, message in (
        ({"count": "1"}, "mine: count is a whole number, more than 1, 9 at most, not '1'"),
        ({"share": 1}, "mine: share is a number, 0 or more, less than 1, not '1'"),
        ({"law": "levy"}, "mine: law is one of normal, pareto, not 'levy'"),
        ({"sticky": "yes"}, "mine: sticky is true or false, not 'yes'"),
        ({"note": 3}, "mine: note is text, not '3'"),
        ({"size": "3"}, "mine has no option 'size': it has count, share, law, sticky, note"),
    ):
        with pytest.raises(InvalidSpec, match=message):
            read_options("mine", Options, given_)


def test_every_policy_can_be_listed_with_its_options() -> None:
    found = {(each.role, each.name): each for each in described()}

    assert found["", "lalb-o3"].options == (
        ("o3_limit", "a whole number, 0 or more", "25", "how often one waiting call may be overtaken"),
    )
    assert ("replacement", "cost-aware") in found
    assert all(each.says for each in found.values())
    for role, name in found:
        policy = "least-wait" if name == "least-wait" else "lb"  # as an order it goes with its placement only
        make_policy(name if not role else f"{policy}+{role}={name}")
