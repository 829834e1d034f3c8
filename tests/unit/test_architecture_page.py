"""docs/architecture.md and docs/questions.md name what exists, and the tour takes an afternoon."""

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
QUESTIONS = (ROOT / "docs" / "questions.md").read_text()
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
ROOMS = {each.split("/")[0]: ROOT / each for each in BUILD["targets"]["wheel"]["packages"]}
WORDS = re.compile(r"raise|limits\.memory|(gpufaas|com\.openfaas)\..*|PUT|POST|.*\.toml")
"""Marked as code, and no name of ours: what users write, and Python's own words."""
DEFINED = re.compile(r"^( *)(?:async )?(def|class|self\.|)\b ?(\w+)(?=\(|:| =|\[)", flags=re.M)
"""A function, class, constant or attribute."""


def paragraphs() -> list[str]:
    """Return both pages in pieces that are about one thing: table rows, list items, paragraphs."""
    text = re.sub(r"^```.*?^```", "", PAGE + QUESTIONS, flags=re.S | re.M)
    return [each for each in re.split(r"\n\n|\n(?=\||\d+\. |- )", text) if "`" in each]


def files_and_names(paragraph: str) -> tuple[list[str], list[str]]:
    marked = re.findall(r"`([^`\n]+)`", paragraph)
    files = [
        each for each in marked if re.fullmatch(r"\w[\w./-]*(\.py|/[\w./-]*)", each) and not each.startswith("DATA/")
    ]
    names = [each for each in marked if re.fullmatch(r"[A-Za-z_]\w*(\.[a-z_]\w*)?", each)]
    return files, [each for each in names if each not in files and each not in ROOMS and not WORDS.fullmatch(each)]


def file_of(written: str) -> Path:
    """Return the file or folder that *written* names: from the root, below a room, or the only one that ends so."""
    room, _, rest = written.partition("/")
    if (ROOT / written).exists():
        return ROOT / written
    if room in ROOMS and rest:
        assert (ROOMS[room] / rest).exists(), f"there is no {written}"
        return ROOMS[room] / rest
    name = Path(written).name
    found = [at for base in ROOMS.values() for at in base.rglob(name) if str(at).endswith(f"/{written.rstrip('/')}")]
    assert len(found) == 1, f"{written} is {found or 'nowhere'}: write it from its room"
    return found[0]


@cache
def names_in(place: Path) -> frozenset[str]:
    """Return what a file, or the files of a folder, define; methods are there alone and as ``Class.method``."""
    found: set[str] = set()
    for source in [place] if place.is_file() else place.rglob("*.py"):
        of = ""
        for defined in DEFINED.finditer(source.read_text()):
            indent, keyword, name = defined.groups()
            found.add(name)
            if keyword == "class":
                of = name
            elif indent:
                found.add(f"{of}.{name}")
    return frozenset(found)


@cache
def all_names() -> frozenset[str]:
    return frozenset().union(*(names_in(base) for base in ROOMS.values()))


@pytest.mark.parametrize("paragraph", paragraphs(), ids=lambda text: text.strip()[:40])
def test_files_and_names_exist(paragraph: str) -> None:
    """Classes and their methods are found by their names; other functions are in a file that stands beside them."""
    files, names = files_and_names(paragraph)
    beside = frozenset().union(*(names_in(file_of(each)) for each in files))

    missing = [each for each in names if each not in (all_names() if each[0].isupper() or not files else beside)]

    assert missing == [], f"not in {files or 'any room'}"


def test_there_are_twenty_questions_and_each_has_a_file() -> None:
    rows = re.findall(r"^\| (?!question|---)(.*?) \| (.*) \|$", QUESTIONS, flags=re.M)

    assert len(rows) >= 20
    assert [asked for asked, place in rows if not re.search(r"`[\w./-]+(\.py|/)`|\]\(", place)] == []


def test_every_room_is_named() -> None:
    assert [each for each in ROOMS if not re.search(rf"\b{each}\b", PAGE)] == []


def test_the_twelve_stops_take_an_afternoon() -> None:
    stops = PAGE.partition("## Twelve stops")[2].partition("\n1. ")[2].partition("\n\n")[0]
    first = re.findall(r"^(?:\d+\. |)`([^`]+\.py)`: ", stops, flags=re.M)
    lines = {each: file_of(each).read_text().count("\n") for each in re.findall(r"`([^`\n]+\.py)`", stops)}

    assert len(first) == 12
    assert {each: count for each, count in lines.items() if count > 250} == {}, "a stop is read in one look"
    assert sum(lines.values()) < 3000, "twelve lines a minute, four hours"
