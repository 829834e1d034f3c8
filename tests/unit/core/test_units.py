"""Sizes and durations as users write them."""

import pytest

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import GiB, MiB, format_bytes, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", MiB),
        ("512Mi", 512 * MiB),
        ("2GiB", 2 * GiB),
        ("1.5Gi", 3 * GiB // 2),
        ("500M", 500_000_000),
        ("1k", 1000),
    ],
)
def test_sizes_in_kubernetes_and_common_notation(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1Mi", "1 XiB", "1,5Gi"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidSpec, match="is not a memory size: write for example 512Mi"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("300ms", 0.3), ("1.5s", 1.5), ("2m", 120), ("1h30m", 5400), ("20", 20), ("100us", 1e-4)]
)
def test_durations_as_go_writes_them_and_bare_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "5 minutes", "-1s", "1s2"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidSpec, match="is not a duration: write for example 300ms"):
        parse_duration(text)


def test_sizes_for_people() -> None:
    assert [format_bytes(size) for size in (0, 10 * 1024, 324 * MiB, 3 * GiB // 2)] == [
        "0 B",
        "10 KiB",
        "324 MiB",
        "1.5 GiB",
    ]
