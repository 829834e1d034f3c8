"""
A function of one file: the stack that ``deploy handler.py`` and ``run handler.py`` work with.

Requirements and settings are in the file's PEP 723 block::

    # /// script
    # requires-python = ">=3.11"
    # dependencies = ["transformers"]
    # [tool.gpufaas.annotations]
    # "gpufaas.memory" = "2GiB"
    # ///

The file is built as any function is, from a folder in the user's cache that links to it. The folder stays, so that the
next build has the packages of this one: those of the last `_KEPT` files do.
"""

import hashlib
import os
import re
import tomllib
from pathlib import Path
from typing import Final

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from gpufaas_cli.author_code import defines
from gpufaas_cli.built_parts import drop_oldest
from gpufaas_cli.files import alone, replace_file
from gpufaas_cli.locks import LOCK
from gpufaas_cli.stack import FUNCTION_NAME, Stack, StackFunction
from gpufaas_cli.stack_text import BadStack

_BEGIN: Final = "# /// script"
_BLOCK: Final = re.compile(rf"(?m)^{_BEGIN}$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
_KEPT: Final = 16
_Texts = dict[str, str | bool | int | float]


class _Settings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """``[tool.gpufaas]``: keys of the stack file, and ``memory`` for that of its limits."""

    annotations: _Texts = {}
    environment: _Texts = {}
    labels: _Texts = {}
    secrets: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    memory: str = ""


class _Tool(msgspec.Struct, frozen=True):
    gpufaas: _Settings = _Settings()


class _Script(msgspec.Struct, frozen=True, rename="kebab"):
    requires_python: str = ""
    dependencies: tuple[str, ...] = ()
    tool: _Tool = _Tool()


def name_of(file: Path) -> str:
    """Return the name of the function of *file*: the file's; of a ``handler.py``, that of its folder."""
    stem = file.absolute().parent.name if file.stem == "handler" else file.stem
    return re.sub("[^a-z0-9]+", "-", stem.lower())[:63].strip("-")


def read(file: Path, name: str) -> tuple[Stack, list[StackFunction]]:
    """
    Return a stack with the function *name* of *file* only, whose folder is made for it.

    :raises BadStack: its block is wrong, as FILE:LINE, or *name* is none
    """
    if not FUNCTION_NAME.fullmatch(name):
        raise BadStack(f"{name!r} is not a function name: give --name, at most 63 of a-z, 0-9 and '-'")
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise BadStack(f"{file} cannot be read ({exc}): name a file of Python") from exc
    script, line = _read_block(file, text)
    key = hashlib.sha256(os.fsencode(file.absolute())).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpufaas/files", key).absolute()
    handler = root / name
    required = ""
    for each in script.dependencies:  # on the lines that they have in the file: errors name them
        found = text.find(each, text.find(_BEGIN))
        required += "\n" * (text.count("\n", 0, max(0, found)) - required.count("\n")) + f"{each}\n"
    with alone(handler / "requirements.txt"):
        replace_file(handler / "requirements.txt", required)
        for link, leads_to in ((handler / "handler.py", file.absolute()), (handler / LOCK, root / LOCK)):
            link.unlink(missing_ok=True)
            link.symlink_to(leads_to)  # a lock for all names: `run` gives the file a new one each time
    os.utime(root)
    drop_oldest(root.parent.iterdir(), _KEPT)
    settings = script.tool.gpufaas
    function = StackFunction(
        name=name,
        where=f"{file}:{line}",
        lang="python3-torch" if defines(file, "load") else "python3-http",
        handler=handler,
        annotations=_texts(settings.annotations),
        environment=_texts(settings.environment),
        labels=_texts(settings.labels),
        secrets=settings.secrets,
        constraints=settings.constraints,
        limits={"memory": settings.memory} if settings.memory else {},
        requires_python=script.requires_python,
    )
    return Stack(root / "stack.yaml", None, {name: function}, made_of=file), [function]


def _read_block(file: Path, text: str) -> tuple[_Script, int]:
    """Return what the block says, and its line; 1 where there is none."""
    begins = [number for number, line in enumerate(text.splitlines(), 1) if line.rstrip() == _BEGIN]
    if not begins:
        return _Script(), 1
    place, found = f"{file}:{begins[-1]}", _BLOCK.search(text)
    if len(begins) > 1:
        raise BadStack(f"{place}: a second block `{_BEGIN}`: keep one")
    if found is None:
        raise BadStack(f"{place}: the block `{_BEGIN}` has no end, or a line without `# `: end it with `# ///`")
    lines = [line[2:] for line in found["content"].splitlines()]
    try:
        script = msgspec.convert(tomllib.loads("\n".join(lines)), _Script)
        SpecifierSet(script.requires_python)
    except tomllib.TOMLDecodeError as exc:
        at = re.search(r"at line (\d+)", str(exc))
        line = begins[0] + (int(at[1]) if at else len(lines))
        said = re.sub(r" \(at .*\)$", "", str(exc))
        raise BadStack(f"{file}:{line}: the block `{_BEGIN}` is not TOML: {said}: correct it") from exc
    except (msgspec.ValidationError, InvalidSpecifier) as exc:
        raise BadStack(f"{place}: the block `{_BEGIN}` is wrong: {exc}: correct it") from exc
    return script, begins[0]


def _texts(given: _Texts) -> dict[str, str]:
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in given.items()}
