"""The two stores of OpenFaaS: functions that are ready to deploy, and templates."""

import difflib
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec

from gpufaas_cli.text_source import NotFetched, fetch_json
from gpufaas_core.errors import InvalidSpec

FUNCTIONS_URL: Final = "https://raw.githubusercontent.com/openfaas/store/master/functions.json"
TEMPLATES_URL: Final = "https://raw.githubusercontent.com/openfaas/store/master/templates.json"

_PLATFORMS: Final[Mapping[str, str]] = {"amd64": "x86_64", "aarch64": "arm64", "armv7l": "armhf", "armv6l": "armhf"}


class StoreFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    title: str = ""
    description: str = ""
    author: str = ""
    repo_url: str = ""
    images: dict[str, str] = {}
    """The image for each platform: ``x86_64``, ``arm64``, ``armhf``."""
    fprocess: str = ""
    environment: dict[str, str] = {}
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    readonly_root_filesystem: bool = msgspec.field(name="readOnlyRootFilesystem", default=False)

    def image(self, wanted: str) -> str:
        """:raises InvalidSpec: there is none for that platform; says which there are"""
        found = self.images.get(_PLATFORMS.get(wanted, wanted))
        if not found:
            raise InvalidSpec(
                f"{self.name} has no image for {wanted}; it has some for {', '.join(sorted(self.images)) or 'none'}: "
                "choose with --platform"
            )
        return found


class StoreTemplate(msgspec.Struct, frozen=True, kw_only=True):
    name: str = msgspec.field(name="template")
    source: str = ""
    """Who keeps it, as in ``openfaas``."""
    repository: str = msgspec.field(name="repo", default="")
    language: str = ""
    platform: str = ""
    description: str = ""
    official: bool = False
    recommended: bool = False


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Entry = TypeVar("_Entry", StoreFunction, StoreTemplate)


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
    return _read(place, content.get("functions") if isinstance(content, dict) else None, StoreFunction)


def templates(place: str | None = None) -> list[StoreTemplate]:
    """
    Return the templates of the store at *place*; of ``OPENFAAS_TEMPLATE_STORE_URL``, or OpenFaaS's, when it is None.

    :raises NotFetched: it cannot be read, or is no store of templates
    """
    place = place or os.environ.get("OPENFAAS_TEMPLATE_STORE_URL") or TEMPLATES_URL
    return _read(place, fetch_json(place), StoreTemplate)


def find_function(name: str, store: Sequence[StoreFunction]) -> StoreFunction:
    """Find it by name or title. :raises InvalidSpec: there is none; says which is near"""
    found = next((each for each in store if name.lower() in (each.name.lower(), each.title.lower())), None)
    if found is None:
        raise InvalidSpec(f"the store has no function {name!r}{_near(name, store)}")
    return found


def find_template(name: str, store: Sequence[StoreTemplate]) -> StoreTemplate:
    """By name, or ``SOURCE/NAME`` where several have it. :raises InvalidSpec: there is none; says which is near"""
    source, slash, rest = name.rpartition("/")
    wanted = rest.partition("@")[0]
    found = [each for each in store if each.name == wanted and (not slash or each.source == source)]
    if not found:
        raise InvalidSpec(f"the store has no template {name!r}{_near(wanted, store)}")
    return min(found, key=lambda each: (not each.recommended, not each.official))


def _read(place: str, content: Any, kind: type[_Entry]) -> list[_Entry]:
    what = "functions" if kind is StoreFunction else "templates"
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise NotFetched(f"{place}: it is no store of {what}: it has no list of them")
    entries = [{key: value for key, value in each.items() if value is not None} for each in content]
    try:
        return msgspec.convert(entries, list[kind], strict=False)  # type: ignore[valid-type]  # true is "true" there
    except msgspec.ValidationError as exc:
        raise NotFetched(f"{place}: it is no store of {what}: {exc}") from exc


def _near(name: str, store: Sequence[_Named]) -> str:
    near = difflib.get_close_matches(name, [each.name for each in store], n=1)
    return f": did you mean {near[0]!r}?" if near else ": 'list' shows what it has"
