"""Times as Go writes them, by layouts of its reference time: what faas-cli's flags take and its tables show."""

import re
from datetime import datetime, timedelta
from typing import Final

STRING: Final = "2006-01-02 15:04:05.999999999 -0700 MST"
"""How Go prints a time when nobody says how."""

_TOKEN: Final = re.compile(
    r"January|Jan|Monday|Mon|MST|2006|002|01|02|03|04|05|06|15|_2|1|2|3|4|5|PM|pm"
    r"|Z07:00|Z0700|Z07|-07:00|-0700|-07|[.,]0+(?![0-9])|[.,]9+(?![0-9])"
)
_STRFTIME: Final = {
    "January": "%B", "Jan": "%b", "Monday": "%A", "Mon": "%a", "2006": "%Y", "002": "%j", "01": "%m", "02": "%d",
    "03": "%I", "04": "%M", "05": "%S", "06": "%y", "15": "%H", "PM": "%p",
}  # fmt: skip


def format_time(moment: datetime, layout: str) -> str:
    """Return *moment*, which has a zone, by Go's *layout*: ``2006-01-02`` is year, month and day."""
    return _TOKEN.sub(lambda match: _part(moment, match[0]), layout)


def _part(moment: datetime, token: str) -> str:
    if token in _STRFTIME:
        return moment.strftime(_STRFTIME[token])
    match token:
        case "_2":
            return f"{moment.day:2}"
        case "1":
            return str(moment.month)
        case "2":
            return str(moment.day)
        case "3":
            return str(moment.hour % 12 or 12)
        case "4":
            return str(moment.minute)
        case "5":
            return str(moment.second)
        case "pm":
            return moment.strftime("%p").lower()
        case "MST":
            return _zone(moment, "-0700") if moment.utcoffset() else "UTC"
    if token[0] in ".,":
        digits = f"{moment.microsecond * 1000:09}"[: len(token) - 1]
        if token[1] == "9":  # as many as there are
            digits = digits.rstrip("0")
        return token[0] + digits if digits else ""
    return _zone(moment, token)


def _zone(moment: datetime, token: str) -> str:
    offset = moment.utcoffset() or timedelta()
    if token[0] == "Z" and not offset:
        return "Z"
    minutes = int(offset.total_seconds() // 60)
    hours, rest = divmod(abs(minutes), 60)
    sign, form = "-" if minutes < 0 else "+", token[1:]
    return f"{sign}{hours:02}" + {"07:00": f":{rest:02}", "0700": f"{rest:02}", "07": ""}[form]
