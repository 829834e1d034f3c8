"""What the output of a build.py may depend on: an edit of the handler alone must not train a model again."""

import ast
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

SCRIPT: Final = "build.py"
_APART: Final = ("handler.py", "test_*.py", "*_test.py", "sample.*", "*.md", "requirements*")
"""Files beside build.py that count only if it names them. Requirements count by what is installed for them."""


def inputs_of_script(files: Mapping[str, Path]) -> Iterator[str]:
    """
    Yield those of *files*, by their paths in the handler folder, that count for the output of build.py: all but the
    handler, its tests, its sample and its documents, and these too where build.py, or a module of the folder that it
    imports, imports them or has their name in a text.
    """
    try:
        imported, texts = _read(files)
    except (SyntaxError, ValueError):  # its run says why
        yield from files
        return
    for name in files:
        apart = any(fnmatch(name, pattern) for pattern in _APART) and "/" not in name
        if not apart or name in imported or any(_names(text, name) for text in texts):
            yield name


def _names(text: str, name: str) -> bool:
    pattern = text.rpartition("/")[2]
    return name in text or text == Path(name).stem or (pattern.strip("*.") != "" and fnmatch(name, pattern))


def _read(files: Mapping[str, Path]) -> tuple[set[str], set[str]]:
    """Return build.py with the files that it imports, directly or not, and the texts in them but for docstrings."""
    todo, imported, texts = [SCRIPT], set[str](), set[str]()
    while todo:
        name = todo.pop()
        if name in imported or name not in files:
            continue
        imported.add(name)
        nodes = list(ast.walk(ast.parse(files[name].read_bytes())))
        said = {id(each.value) for each in nodes if isinstance(each, ast.Expr)}
        for each in nodes:
            if isinstance(each, ast.Constant) and isinstance(each.value, str) and id(each) not in said:
                texts.add(each.value)
            todo += _imported(each, name.split("/")[:-1])
    return imported, texts


def _imported(node: ast.AST, folders: list[str]) -> Iterator[str]:
    """Yield the files that *node*, of a module in *folders*, may import."""
    modules: list[list[str]] = []
    if isinstance(node, ast.Import):
        modules = [each.name.split(".") for each in node.names]
    elif isinstance(node, ast.ImportFrom):
        inside = folders[: len(folders) + 1 - node.level] if node.level else []
        inside = [*inside, *(node.module.split(".") if node.module else ())]
        modules = [[*inside, each.name] for each in node.names]
    for parts in modules:
        for end in range(1, len(parts) + 1):
            place = "/".join(parts[:end])
            yield from (f"{place}.py", f"{place}/__init__.py")
