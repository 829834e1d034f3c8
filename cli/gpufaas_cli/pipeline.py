"""
From stack file to running functions: what ``build``, ``push``, ``publish``, ``deploy`` and ``up`` have in common.

One function after the other is built, pushed and deployed. What fails with one does not stop the others, and is counted
at the end. A gateway that cannot be reached stops all: the next function would not reach it either.

A function becomes one of two things. From a template that runs as a process (`Template.kind`), a bundle, which is
uploaded to the gateway; from any other, or a Dockerfile, a container image, which docker builds and pushes.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import click
from packaging.specifiers import SpecifierSet

from gpufaas import Client, GatewayUnreachable, NotAuthorised, function_path
from gpufaas_cli import images, output
from gpufaas_cli.build_target import BuildTargets
from gpufaas_cli.bundles import BuildRequest, Built, build, drop_unused_parts
from gpufaas_cli.files import alone
from gpufaas_cli.following import follow
from gpufaas_cli.images import Building
from gpufaas_cli.repository import template_of
from gpufaas_cli.source_files import contents
from gpufaas_cli.stack import Stack, StackFunction
from gpufaas_cli.subprocess_lines import end_as_by_ctrl_c
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.units import format_bytes
from gpufaas_templates import Template

BUNDLE_ANNOTATION: Final = "gpufaas.bundle"
_SHORT: Final = 12
_Progress = Callable[[str], None]
_PLAIN: Final = Building()


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the flags add to every deployment, or put in place of what the stack file says."""

    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    constraints: Sequence[str] = ()
    namespace: str | None = None
    fprocess: str | None = None
    resources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    readonly: bool = False
    update: bool = True
    """False: a function that is deployed already is an error."""
    replace: bool = False
    """Remove the function first, instead of updating it."""
    read_template: bool = True
    """Send the process that an image's template names."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What is done with each function. Bundles are built in any case: what is up to date is no work."""

    build: bool = True
    push: bool = False
    push_images: bool = True
    """False: `push` is of bundles only."""
    deploy: bool = False
    buildx: bool = False
    """Images are built for several platforms and pushed in one go."""
    follow: bool = False
    """Wait until what is deployed takes calls, or has failed to load."""

    @property
    def done(self) -> str:
        return "deployed" if self.deploy else "pushed" if self.push else "built"


@dataclass(frozen=True, slots=True)
class _Image:
    name: str
    template: Template | None


_Made = Built | _Image | None


def deployment(
    function: StackFunction, flags: Overrides, digest: str | None, image: str | None = None, fprocess: str | None = None
) -> dict[str, object]:
    """
    Return the body of a deployment. Empty fields are left out, but for labels and annotations,
    which faas-cli always sends.

    :param image: in place of the stack file's, as a tag was added to it
    :param fprocess: of its template: used when neither flags nor stack file name one
    """
    annotations = {**function.annotations, **flags.annotations}
    if digest is not None:
        annotations[BUNDLE_ANNOTATION] = digest
    body: dict[str, object] = {
        "service": function.name,
        "image": image or function.image or f"{function.name}:latest",
        "namespace": flags.namespace or function.namespace,
        "envProcess": flags.fprocess or function.fprocess or fprocess,
        "envVars": {**function.environment, **flags.env},
        "constraints": list(function.constraints or flags.constraints),
        "secrets": list(dict.fromkeys((*function.secrets, *flags.secrets))),
        "labels": {**function.labels, **flags.labels},
        "annotations": annotations,
        "limits": {**function.limits, **flags.resources.get("limits", {})},
        "requests": {**function.requests, **flags.resources.get("requests", {})},
        "readOnlyRootFilesystem": function.readonly_root_filesystem or flags.readonly,
    }
    return {key: value for key, value in body.items() if value or key in ("labels", "annotations")}


def image_of(stack: Stack, function: StackFunction, tag: str) -> str:
    """Return the function's image, with what ``--tag`` adds to it."""
    image = function.image or f"{function.name}:latest"
    return image if tag == "latest" else images.tagged(image, tag, function.handler, stack.folder)


def makes_bundles(stack: Stack, functions: Sequence[StackFunction]) -> bool:
    """Return whether one of them becomes a bundle. A template that must be pulled first may make one: it counts."""
    for each in functions:
        try:
            template = template_of(stack, each, fetches=False) if each.is_built else None
        except InvalidSpec:
            return True
        if template is not None and template.kind is not None:
            return True
    return False


def run(
    stack: Stack,
    functions: Sequence[StackFunction],
    steps: Steps,
    client: Client,
    building: Building = _PLAIN,
    overrides: Overrides = Overrides(),
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """
    Do *steps* with each of *functions*. Ends the process with 1 when one of them failed.

    :param client: of the gateway that bundles are sent to, and functions deployed at; where *steps* need none, it is
        asked what its nodes provide, if it answers
    :param quiet: print nothing but errors
    :raises GatewayUnreachable, NotAuthorised: at once
    """
    end_as_by_ctrl_c()
    needed = steps.deploy or (steps.push and not building.shrinkwrap and makes_bundles(stack, functions))
    if needed:
        client.info()  # a build may take minutes: say first that the gateway is not there
    targets = BuildTargets(client, building.offline, must_answer=needed)
    _Pipeline(stack, steps, building, overrides, client, targets, as_json, quiet).run(functions)


@dataclass(frozen=True)
class _Pipeline:
    stack: Stack
    steps: Steps
    building: Building
    flags: Overrides
    client: Client
    targets: BuildTargets
    as_json: bool
    quiet: bool

    def run(self, functions: Sequence[StackFunction]) -> None:
        results: list[dict[str, Any]] = [{"name": each.name} for each in functions]
        with self._alone(functions), self._making(functions, results) as making:
            for function, make, result in zip(functions, making, results, strict=True):
                try:
                    made = make()
                    if not (self.building.shrinkwrap or self.building.lists):
                        self._deliver(function, made, result)
                except (GatewayUnreachable, NotAuthorised, BrokenPipeError):
                    raise
                except (GpufaasError, OSError) as exc:  # a file may go at any time
                    first, *rest = self.stack.said(str(exc)).splitlines() or [type(exc).__name__]
                    if sys.stderr.isatty():  # elsewhere these lines were shown as they came
                        for line in rest:
                            output.note(line)
                    output.note(f"gpufaas: {function.name}: {first}")
                    result["error"] = first
        if self.as_json:
            output.show_json(results)
        if failed := [result["name"] for result in results if "error" in result]:
            output.note(
                f"gpufaas: {len(failed)} of {len(results)} functions not {self.steps.done}: {', '.join(failed)}"
            )
            raise click.exceptions.Exit(1)

    def _say(self, text: str) -> None:
        if not (self.as_json or self.quiet):
            output.show(text)

    # --- building ---

    @contextmanager
    def _alone(self, functions: Sequence[StackFunction]) -> Iterator[None]:
        """Keep other commands from building here, and from deploying the same, until this one is done."""
        root = self.stack.folder / "build"
        if self.building.lists or not any(each.is_built for each in functions):
            yield
            return
        with suppress(OSError):  # the build says why
            root.mkdir(parents=True, exist_ok=True)
        told = f"gpufaas: another command builds in {root}: waiting for its end"
        with alone(root / "NAME", lambda: output.note(told)) if root.is_dir() else nullcontext():
            yield
            drop_unused_parts(root)

    @contextmanager
    def _making(
        self, functions: Sequence[StackFunction], results: Sequence[dict[str, Any]]
    ) -> Iterator[list[Callable[[], _Made]]]:
        """
        Give for each function what builds it: at once when it is called, or in one of ``--parallel`` threads that have
        begun. Building is work of other processes (pip, build.py, docker) and of the disk.
        """

        def make(index: int, alone: bool) -> _Made:
            function = functions[index]
            return self._make(function, results[index], alone) if function.is_built else None

        if self.building.parallel <= 1 or len(functions) < 2:
            yield [lambda index=index: make(index, True) for index in range(len(functions))]  # type: ignore[misc]
            return
        with ThreadPoolExecutor(self.building.parallel) as pool:
            begun = [pool.submit(make, index, False) for index in range(len(functions))]
            try:
                yield [each.result for each in begun]
            finally:
                for each in begun:
                    each.cancel()

    def _make(self, function: StackFunction, result: dict[str, Any], alone: bool) -> _Made:
        lines = nullcontext(lambda text: output.note(f"  {function.name}: {text}"))  # where several are built at once
        with output.waiting(f"Building {function.name}") if alone else lines as shown:
            progress: _Progress = (lambda _: None) if self.building.quiet else shown
            template = template_of(self.stack, function, not self.building.disable_stack_pull, progress)
            request = self._request(function, template)
            makes_bundle = template is not None and template.kind is not None
            if self.building.lists or self.building.shrinkwrap or not makes_bundle:
                self._contents(request, template, result)
            if self.building.lists:
                return None
            if self.building.shrinkwrap:
                folder = images.make_context(request, template)
                result["context"] = str(folder)
                self._say(f"Shrink-wrapped: {function.name} in {folder}.")
                return None
            if template is None or template.kind is None:
                return self._make_image(function, request, template, result, progress)
            self._say(f"Building: {function.name} with template {function.lang}.")
            _check_python(function, request)
            built = build(request, progress)
            self._contents(request, template, result)
        result |= {"digest": built.digest, "up_to_date": built.up_to_date, "seconds": round(built.seconds, 3)}
        weights = f" and {format_bytes(built.manifest.weight_bytes)} of weights" if built.manifest.weights else ""
        how = "was up to date" if built.up_to_date else f"in {output.format_seconds(built.seconds)}"
        size = f"{format_bytes(built.bundle_tar.stat().st_size)}{weights}"
        self._say(f"Built: {function.name} {built.digest[:_SHORT]}, {size}, {how}.")
        return built

    def _contents(self, request: BuildRequest, template: Template | None, result: dict[str, Any]) -> None:
        """Say what of the author's files is left out and, for ``--list``, what is packed."""
        found = contents(request.root / request.handler, request.copies, by_git=template is not None)
        result["left_out"] = found.left_out
        if self.building.lists:
            result |= {"files": found.files, "bytes": sum(found.files.values())}
            self._say(f"{request.name}: {len(found.files)} files, {format_bytes(result['bytes'])}.")
            for name, size in found.files.items():
                self._say(f"{format_bytes(size):>10}  {name}")
        if (told := found.told()) and not self.stack.made_of:  # of one file nothing else is packed
            self._say(f"Left out: {told}.")
        if warning := found.warning():
            output.note(f"gpufaas: {request.name}: {warning}")

    def _request(self, function: StackFunction, template: Template | None) -> BuildRequest:
        assert function.lang is not None
        assert function.handler is not None
        root = self.stack.root
        return BuildRequest(
            name=function.name,
            lang=template.name if template else function.lang,
            handler=function.handler if root == Path() else function.handler.absolute(),
            build_args={**function.build_args, **self.building.build_args},
            annotations={**function.annotations, **self.flags.annotations},
            copy=list(dict.fromkeys((*self.stack.copy, *self.building.copy_extra))),
            build_root=self.stack.folder / "build",
            template_dirs=self.stack.template_dirs(),
            root=root,
            target=lambda: self.targets.of(deployment(function, self.flags, None)),
        )

    def _make_image(
        self,
        function: StackFunction,
        request: BuildRequest,
        template: Template | None,
        result: dict[str, Any],
        progress: _Progress,
    ) -> _Image:
        given = self.building
        name = result["image"] = image_of(self.stack, function, given.tag)
        if not self.steps.build:
            return _Image(name, template)
        options = replace(
            given,
            build_args=request.build_args,
            build_options=tuple(dict.fromkeys((*function.build_options, *given.build_options))),
            build_secrets=function.build_secrets,
            platforms=given.platforms or function.platforms,
        )
        context = images.make_context(request, template)
        self._say(f"Building: {name} with {function.lang} template. Please wait..")
        if self.steps.buildx:
            images.publish_image(name, context, template, options, progress)
            how = "built and pushed"
        else:
            images.build_image(name, context, template, options, progress)
            how = "built"
        self._say(f"Image: {name} {how}.")
        return _Image(name, template)

    # --- pushing and deploying ---

    def _deliver(self, function: StackFunction, made: _Made, result: dict[str, Any]) -> None:
        if self.steps.push and isinstance(made, Built):
            self._upload(function, made, result)
        if self.steps.push and self.steps.push_images and not self.steps.buildx and isinstance(made, _Image):
            self._push_image(function, made.name)
        if self.steps.deploy:
            self._deploy(function, made, result)
        elif made is None:
            self._say(
                f"Skipping: {function.name} is deployed by its image {function.image}, there is nothing to build."
            )

    def _upload(self, function: StackFunction, built: Built, result: dict[str, Any]) -> None:
        """Send bundle, parts and weights, but for what the gateway has."""
        sent = 0
        for digest, path in built.files:
            if not self.client.has_artifact(digest):
                size = path.stat().st_size
                with output.upload_bar(f"{function.name}: {path.name}", size) as progress:
                    self.client.put_artifact(digest, path, progress)
                sent += size
        result["uploaded_bytes"] = sent
        if sent:
            self._say(f"Uploaded: {format_bytes(sent)}.")

    def _push_image(self, function: StackFunction, name: str) -> None:
        if "/" not in name:
            self._say(f"Not pushed: {name} names no registry or user; it stays in the engine that built it.")
            return
        self._say(f"Pushing {function.name} [{name}]")
        with output.waiting(f"Pushing {function.name}") as progress:
            images.push_image(name, (lambda _: None) if self.building.quiet else progress)

    def _deploy(self, function: StackFunction, made: _Made, result: dict[str, Any]) -> None:
        digest = made.digest if isinstance(made, Built) else None
        template = made.template if isinstance(made, _Image) else None
        fprocess = images.fprocess_of(template) if self.flags.read_template else None
        image = None if self.building.tag == "latest" else image_of(self.stack, function, self.building.tag)
        self._say(f"Deploying: {function.name}.")
        body = deployment(function, self.flags, digest, image, fprocess)
        replace = self.flags.replace
        with output.waiting(f"Deploying {function.name}"):
            outcome = self.client.deploy(body, update=self.flags.update and not replace, replace=replace)
        namespace = self.flags.namespace or function.namespace
        note = follow(self.client, function.name, namespace, outcome.revision) if self.steps.follow else ""
        result |= {**outcome._asdict(), "url": self.client.shown + function_path(function.name, namespace)}
        del result["reason"]
        if not (self.as_json or self.quiet):
            lines = [note] if note else []
            lines += [] if digest is None else _reserves(self.client, function.name, namespace)
            said = f"\nDeployed. {outcome.status} {outcome.reason}.\nURL: {result['url']}\n"
            output.show(said + "".join(f"{each}\n" for each in lines))


def _check_python(function: StackFunction, request: BuildRequest) -> None:
    """:raises InvalidSpec: a node has not the Python that *function* requires"""
    if not function.requires_python:
        return
    target = request.target()
    for each in target.environments:
        if not SpecifierSet(function.requires_python).contains(each.python, prereleases=True):
            raise InvalidSpec(
                f"{function.where}: requires-python {function.requires_python} does not fit {target.who} ({each}): "
                "correct it, or name nodes that fit (constraints)"
            )


def _reserves(client: Client, name: str, namespace: str | None) -> list[str]:
    """Return lines about the memory that the function reserves, room for it, and what of its share is not enforced."""
    try:
        ours = client.function(name, namespace, usage=False).get("gpufaas") or {}
    except GpufaasError:
        return []  # it is deployed all the same
    reserves = f"Reserves {format_bytes(int(ours.get('memory') or 0))}: {ours.get('memoryReason')}."
    return [
        text
        for text, key in (
            (reserves, "memoryReason"),
            (f"{ours.get('memoryAdvice')}", "memoryAdvice"),
            (f"Note: its calls are refused for now: {ours.get('keptOut')}.", "keptOut"),
            (f"Note: {ours.get('notEnforced')}.", "notEnforced"),
        )
        if ours.get(key)
    ]
