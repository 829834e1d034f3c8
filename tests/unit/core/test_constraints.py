"""Constraints as users write them, and the devices that satisfy them."""

import pytest

from gpufaas_core.constraints import Constraint, label_value, parse_constraint, parse_label, satisfied
from gpufaas_core.errors import InvalidSpec

LABELS = {"gpu": "true", "zone": "a", "nvidia.com/gpu.product": "NVIDIA-H200", "device.id": "local/cuda:0"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu=true", Constraint("gpu", "true")),
        ("zone==a", Constraint("zone", "a")),
        ("zone!=a", Constraint("zone", "a", negated=True)),
        ("node.platform.os == linux", Constraint("node.platform.os", "linux")),
        ("  zone  !=  a  ", Constraint("zone", "a", negated=True)),
        ("node.labels.zone==a", Constraint("zone", "a")),
        ("engine.labels.zone == a", Constraint("zone", "a")),
        ("kubernetes.io/hostname=host-1.example.org", Constraint("kubernetes.io/hostname", "host-1.example.org")),
        ("device.id=local/cuda:0", Constraint("device.id", "local/cuda:0")),
    ],
)
def test_what_is_written_is_read(text: str, expected: Constraint) -> None:
    assert parse_constraint(text) == expected


@pytest.mark.parametrize(
    "text", ["", "gpu", "=a", "zone=", "zone!", "a=b=c", "zone>a", "a b=c", "zone=a b", "-a=b", "a=b\n=c"]
)
def test_what_is_no_constraint_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidSpec, match=r"is not a constraint: write KEY=VALUE or KEY!=VALUE, for example gpu=true"):
        parse_constraint(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu=true", True), ("gpu=True", True), ("gpu=false", False), ("gpu!=false", True), ("zone!=A", False),
        ("missing=a", False), ("missing!=a", True), ("nvidia.com/gpu.product=NVIDIA-H200", True),
    ],
)  # fmt: skip
def test_a_device_satisfies_it_or_not(text: str, expected: bool) -> None:
    assert parse_constraint(text).satisfied_by(LABELS) is expected


def test_all_constraints_must_hold() -> None:
    assert satisfied([], {})
    assert satisfied([Constraint("gpu", "true"), Constraint("zone", "a")], LABELS)
    assert not satisfied([Constraint("gpu", "true"), Constraint("zone", "b")], LABELS)


def test_a_constraint_is_shown_as_it_could_be_written() -> None:
    for text in ("gpu=true", "zone!=a"):
        assert str(parse_constraint(text)) == text


def test_labels_of_operators() -> None:
    assert parse_label("zone=a") == ("zone", "a")
    assert parse_label("example.com/rack=r-1.2") == ("example.com/rack", "r-1.2")
    for text in ("zone", "zone=", "=a", "zone=a b", "zone=a,b", "zo ne=a"):
        with pytest.raises(InvalidSpec, match="is not a label: write KEY=VALUE"):
            parse_label(text)


def test_a_product_name_becomes_a_label_that_a_constraint_can_name() -> None:
    name = label_value("NVIDIA GeForce RTX 4090 (24 GB)")

    assert name == "NVIDIA-GeForce-RTX-4090-24-GB"
    assert parse_constraint(f"nvidia.com/gpu.product={name}").value == name
