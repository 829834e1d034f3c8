"""Go's layouts of time."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from gpufaas_cli.go_time import STRING, format_time

MOMENT = datetime(2026, 3, 9, 15, 4, 7, 120_000, UTC)
WEST = MOMENT.astimezone(timezone(timedelta(hours=-3, minutes=-30)))


@pytest.mark.parametrize(
    ("layout", "shown"),
    [
        ("2006-01-02T15:04:05Z07:00", "2026-03-09T15:04:07Z"),
        ("2006-01-02T15:04:05.000Z0700", "2026-03-09T15:04:07.120Z"),
        ("Mon Jan _2 15:04:05 MST 2006", "Mon Mar  9 15:04:07 UTC 2026"),
        ("Monday, 02-Jan-06 15:04:05 -0700", "Monday, 09-Mar-26 15:04:07 +0000"),
        ("January 2 3:04PM", "March 9 3:04PM"),
        ("1/2 3:4:5pm,999", "3/9 3:4:7pm,12"),
        ("002", "068"),
        ("15h", "15h"),
        ("", ""),
    ],
)
def test_layouts_are_gos(layout: str, shown: str) -> None:
    assert format_time(MOMENT, layout) == shown


def test_zones_and_fractions() -> None:
    assert format_time(MOMENT, STRING) == "2026-03-09 15:04:07.12 +0000 UTC"
    assert format_time(MOMENT.replace(microsecond=0), STRING) == "2026-03-09 15:04:07 +0000 UTC"
    assert format_time(WEST, STRING) == "2026-03-09 11:34:07.12 -0330 -0330"
    assert format_time(WEST, "Z07:00 -07") == "-03:30 -03"
