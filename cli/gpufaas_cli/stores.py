"""The two stores of OpenFaaS: functions that are ready to deploy, and templates (specs/openfaas.md §13.4, §13.5)."""

import difflib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gpufaas_cli.fetch import NotFetched, fetch_json
from gpufaas_core.errors import InvalidSpec

FUNCTIONS_URL: Final = "https://raw.githubusercontent.com/openfaas/store/master/functions.json"
TEMPLATES_URL: Final = "https://raw.githubusercontent.com/openfaas/store/master/templates.json"

_PLATFORMS: Final[Mapping[str, str]] = {"amd64": "x86_64", "aarch64": "arm64", "armv7l": "armhf", "armv6l": "armhf"}


@dataclass(frozen=True, slots=True)
class StoreFunction:
    name: str
    title: str
    description: str = ""
    author: str = ""
    repo_url: str = ""
    images: Mapping[str, str] = field(default_factory=dict)
    """By platform: ``x86_64``, ``arm64``, ``armhf``."""
    fprocess: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    readonly_root_filesystem: bool = False

    def image(self, wanted: str) -> str:
        """:raises InvalidSpec: there is none for that platform; says which there are"""
        found = self.images.get(_PLATFORMS.get(wanted, wanted))
        if not found:
            raise InvalidSpec(
                f"{self.name} has no image for {wanted}; it has some for {', '.join(sorted(self.images)) or 'none'}: "
                "choose with --platform"
            )
        return found


@dataclass(frozen=True, slots=True)
class StoreTemplate:
    name: str
    source: str
    """Who keeps it, as in ``openfaas``."""
    repository: str
    language: str = ""
    platform: str = ""
    description: str = ""
    official: bool = False
    recommended: bool = False


def this_platform() -> str:
    machine = platform.machine().lower()
    return _PLATFORMS.get(machine, machine or "x86_64")


def functions(place: str | None = None) -> list[StoreFunction]:
    """
    Return the functions of the store at *place*; of ``OPENFAAS_STORE``, or OpenFaaS's own, when it is None.

    :raises NotFetched: it cannot be read, or is no store of functions
    """
    place = place or os.environ.get("OPENFAAS_STORE") or FUNCTIONS_URL
    content = fetch_json(place)
    entries = content.get("functions") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(each, dict) and each.get("name") for each in entries):
        raise NotFetched(f"{place}: it is no store of functions: a list is missing under 'functions'")
    return [_function(each) for each in entries]


def templates(place: str | None = None) -> list[StoreTemplate]:
    """
    Return the templates of the store at *place*; of ``OPENFAAS_TEMPLATE_STORE_URL``, or OpenFaaS's, when it is None.

    :raises NotFetched: it cannot be read, or is no store of templates
    """
    place = place or os.environ.get("OPENFAAS_TEMPLATE_STORE_URL") or TEMPLATES_URL
    content = fetch_json(place)
    if not isinstance(content, list) or not all(isinstance(each, dict) and each.get("template") for each in content):
        raise NotFetched(f"{place}: it is no store of templates: a list of them is expected")
    return [
        StoreTemplate(
            name=_text(each, "template"),
            source=_text(each, "source"),
            repository=_text(each, "repo"),
            language=_text(each, "language"),
            platform=_text(each, "platform"),
            description=_text(each, "description"),
            official=_text(each, "official").lower() == "true",  # a string there, and not a boolean
            recommended=_text(each, "recommended").lower() == "true",
        )
        for each in content
    ]


def find_function(name: str, store: Sequence[StoreFunction]) -> StoreFunction:
    """By name or title. :raises InvalidSpec: there is none; says which is near"""
    found = next((each for each in store if name.lower() in (each.name.lower(), each.title.lower())), None)
    if found is None:
        raise InvalidSpec(f"the store has no function {name!r}{_near(name, [each.name for each in store])}")
    return found


def find_template(name: str, store: Sequence[StoreTemplate]) -> StoreTemplate:
    """By name, or ``SOURCE/NAME`` where several have it. :raises InvalidSpec: there is none; says which is near"""
    source, slash, rest = name.rpartition("/")
    wanted = rest.partition("@")[0]
    found = [each for each in store if each.name == wanted and (not slash or each.source == source)]
    if not found:
        raise InvalidSpec(f"the store has no template {name!r}{_near(wanted, [each.name for each in store])}")
    return min(found, key=lambda each: (not each.recommended, not each.official))


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]!r}?" if near else ": 'list' shows what it has"


def _function(entry: Mapping[str, Any]) -> StoreFunction:
    return StoreFunction(
        name=_text(entry, "name"),
        title=_text(entry, "title") or _text(entry, "name"),
        description=_text(entry, "description"),
        author=_text(entry, "author"),
        repo_url=_text(entry, "repo_url"),
        images=_strings(entry, "images"),
        fprocess=_text(entry, "fprocess"),
        environment=_strings(entry, "environment"),
        labels=_strings(entry, "labels"),
        annotations=_strings(entry, "annotations"),
        readonly_root_filesystem=entry.get("readOnlyRootFilesystem") is True,
    )


def _text(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    return "" if value is None else str(value)


def _strings(entry: Mapping[str, Any], key: str) -> dict[str, str]:
    value = entry.get(key)
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, dict) else {}
