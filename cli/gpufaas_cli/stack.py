"""
The stack file: functions to build and deploy, read strictly.

The order is that of faas-cli: substitute ``${...}`` in the text, then read the YAML. Unlike it, the value of a variable
stays whole, whatever YAML would read in it, and a key that we do not know is an error with its line and the nearest key
that we do; keys that begin with ``x-`` are the user's own. Scalars keep their source text: ``yes`` is "yes" and
``1.50`` is "1.50", so YAML is composed to nodes and never to values.
"""

import difflib
import fnmatch
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode, SequenceNode

from gpufaas_cli.stack_text import BadStack, compose, read_text, url_of
from gpufaas_cli.substitute import BadSubstitution, substitute

DEFAULT_GATEWAY: Final = "http://127.0.0.1:8080"
FILE_NAMES: Final = ("stack.yaml", "stack.yml")
FUNCTION_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

_NULL: Final = "tag:yaml.org,2002:null"
_MERGE: Final = "tag:yaml.org,2002:merge"
_STAND_IN: Final = re.compile("\ue000[0-9]+\ue001")  # no text has these characters
_LINES: Final = r"\Z|\s*(- |[\w.-]+:(\s|\Z))"  # for which a variable may stand
_STACK_KEYS: Final = ("version", "provider", "functions", "configuration")
_PROVIDER_KEYS: Final = ("name", "gateway", "network")  # network: an old key, ignored
_CONFIGURATION_KEYS: Final = ("templates", "copy")
_TEMPLATE_KEYS: Final = ("name", "source")
_RESOURCE_KEYS: Final = ("memory", "cpu", "nvidia.com/gpu", "amd.com/gpu", "intel.com/gpu")
_IGNORED_KEYS: Final = ("network", "registry_auth")  # of a function: old keys, without a meaning
_BOOLEANS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "": False}


@dataclass(frozen=True, slots=True)
class StackFunction:
    """One entry under ``functions``. None and empty: not given."""

    name: str
    where: str
    """``stack.yaml:12``, for messages."""
    lang: str | None = None
    handler: Path | None = None
    image: str | None = None
    fprocess: str | None = None
    namespace: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """With the variables of ``environment_file``, which go before its own."""
    secrets: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    requests: Mapping[str, str] = field(default_factory=dict)
    readonly_root_filesystem: bool = False
    skip_build: bool = False
    build_args: Mapping[str, str] = field(default_factory=dict)
    build_options: tuple[str, ...] = ()
    build_secrets: Mapping[str, str] = field(default_factory=dict)
    platforms: str | None = None
    requires_python: str = ""
    """What Python the nodes must have, as in ``>=3.11``; empty: any."""

    @property
    def is_built(self) -> bool:
        """False: it is deployed by its image alone."""
        return self.lang is not None and not self.skip_build


@dataclass(frozen=True, slots=True)
class TemplateSource:
    name: str
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Stack:
    path: Path
    gateway: str | None
    functions: Mapping[str, StackFunction]
    templates: tuple[TemplateSource, ...] = ()
    copy: tuple[Path, ...] = ()
    """Paths relative to `root`."""
    made_of: Path | None = None
    """The one file that its function was made of, in place of a stack file."""

    @property
    def folder(self) -> Path:
        """The folder that paths are relative to; of a stack file from a URL, the working directory."""
        return Path() if url_of(self.path) else self.path.parent

    @property
    def root(self) -> Path:
        """The folder that `copy` is relative to: the stack file's; the working directory, if only that has them all."""
        beside, here = self.folder, Path()
        return here if not _has(beside, self.copy) and _has(here, self.copy) else beside

    def said(self, text: str) -> str:
        """Return *text* with the file that it was made of, if it was, in place of those that were made of it."""
        made = rf"{re.escape(str(self.folder))}/[^/\s]+/(handler\.py|requirements\.txt)"
        return re.sub(made, lambda _: str(self.made_of), text) if self.made_of else text

    def template_dirs(self) -> list[Path]:
        """Folders with templates of the user's own: ``template/`` as faas-cli pulls them, and sources on this disk."""
        dirs = [self.folder / "template"]
        for each in self.templates:
            source = _resolve(self.folder, each.source) if each.source else None
            if source is not None and source.is_dir():
                dirs.append(source / "template" if (source / "template").is_dir() else source)
        return [each for each in dict.fromkeys(dirs) if each.is_dir()]

    def select(
        self, names: Sequence[str] = (), glob: str | None = None, regex: str | None = None
    ) -> list[StackFunction]:
        """
        Return the functions of these *names*, or that match *glob* or *regex*; all of them when nothing is given.

        :raises BadStack: nothing matches, or a name is not there (says which is near), or several ways at once
        """
        if sum((bool(names), glob is not None, regex is not None)) > 1:
            raise BadStack("functions are selected by names, by --filter or by --regex: give one of these")
        if not self.functions:
            raise BadStack(f"{self.path}: it has no functions: add one with 'gpufaas new NAME --lang python3-torch'")
        for name in names:
            if name not in self.functions:
                raise BadStack(f"{self.path}: no function {name!r}{_nearest(name, list(self.functions))}")
        if names:
            return [self.functions[name] for name in dict.fromkeys(names)]
        found = list(self.functions.values())
        if glob is not None:
            found = [each for each in found if fnmatch.fnmatchcase(each.name, glob)]
        if regex is not None:
            try:
                found = [each for each in found if re.search(regex, each.name)]
            except re.error as exc:
                raise BadStack(f"--regex {regex!r} is not a regular expression: {exc}") from exc
        if not found:
            raise BadStack(
                f"{self.path}: no function matches {(glob if glob is not None else regex)!r}; "
                f"there are {', '.join(self.functions)}"
            )
        return found


def find_stack() -> Path | None:
    """Return the stack file of the working directory, if there is one."""
    return next((Path(name) for name in FILE_NAMES if Path(name).is_file()), None)


def read_stack(path: Path | None = None, env: Mapping[str, str] | None = None, envsubst: bool = True) -> Stack:
    """
    Return what the stack file says; without *path*, the one in the working directory.

    :param env: what ``${...}`` is replaced from; the process's own environment by default
    :raises BadStack: there is none, or it is wrong: one line with file and line
    """
    path = path or find_stack()
    if path is None:
        raise BadStack(
            "there is no stack.yaml or stack.yml here: 'gpufaas new NAME --lang python3-torch' writes one, "
            "or name yours with -f FILE"
        )
    return _StackReader(path, (os.environ if env is None else env) if envsubst else None).stack()


def gateway_in(path: Path) -> str | None:
    """Return the gateway that a stack file names, even if the rest of it is wrong; None: it names none."""
    try:
        reader = _StackReader(path, os.environ)
        provider = dict(reader.items(reader.root, "the file"))["provider"]
        return reader.text(dict(reader.items(provider, "provider"))["gateway"], "gateway") or None
    except (BadStack, KeyError):
        return None


def choose_gateway(flag: str | None, in_file: str | None, env: Mapping[str, str] | None = None) -> str:
    """
    Return the gateway's URL: the flag; else the file's, unless it is the default that ``new`` writes; else
    ``OPENFAAS_URL``; else http://127.0.0.1:8080. Unlike faas-cli's, a flag that equals the default still counts.
    """
    env = os.environ if env is None else env
    named = in_file if in_file and _url(in_file) != DEFAULT_GATEWAY else None
    return _url(flag or named or env.get("OPENFAAS_URL") or DEFAULT_GATEWAY)


def is_own(key: str) -> bool:
    """Return whether *key* is the user's own, which we do not read."""
    return key.startswith("x-")


def _substituted(path: Path, text: str, env: Mapping[str, str], put: Callable[[str], str] = str) -> str:
    try:
        return substitute(text, env, put)
    except BadSubstitution as exc:
        line = text.count("\n", 0, exc.at) + 1
        raise BadStack(f"{path}:{line}: cannot substitute: {exc} (write $$ for a dollar sign)") from exc


def _url(text: str) -> str:
    """As faas-cli: no slash at the end, http:// when no scheme is given; scheme and host in lower case."""
    url = text.strip().rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    user, at, host = host.rpartition("@")
    return f"{scheme.lower()}://{user}{at}{host.lower()}{slash}{path}"


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f": did you mean {near[0]!r}?" if near else f"; there are: {', '.join(known)}"


def _resolve(folder: Path, text: str) -> Path:
    """
    Paths are relative to the stack file. faas-cli takes them relative to the working directory: what is only there is
    found as well, so that its stack files work from where they did.
    """
    beside = folder / text
    return beside if beside.exists() or not Path(text).exists() else Path(text)


def _has(folder: Path, paths: Sequence[Path]) -> bool:
    return all((folder / each).exists() for each in paths)


class _StackReader:
    """Reads nodes as what is expected where; every error has the line. Without `env`, ``${...}`` stays."""

    def __init__(self, path: Path, env: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._values: dict[str, str] = {}  # of ${...}, by what stands for it in `root`: YAML reads nothing in it
        text = read_text(path)
        try:
            self.root = compose(path, text if env is None else _substituted(path, text, env, self._stand_in))
        except BadStack:
            if env is None or not self._values:
                raise
            self.root = compose(path, _substituted(path, text, env, lambda it: self._stand_in(it, _LINES)))
        self._folder = Path() if url_of(path) else path.parent
        self._function_keys: Mapping[str, Callable[[Node, str], Any]] = {
            **dict.fromkeys(
                ("lang", "image", "fprocess", "namespace", "platforms"), lambda *of: self.text(*of) or None
            ),
            **dict.fromkeys(("secrets", "constraints", "build_options"), self._list),
            **dict.fromkeys(("labels", "annotations", "environment", "build_args", "build_secrets"), self._strings),
            **dict.fromkeys(("limits", "requests"), self._resources),
            **dict.fromkeys(("readonly_root_filesystem", "skip_build"), self._flag),
            "handler": self._handler,
            "environment_file": self._environment_files,
        }

    # --- the file, from the top ---

    def stack(self) -> Stack:
        top = self._keys(self.root, "the file", _STACK_KEYS)
        if (version := top.get("version")) and self.text(version, "version") not in ("1.0", ""):
            raise self._bad(version, "version must be 1.0, the only one there is")
        if "provider" not in top:
            raise BadStack(f"{self._path}:1: provider is missing: add 'provider: {{name: openfaas}}'")
        provider = self._keys(top["provider"], "provider", _PROVIDER_KEYS)
        if "name" not in provider:
            raise self._bad(top["provider"], "provider has no name: it must be openfaas")
        if (name := self.text(provider["name"], "provider.name")) != "openfaas":
            raise self._bad(provider["name"], f"provider.name is {name!r}: it must be openfaas")
        gateway = self.text(provider["gateway"], "provider.gateway") if "gateway" in provider else None
        functions = {
            key: self._function(key, node)
            for key, node in self._mapping(top.get("functions"), "functions").items()
            if not is_own(key)
        }
        templates, copy = self._configuration(top.get("configuration"))
        return Stack(path=self._path, gateway=gateway or None, functions=functions, templates=templates, copy=copy)

    def _function(self, name: str, node: Node) -> StackFunction:
        if not FUNCTION_NAME.fullmatch(name):
            rule = "use at most 63 of a-z, 0-9 and '-', a letter or digit at both ends"
            raise self._bad(node, f"{name!r} is not a function name: {rule}")
        nodes = self._keys(node, f"function {name}", (*self._function_keys, *_IGNORED_KEYS))
        read = {key: read(nodes[key], f"{name}.{key}") for key, read in self._function_keys.items() if key in nodes}
        read["environment"] = {**read.get("environment", {}), **read.pop("environment_file", {})}
        found = StackFunction(name=name, where=f"{self._path}:{node.start_mark.line + 1}", **read)
        if found.skip_build and not found.image:
            raise self._bad(node, f"function {name} has skip_build but no image: name the image to deploy")
        only_image = found.image and not found.lang and not found.handler
        if not found.skip_build and not (found.lang and found.handler) and not only_image:
            missing, hint = ("handler", f"handler: ./{name}") if found.lang else ("lang", "lang: python3-torch")
            raise self._bad(
                node, f"function {name} has no {missing}: add '{hint}', or only an image, deployed as it is"
            )
        return found

    def _configuration(self, node: Node | None) -> tuple[tuple[TemplateSource, ...], tuple[Path, ...]]:
        if node is None:
            return (), ()
        keys = self._keys(node, "configuration", _CONFIGURATION_KEYS)
        templates: list[TemplateSource] = []
        for each in self._sequence(keys["templates"], "configuration.templates") if "templates" in keys else []:
            entry = self._keys(each, "configuration.templates", _TEMPLATE_KEYS)
            if "name" not in entry:
                raise self._bad(each, "a template has no name: add 'name: TEMPLATE'")
            source = self.text(entry["source"], "source") if "source" in entry else None
            templates.append(TemplateSource(self.text(entry["name"], "name"), source or None))
        copy = self._list(keys["copy"], "configuration.copy") if "copy" in keys else ()
        return tuple(templates), tuple(map(Path, copy))

    def _handler(self, node: Node, what: str) -> Path | None:
        text = self.text(node, what)
        return _resolve(self._folder, text) if text else None

    def _environment_files(self, node: Node, what: str) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for each in self._sequence(node, what):
            name = self.text(each, f"an entry of {what}")
            path = _resolve(self._folder, name)
            if not path.is_file():
                raise self._bad(each, f"environment_file {name} is not there: looked at {path}")
            inner = _StackReader(path)
            keys = inner._keys(inner.root, "the file", ("environment",))
            found |= inner._strings(keys["environment"], "environment") if "environment" in keys else {}
        return found

    # --- shapes ---

    def text(self, node: Node, what: str) -> str:
        """The source text of a scalar; null is the empty string."""
        if not isinstance(node, ScalarNode):
            raise self._bad(node, f"{what} must be text, but is {self._shape(node)}")
        return "" if node.tag == _NULL else _STAND_IN.sub(lambda it: self._values.get(it[0], it[0]), node.value)

    def _stand_in(self, value: str, but: str = r"\Z") -> str:
        name = value if re.match(but, value) else f"\ue000{len(self._values)}\ue001"
        self._values[name] = value
        return name

    def _read(self, node: Node) -> Node:
        """Return the map or list that a variable gives, as YAML, alone or between ``[]`` or ``{}``; else *node*."""
        (only, form), lines = _only(node), "\n" * node.start_mark.line
        value = self._values.get(only.value) if isinstance(only, ScalarNode) and not only.style else None
        if not value:
            return node
        try:  # further lines may be indented as the first one is here, or as it is in the variable
            return compose(self._path, lines + " " * node.start_mark.column + form.format(value))
        except BadStack:
            return compose(self._path, lines + form.format(value))

    def items(self, node: Node, what: str, merging: tuple[Node, ...] = ()) -> list[tuple[str, Node]]:
        """
        Return the pairs of a mapping; null is an empty one. What ``<<`` merges comes first, own keys after it.

        :param merging: the mappings that merge this one
        """
        node = self._read(node)
        if isinstance(node, ScalarNode) and node.tag == _NULL:
            return []
        if not isinstance(node, MappingNode):
            raise self._bad(node, f"{what} must be a map of KEY: VALUE, but is {self._shape(node)}")
        if node in merging:
            raise self._bad(node, f"{what} merges itself")
        merged: list[tuple[str, Node]] = []
        own: dict[str, tuple[Node, Node]] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                sources = value.value if isinstance(value, SequenceNode) else [value]
                for source in reversed(sources):  # the first of several wins
                    merged += self.items(source, f"what {what} merges", (*merging, node))
                continue
            name = self.text(key, f"a key of {what}")
            if name in own:
                line = own[name][0].start_mark.line + 1
                raise self._bad(key, f"{name!r} is in {what} twice, first on line {line}: remove one")
            own[name] = (key, value)
        return merged + [(name, value) for name, (_, value) in own.items()]

    def _mapping(self, node: Node | None, what: str) -> dict[str, Node]:
        return dict(self.items(node, what)) if node is not None else {}

    def _keys(self, node: Node, what: str, known: Sequence[str]) -> dict[str, Node]:
        """A mapping that has only *known* keys, and the user's own, which are left out."""
        found = self._mapping(node, what)
        for key, value in found.items():
            if key not in known and not is_own(key):
                keys = [one for one, _ in getattr(node, "value", ()) if getattr(one, "value", None) == key]
                raise self._bad(keys[0] if keys else value, f"unknown key {key!r} in {what}{_nearest(key, known)}")
        return {key: value for key, value in found.items() if not is_own(key)}

    def _strings(self, node: Node, what: str) -> Mapping[str, str]:
        return {key: self.text(value, f"{what}.{key}") for key, value in self.items(node, what)}

    def _resources(self, node: Node, what: str) -> Mapping[str, str]:
        return {key: self.text(value, f"{what}.{key}") for key, value in self._keys(node, what, _RESOURCE_KEYS).items()}

    def _sequence(self, node: Node, what: str) -> list[Node]:
        node = self._read(node)
        if isinstance(node, ScalarNode) and node.tag == _NULL:
            return []
        if not isinstance(node, SequenceNode):
            raise self._bad(node, f"{what} must be a list, but is {self._shape(node)}: write - VALUE lines, or [A, B]")
        return list(node.value)

    def _list(self, node: Node, what: str) -> tuple[str, ...]:
        return tuple(self.text(each, f"an entry of {what}") for each in self._sequence(node, what))

    def _flag(self, node: Node, what: str) -> bool:
        text = self.text(node, what)
        if text.lower() not in _BOOLEANS:
            raise self._bad(node, f"{what} is {text!r}: it must be true or false")
        return _BOOLEANS[text.lower()]

    def _bad(self, node: Node, message: str) -> BadStack:
        return BadStack(f"{self._path}:{node.start_mark.line + 1}: {message}")

    def _shape(self, node: Node) -> str:
        if isinstance(node, MappingNode):
            return "a map"
        return "a list" if isinstance(node, SequenceNode) else f"the text {self.text(node, '')!r}"


def _only(node: Node) -> tuple[Node, str]:
    """Return *node*, or what is alone between its brackets; and the form of it with them."""
    if isinstance(node, CollectionNode) and node.flow_style and len(node.value) == 1:
        if isinstance(node, SequenceNode):
            return node.value[0], "[{}]"
        key, value = node.value[0]
        if not value.value:
            return key, "{{{}}}"
    return node, "{}"
