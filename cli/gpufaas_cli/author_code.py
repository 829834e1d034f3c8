"""What the author's code says, without running it: mistakes in a handler.py, and on which files a build.py depends."""

import ast
import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from gpufaas_core.bundle import Kind
from gpufaas_core.errors import InvalidSpec

_CALLED: Final[Mapping[Kind, Mapping[str, tuple[str, ...]]]] = {
    "model": {
        "load": ("device",),
        "handle": ("model", "event", "context"),
        "handle_batch": ("model", "events", "contexts"),
        "warm_up": ("model",),
    },
    "http": {"handle": ("event", "context")},
}
"""What a template calls, and with what."""
SCRIPT: Final = "build.py"
_APART: Final = ("handler.py", "test_*.py", "*_test.py", "sample.*", "*.md", "requirements*")
"""Files beside build.py that count only if it names them. Requirements count by what is installed for them."""


def check_handler(file: Path, kind: Kind, template: str) -> None:
    """Find what would fail at the deployment. :raises InvalidSpec: bad syntax, or a missing function; names the line"""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read_bytes(), str(file))
            compile(tree, str(file), "exec", dont_inherit=True)
    except SyntaxError as exc:
        shown = f": {exc.text.strip()}" if exc.text and exc.text.strip() else ""
        raise InvalidSpec(f"{file}:{exc.lineno or 1}: {exc.msg}{shown}") from None
    except ValueError as exc:  # null bytes
        raise InvalidSpec(f"{file}: {exc}") from None
    bound = _bound_names(tree)
    optional = {"handle_batch", "warm_up"} | ({"handle"} if bound and "handle_batch" in bound else set())
    for name, parameters in _CALLED[kind].items():
        call = f"{name}({', '.join(parameters)})"
        if bound is not None and name not in bound | optional:
            raise InvalidSpec(f"{file} defines no {call}, which {template} calls: add it, or choose another template")
        defined = [each for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        defined = [each for each in defined if each.name == name]
        for each in defined:
            if isinstance(each, ast.AsyncFunctionDef) and name != "handle":
                raise InvalidSpec(
                    f"{file}:{each.lineno}: {name} is async, and {template} calls only handle so: write def {name}, "
                    "with asyncio.run() in it where you need it"
                )
        if len(defined) == 1 and not defined[0].decorator_list and not _takes(defined[0].args, len(parameters)):
            raise InvalidSpec(f"{file}:{defined[0].lineno}: {template} calls {call}, which this {name} does not take")


def defines(file: Path, name: str) -> bool:
    """Return whether *file* binds *name* at its top level; False where it cannot be compiled."""
    try:
        return name in (_bound_names(ast.parse(file.read_bytes())) or ())
    except (SyntaxError, ValueError):
        return False


def _bound_names(tree: ast.Module) -> set[str] | None:
    """Return the names that a module binds at its top level, or None where only running it can tell."""
    names: set[str] = set()
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
                continue  # names inside it are not the module's
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update(alias.asname or alias.name.partition(".")[0] for alias in aliases)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Name(id="globals" | "exec" | "setattr"):
                return None
        todo.extend(ast.iter_child_nodes(node))
    return None if names & {"*", "__getattr__"} else names


def _takes(arguments: ast.arguments, count: int) -> bool:
    positional = len(arguments.posonlyargs) + len(arguments.args)
    if any(default is None for default in arguments.kw_defaults):
        return False
    return positional - len(arguments.defaults) <= count and (count <= positional or arguments.vararg is not None)


def inputs_of_script(files: Mapping[str, Path]) -> Iterator[str]:
    """
    Yield those of *files*, by their paths in the handler folder, that count for the output of build.py: an edit of the
    handler alone must not train a model again. These are all but the handler, its tests, its sample and its documents;
    and these too where build.py, or a module of the folder that it imports, imports them or has their name in a text.
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
