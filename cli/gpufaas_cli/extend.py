"""Adding a function to the text of a stack file, so that everything else in it stays as its author wrote it."""

from collections.abc import Mapping
from pathlib import Path

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from gpufaas_cli.stack import BadStack, compose, read_text

Entry = Mapping[str, str | Mapping[str, str]]
"""Keys and values of a function's entry; values are plain words."""


def lines_of(entry: Entry) -> list[str]:
    return [f"{key}: {value if isinstance(value, str) else _flow(value)}" for key, value in entry.items()]


def _flow(values: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in values.items()) + "}"


def extended(path: Path, name: str, entry: Entry) -> str:
    """
    Return the text of the stack file *path* with one more function.

    :raises BadStack: it is no stack file, has a function of that name, or could not be extended without other changes
    """
    text = read_text(path) if path.stat().st_size else "version: 1.0\nprovider:\n  name: openfaas\n"
    root = compose(path, text)
    if not isinstance(root, MappingNode):
        raise BadStack(f"{path}:1: it is not a stack file: it should begin with 'version: 1.0'")
    newline = "\r\n" if "\r\n" in text else "\n"
    by_hand = f"add the function to it by hand: {name}: {{{', '.join(lines_of(entry))}}}"

    key, functions = next(((key, value) for key, value in root.value if _text(key) == "functions"), (None, None))
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith(("\n", "\r")):
        lines[-1] += newline
    indent, step = 2, 2
    if key is None or functions is None:
        at = _line_after(root, lines)
        block = [f"functions:{newline}"]
    elif isinstance(functions, MappingNode) and functions.value and not functions.flow_style:
        for each, _ in functions.value:
            if _text(each) == name:
                raise BadStack(
                    f"{path}:{each.start_mark.line + 1}: there is a function {name} already: choose another name"
                )
        (first, inner), *_ = functions.value
        indent = first.start_mark.column
        if isinstance(inner, MappingNode) and inner.value and not inner.flow_style:
            step = max(1, inner.start_mark.column - indent)
        at, block = _line_after(functions, lines), []
    elif _is_empty(functions):
        # `functions:`, `functions: {}` or `functions: null`: what stands after the colon goes.
        line = key.end_mark.line
        if functions.end_mark.line != line:
            raise BadStack(f"{path}:{line + 1}: cannot extend 'functions' as it is written: {by_hand}")
        start, end = functions.start_mark.column, functions.end_mark.column
        if end > start:
            lines[line] = lines[line][:start].rstrip() + lines[line][end:]
        at, block = line + 1, []
        indent = key.start_mark.column + 2
    else:
        raise BadStack(f"{path}:{functions.start_mark.line + 1}: cannot extend 'functions' as it is written: {by_hand}")

    block.append(f"{' ' * indent}{name}:{newline}")
    block += [f"{' ' * (indent + step)}{each}{newline}" for each in lines_of(entry)]
    result = "".join([*lines[:at], *block, *lines[at:]])
    if not _only_added(text, result, name, entry):
        raise BadStack(f"{path}: cannot be extended without changing what is in it: {by_hand}")
    return result


def _text(node: Node) -> str | None:
    return str(node.value) if isinstance(node, ScalarNode) else None


def _is_empty(node: Node) -> bool:
    if isinstance(node, MappingNode):
        return not node.value
    return isinstance(node, ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _line_after(node: Node, lines: list[str]) -> int:
    """Return the line after the last one of *node*: its own end mark is after the comments of what comes next."""
    line: int = node.end_mark.line + bool(node.end_mark.column)
    while not lines[line - 1].partition("#")[0].strip():
        line -= 1
    return line


def _only_added(before: str, after: str, name: str, entry: Entry) -> bool:
    """Return whether *after* is *before* and the new function: checked, because YAML can be written in many ways."""
    try:
        old, new = (yaml.load(text, Loader=yaml.BaseLoader) for text in (before, after))
    except yaml.YAMLError:
        return False
    if not isinstance(new, dict) or not isinstance(new.get("functions"), dict):
        return False
    added = new["functions"].pop(name, None)
    was = old["functions"] if isinstance(old.get("functions"), dict) else {}
    return added == entry and new.pop("functions") == was and new == {k: v for k, v in old.items() if k != "functions"}
