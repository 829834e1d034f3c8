"""The template of a function of the stack file, pulled when it is missing here."""

import os
from collections.abc import Callable

from gpufaas_cli import repository, stores
from gpufaas_cli.skeletons import DOCKERFILE
from gpufaas_cli.stack import Stack, StackFunction, TemplateSource
from gpufaas_core.errors import InvalidSpec
from gpufaas_templates import Template, find_template


def bare(name: str) -> str:
    """Return ``NAME@ref`` without its ref."""
    return name.partition("@")[0]


def source_of(stack: Stack, template: TemplateSource) -> str:
    """
    Return the repository of *template*: what the stack file says, else the store's.

    :raises InvalidSpec: the store has none of that name
    """
    ref = template.name.partition("@")[2]
    source = template.source
    if source is None:
        source = stores.find_template(template.name, stores.templates()).repository
    elif "://" not in source and (stack.folder / source.partition("#")[0]).exists():
        source = str(stack.folder / source)
    return f"{source}#{ref}" if ref and "#" not in source else source


def template_of(
    stack: Stack, function: StackFunction, fetches: bool, progress: Callable[[str], None] = lambda _: None
) -> Template | None:
    """
    Return the template of *function*; None for a ``dockerfile``, which has none.

    A missing one is pulled where the stack file lists it, or the user has named a store. Other names are more often
    mistyped than meant, and no server is asked for them.

    :param fetches: False: nothing is pulled
    :raises InvalidSpec: there is none; says which is near
    """
    assert function.lang is not None
    if function.lang.lower() == DOCKERFILE:
        return None
    source = _listed(stack, function.lang)
    ref = source.partition("#")[2] if source and "@" not in function.lang else ""
    names = [function.lang, f"{function.lang}@{ref}"] if ref else [function.lang]
    refused: InvalidSpec | None = None
    for name in names:
        try:
            return find_template(name, stack.template_dirs())
        except InvalidSpec as exc:
            refused = refused or exc
    assert refused is not None
    if not fetches or (source is None and not _asks_store(stack, function.lang)):
        raise refused
    source = source or source_of(stack, TemplateSource(function.lang))
    progress(f"pulling template {function.lang} from {source}")
    pulled = repository.pull(source, stack.folder / "template", only=bare(function.lang))
    return find_template(pulled.written[0], stack.template_dirs())


def _listed(stack: Stack, lang: str) -> str | None:
    """The repository that the stack file names for *lang*; None when it names none."""
    for each in stack.templates:
        if each.source and bare(lang) == bare(each.name):
            return source_of(stack, TemplateSource(lang if "@" in lang else each.name, each.source))
    return None


def _asks_store(stack: Stack, lang: str) -> bool:
    return bool(os.environ.get("OPENFAAS_TEMPLATE_STORE_URL")) or any(
        bare(lang) == bare(each.name) for each in stack.templates
    )
