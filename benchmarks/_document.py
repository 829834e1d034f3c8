"""Parts of a document that programs write, each between two marks."""

import re
from collections.abc import Sequence
from pathlib import Path


def write_part(path: Path, name: str, text: str, head: str = "") -> None:
    """Put *text* where part *name* is in *path*, or at its end; a document that is not there begins with *head*."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    part = f"{begin}\n\n{text.strip()}\n\n{end}\n"
    before = path.read_text() if path.exists() else head.strip() + "\n\n"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}\n", re.DOTALL)
    after, found = pattern.subn(lambda _: part, before)
    path.write_text(after if found else before.rstrip("\n") + "\n\n" + part)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown: the first column left, the others right."""
    lines = [" | ".join(headings), " | ".join(["---"] + ["---:"] * (len(headings) - 1))]
    lines += [" | ".join(row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)
