"""The template of a function of the stack file, pulled when it is missing here."""

import os
from collections.abc import Callable
from typing import Final

from gpufaas_cli import repository
from gpufaas_cli.skeletons import DOCKERFILE
from gpufaas_cli.stack import BadStack, Stack, StackFunction, TemplateSource
from gpufaas_core.errors import InvalidSpec
from gpufaas_templates import Template, find_template

_STORE: Final = "OPENFAAS_TEMPLATE_STORE_URL"


def bare(name: str) -> str:
    """Return ``NAME@ref`` without its ref."""
    return name.partition("@")[0]


def source_of(stack: Stack, template: TemplateSource) -> str:
    """
    Return the repository that the stack file gives *template*.

    :raises BadStack: it gives none; says who would look into a store
    """
    ref = template.name.partition("@")[2]
    source = template.source
    if source is None:
        raise BadStack(
            f"{stack.path}: template {template.name} has no source: pull it with 'faas-cli template store pull "
            f"{template.name}', or add 'source: URL' to it under configuration.templates"
        )
    if "://" not in source and (stack.folder / source.partition("#")[0]).exists():
        source = str(stack.folder / source)
    return f"{source}#{ref}" if ref and "#" not in source else source


def template_of(
    stack: Stack, function: StackFunction, fetches: bool, progress: Callable[[str], None] = lambda _: None
) -> Template | None:
    """
    Return the template of *function*; None for a ``dockerfile``, which has none.

    A missing one is pulled from the source that the stack file gives it.

    :param fetches: False: nothing is pulled
    :raises InvalidSpec: there is none; says which is near
    :raises BadStack: the stack file lists it without a source
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
    if not fetches:
        raise refused
    if source is None:
        if any(bare(function.lang) == bare(each.name) for each in stack.templates):
            source_of(stack, TemplateSource(function.lang))
        if os.environ.get(_STORE):
            raise InvalidSpec(f"{refused}; {_STORE} is read by 'faas-cli template store pull {function.lang}' only")
        raise refused
    progress(f"pulling template {function.lang} from {source}")
    pulled = repository.pull(source, stack.folder / "template", only=bare(function.lang))
    return find_template(pulled.written[0], stack.template_dirs())


def _listed(stack: Stack, lang: str) -> str | None:
    """The repository that the stack file names for *lang*; None when it names none."""
    for each in stack.templates:
        if each.source and bare(lang) == bare(each.name):
            return source_of(stack, TemplateSource(lang if "@" in lang else each.name, each.source))
    return None
