"""The file of --offers is read strictly: each mistake is one line that says which offer, and what to write."""

from pathlib import Path

import pytest

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.orders import NodeOffer
from gpufaas_core.units import GiB
from gpufaas_providers.offers import provider_named, read_offers


def test_a_file_of_offers_is_read(tmp_path: Path) -> None:
    path = tmp_path / "offers.yml"
    path.write_text("""
offers:
  - {kind: cpu-0.5, memory: 2GiB, devices: 2, price_per_h: 0.05, start_s: 2, limit: 4, options: {zone: a}}
  - {kind: cpu, memory: 1GiB}
""")

    assert read_offers(path) == (
        NodeOffer("cpu-0.5", 2 * GiB, 2, 0.05, 2.0, 4, {"zone": "a"}),
        NodeOffer("cpu", GiB),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("offers: [{kind: a, memory: 1GiB, price_per_h: -1}]", "offer 1, a: price_per_h is -1: it is a number of 0 or"),
        ("offers: [{kind: a, memory: 1GiB, price_per_h: .nan}]", "offer 1, a: price_per_h is nan: it is a number of 0"),
        ("offers: [{kind: a, memory: 1GiB, devices: 0}]", "offer 1, a: devices is 0: it is a number of 1 or more"),
        ("offers: [{kind: a, memory: 1GiB}, {kind: a, memory: 1GiB}]", "offer 2, a: this kind is offered twice"),
        ("offers: [{kind: a, memory: much}]", "offer 1, a: memory: "),
        ("offers: [{kind: a, memory: '0'}]", "offer 1, a: memory is 0"),
        ("offers: [{kind: a, memory: 1GiB, prise: 1}]", "unknown field `prise`"),
        ("offers: []", "it offers nothing"),
        ("offers: [", "while parsing"),
        ("", "Expected `object`, got `null`"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "offers.yml"
    path.write_text(text)

    with pytest.raises(InvalidSpec) as refused:
        read_offers(path)

    assert str(refused.value).startswith(f"--offers {path}: ")
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="No such file"):
        read_offers(tmp_path / "none.yml")


def test_an_unknown_provider_is_refused_with_the_list() -> None:
    assert provider_named("local") == "local"
    with pytest.raises(InvalidSpec, match="there is no provider 'clouds': there are: local"):
        provider_named("clouds")
    with pytest.raises(InvalidSpec, match="did you mean local"):
        provider_named("locale")
