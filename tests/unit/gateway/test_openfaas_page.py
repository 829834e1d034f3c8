"""docs/openfaas.md has every label and annotation of OpenFaaS that is read here, with the default that counts."""

import re
from pathlib import Path

import pytest

from gpufaas_async_calls.retry import PREFIX as RETRY
from gpufaas_core.scaling import _LABELS, PREFIX, TYPES, ScalingRule, read_scaling_rule
from gpufaas_gateway.annotations import ANNOTATIONS, READ

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "openfaas.md").read_text()
_, _, _SECTION = PAGE.partition("## Labels of scaling\n")
ROWS = dict(re.findall(r"^\| `([a-z.-]+)` \| `([^`]+)` \|", _SECTION.partition("\n## ")[0], re.MULTILINE))
"""Default by label, as the table has them."""


@pytest.mark.parametrize("label", sorted(_LABELS.keys() | ROWS.keys()))
def test_a_label_of_scaling_is_read_and_on_the_page_with_its_default(label: str) -> None:
    field, _ = _LABELS[label]

    read = read_scaling_rule({f"{PREFIX}{label}": ROWS[label]})

    assert getattr(read, field) == getattr(ScalingRule(), field)


@pytest.mark.parametrize("kind", TYPES)
def test_every_load_that_can_be_measured_is_on_the_page(kind: str) -> None:
    assert f"`{kind}`" in _SECTION


@pytest.mark.parametrize(
    "name",
    [
        *(what.removeprefix("annotation ") for what in READ if "com.openfaas." in what),
        *(f"{RETRY}{each}" for each in ("attempts", "codes", "min_wait", "max_wait")),
    ],
)
def test_an_annotation_of_openfaas_that_is_read_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_an_annotation_of_ours_is_on_the_page_of_authors(name: str) -> None:
    assert f"`{name}`" in (DOCS / "writing-functions.md").read_text()
