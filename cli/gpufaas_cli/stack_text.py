"""The text of a stack file, from this disk or a URL, and the YAML in it."""

from pathlib import Path
from typing import Final

import yaml
from yaml.nodes import Node

from gpufaas_core.errors import GpufaasError
from gpufaas_templates import bounded_yaml

_TIMEOUT_S: Final = 5.0
_HINT: Final = "'gpufaas new NAME --lang python3-torch' writes a stack file"
_MOST: Final = 16 << 20  # bytes that are held in memory


class BadStack(GpufaasError):
    """The stack file, or what was selected from it, is wrong. The message begins with ``FILE:LINE:`` where it can."""


def read_text(path: Path) -> str:
    """:raises BadStack: it is not there, or not readable as UTF-8"""
    if url := url_of(path):
        return _fetched(url)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise BadStack(f"{path}: it is not text in UTF-8 (byte {exc.start}): is it the right file?") from exc
    except OSError as exc:
        raise BadStack(f"{path}: {exc.strerror or exc}: name the stack file with -f FILE") from exc


def _fetched(url: str) -> str:
    import httpx

    hint, content = "name the stack file with -f FILE or -f URL", bytearray()
    try:
        with httpx.stream("GET", url, timeout=_TIMEOUT_S, follow_redirects=True) as answer:
            if not answer.is_success:
                raise BadStack(f"{url}: it answers {answer.status_code} {answer.reason_phrase}".rstrip() + f": {hint}")
            for part in answer.iter_bytes():
                content += part
                if len(content) > _MOST:
                    raise BadStack(f"{url}: it is larger than {_MOST >> 20} MiB: is it the right address?: {hint}")
        return content.decode("utf-8-sig")
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise BadStack(f"{url}: it cannot be reached: {exc or type(exc).__name__}: {hint}") from exc
    except UnicodeDecodeError as exc:
        raise BadStack(f"{url}: it is not text in UTF-8 (byte {exc.start}): {hint}") from exc


def url_of(path: Path) -> str | None:
    """Return the http(s) URL that *path* stands for, if it does: a `Path` keeps all of it but one slash."""
    first, _, rest = path.as_posix().partition(":/")
    return f"{first}://{rest.lstrip('/')}" if first.lower() in ("http", "https") and rest else None


def compose(path: Path, text: str, what: str = "stack file", hint: str = _HINT) -> Node:
    """
    Return the YAML of *text* as nodes, which know their lines.

    :param hint: what to do where it is empty
    :raises BadStack: it is not YAML, or empty
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            bounded_yaml.check(root)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise BadStack(f"{path}{line}: it is not YAML: {exc.problem or exc.context}") from exc
    except yaml.reader.ReaderError as exc:
        line = f":{text.count(chr(10), 0, exc.position) + 1}"
        raise BadStack(f"{path}{line}: it is not YAML: character {chr(exc.character)!r} is not allowed") from exc
    except bounded_yaml.TooLarge as exc:
        raise BadStack(f"{path}: it is no {what}: {exc}") from exc
    except RecursionError as exc:
        raise BadStack(f"{path}: it is no {what}: it is nested too deeply") from exc
    if root is None:
        raise BadStack(f"{path}: it is empty: {hint}")
    assert isinstance(root, Node)
    return root
