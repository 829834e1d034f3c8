"""Labels as a scaling rule: OpenFaaS's names and defaults, errors that name the label."""

import pytest

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.scaling import ScalingRule, read_scaling_rule


def label(name: str, value: str) -> dict[str, str]:
    return {f"com.openfaas.scale.{name}": value}


def test_without_labels_about_scaling_there_is_no_rule() -> None:
    assert read_scaling_rule({"com.openfaas.ui.ext": "png", "team": "a", "com.openfaas.scale.someday": "1"}) is None


def test_defaults_are_those_of_openfaas_but_for_the_window_of_scaling_down() -> None:
    assert read_scaling_rule(label("zero", "false")) == ScalingRule(
        min=1, max=20, zero=False, zero_duration_s=900, type="rps", target=50, target_proportion=0.9, factor=10,
        down_window_s=30, pinned=0,
    )  # fmt: skip


def test_every_label_is_read() -> None:
    labels = {
        **label("min", "2"), **label("max", "7"), **label("zero", "true"), **label("zero-duration", "1m30s"),
        **label("type", "capacity"), **label("target", "2.5"), **label("target-proportion", "1"),
        **label("factor", "0"), **label("down.window", "5m"),
    }  # fmt: skip

    assert read_scaling_rule(labels) == ScalingRule(2, 7, True, 90, "capacity", 2.5, 1.0, 0, 300, 0)


@pytest.mark.parametrize(("labels", "pinned"), [({}, 0), ({"zero": "true"}, 0), ({"zero": "false"}, 2)])
def test_a_minimum_is_pinned_where_it_is_given_and_zero_is_not_allowed(labels: dict[str, str], pinned: int) -> None:
    given = {"com.openfaas.scale.type": "rps"}
    for name, value in labels.items():
        given |= label(name, value) | label("min", "2")

    rule = read_scaling_rule(given)

    assert rule is not None
    assert rule.pinned == pinned


@pytest.mark.parametrize(
    ("labels", "acts"),
    [
        ({"min": "2"}, True),
        ({"min": "1", "max": "4"}, True),
        ({"max": "4", "target": "10"}, True),
        ({"factor": "20"}, True),
        ({"type": "alert", "max": "4"}, False),
        ({"factor": "0", "target": "10"}, False),
        ({"type": "alert", "zero": "true"}, True),
        ({"zero": "true"}, True),
    ],
)
def test_a_rule_acts_by_load_or_to_zero(labels: dict[str, str], acts: bool) -> None:
    rule = read_scaling_rule({name: text for each in labels.items() for name, text in label(*each).items()})

    assert rule is not None
    assert rule.acts is acts


def test_a_minimum_above_the_default_maximum_raises_it() -> None:
    rule = read_scaling_rule(label("min", "30"))

    assert rule is not None
    assert (rule.min, rule.max) == (30, 30)


def test_annotations_are_taken_where_there_is_no_label() -> None:
    rule = read_scaling_rule(label("max", "3"), {**label("max", "9"), **label("zero", "true")})

    assert rule is not None
    assert (rule.max, rule.zero) == (3, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min", "-1"), ("min", "1.5"), ("min", "٣"), ("min", "99999"), ("max", "0"), ("max", "many"),
        ("zero", "perhaps"), ("zero-duration", "soon"), ("zero-duration", "0"), ("type", "vibes"), ("target", "0"),
        ("target", "nan"), ("target", "-3"), ("target", "1e400"), ("target-proportion", "1.2"),
        ("target-proportion", "0"), ("factor", "101"), ("down.window", "6m"), ("down.window", ""),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_with_the_name_of_its_label(name: str, value: str) -> None:
    with pytest.raises(InvalidSpec, match=rf"label com\.openfaas\.scale\.{name}: "):
        read_scaling_rule(label(name, value))


def test_a_bad_value_of_an_annotation_is_called_one() -> None:
    with pytest.raises(InvalidSpec, match=r"^annotation com\.openfaas\.scale\.min: '-1' is not a whole number"):
        read_scaling_rule({}, label("min", "-1"))


def test_bounds_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(InvalidSpec, match=r"scale\.max: 2 is below com\.openfaas\.scale\.min, which is 3"):
        read_scaling_rule({**label("min", "3"), **label("max", "2")})
