"""
From stack file to running functions: what ``build``, ``push``, ``publish``, ``deploy`` and ``up`` have in common.

One function after the other, each built, uploaded and deployed; what fails with one does not stop the others, and is
counted at the end. A gateway that is not there stops all: the next function would not find it either.

A function becomes one of two things. From a template that runs as a process (`Template.kind`), a bundle, which is
uploaded to the gateway; from any other, or a Dockerfile, a container image, which docker builds and pushes.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from gpufaas import Client, GatewayUnreachable, NotAuthorised, function_path
from gpufaas_cli import image as images
from gpufaas_cli import output
from gpufaas_cli.build import BuildRequest, Built, build
from gpufaas_cli.remote_builder import RemoteBuilder
from gpufaas_cli.stack import Stack, StackFunction
from gpufaas_cli.target import Targets
from gpufaas_cli.templating import template_of
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.remote_build import BuildConfig
from gpufaas_core.units import format_bytes
from gpufaas_templates import Template

_T = TypeVar("_T")

BUNDLE_ANNOTATION: Final = "gpufaas.bundle"
_SHORT: Final = 12


@dataclass(frozen=True, slots=True)
class Extra:
    """What the flags add to every deployment, or put in place of what the stack file says."""

    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    constraints: Sequence[str] = ()
    namespace: str | None = None
    fprocess: str | None = None
    limits: Mapping[str, str] = field(default_factory=dict)
    requests: Mapping[str, str] = field(default_factory=dict)
    readonly: bool = False
    update: bool = True
    """False: a function that is there already is an error."""
    replace: bool = False
    """Remove it first, instead of updating it."""
    read_template: bool = True
    """Send the process that an image's template names."""


@dataclass(frozen=True, slots=True)
class Building:
    """How to build, from the flags."""

    build_args: Mapping[str, str] = field(default_factory=dict)
    build_options: Sequence[str] = ()
    build_labels: Mapping[str, str] = field(default_factory=dict)
    copy_extra: Sequence[Path] = ()
    tag: str = "latest"
    parallel: int = 1
    no_cache: bool = False
    squash: bool = False
    pull: bool = False
    quiet: bool = False
    """Do not show what docker prints."""
    shrinkwrap: bool = False
    """Only write the build context."""
    disable_stack_pull: bool = False
    platforms: str | None = None
    extra_tags: Sequence[str] = ()
    remote: RemoteBuilder | None = None
    """Builds and pushes images, instead of docker here."""
    offline: bool = False
    """Do not ask the gateway what its nodes provide."""


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

    @property
    def done(self) -> str:
        return "deployed" if self.deploy else "pushed" if self.push else "built"


@dataclass(frozen=True, slots=True)
class _Image:
    name: str
    template: Template | None
    is_built: bool


def taken(kind: type[_T], given: dict[str, Any]) -> _T:
    """Return a *kind*, a dataclass, of those of the options *given* that are its fields; they are taken out."""
    names = {each.name for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: given.pop(name) for name in list(given) if name in names})


def publish(
    stack: Stack,
    functions: Sequence[StackFunction],
    extra: Extra,
    building: Building,
    steps: Steps,
    client: Client | None,
    as_json: bool = False,
    connect: Callable[[], AbstractContextManager[Client]] | None = None,
) -> None:
    """
    Do *steps* with each of *functions*. Ends the process with 1 when one of them failed.

    :param client: the gateway that bundles are sent to, and functions deployed at; None where *steps* need none
    :param connect: where there is no *client*: gives the gateway that is asked what its nodes provide, if it is there
    :raises GatewayUnreachable, NotAuthorised: at once
    """
    if client is not None:
        client.info()  # a build may take minutes: say first that there is nobody to deploy it to
        connect = lambda: nullcontext(client)  # noqa: E731
    targets = Targets(connect, building.offline, must_answer=client is not None)
    results: list[dict[str, Any]] = [{"name": each.name} for each in functions]
    with _making(stack, functions, extra, building, steps, targets, results, quiet=as_json) as making:
        for each, make, result in zip(functions, making, results, strict=True):
            try:
                made = make()
                if building.shrinkwrap:
                    continue
                if steps.push:
                    _push(client, each, building, made, steps, result, quiet=as_json)
                if steps.deploy:
                    assert client is not None
                    _deploy(client, each, extra, building, stack, made, result, quiet=as_json)
                elif made is None and not as_json:
                    output.show(
                        f"Skipping: {each.name} is deployed by its image {each.image}, there is nothing to build."
                    )
            except (GatewayUnreachable, NotAuthorised):
                raise
            except GpufaasError as exc:
                first, *rest = str(exc).splitlines() or [type(exc).__name__]
                if sys.stderr.isatty():  # elsewhere these lines were shown as they came
                    for line in rest:
                        output.note(line)
                output.note(f"gpufaas: {each.name}: {first}")
                result["error"] = first
    if as_json:
        output.show_json(results)
    failed = [result["name"] for result in results if "error" in result]
    if failed:
        output.note(f"gpufaas: {len(failed)} of {len(results)} functions not {steps.done}: {', '.join(failed)}")
        raise click.exceptions.Exit(1)


def deployment(
    function: StackFunction, extra: Extra, digest: str | None, image: str | None = None, fprocess: str | None = None
) -> dict[str, object]:
    """
    Return the body of a deployment (specs/openfaas.md §4.1), without what is empty but for labels and annotations,
    which faas-cli sends in any case.

    :param image: in place of the stack file's, as a tag was added to it
    :param fprocess: of its template: used when nobody says otherwise
    """
    annotations = {**function.annotations, **extra.annotations}
    if digest is not None:
        annotations[BUNDLE_ANNOTATION] = digest
    body: dict[str, object] = {
        "service": function.name,
        "image": image or function.image or f"{function.name}:latest",
        "namespace": extra.namespace or function.namespace,
        "envProcess": extra.fprocess or function.fprocess or fprocess,
        "envVars": {**function.environment, **extra.env},
        "constraints": list(function.constraints or extra.constraints),
        "secrets": list(dict.fromkeys((*function.secrets, *extra.secrets))),
        "labels": {**function.labels, **extra.labels},
        "annotations": annotations,
        "limits": {**function.limits, **extra.limits},
        "requests": {**function.requests, **extra.requests},
        "readOnlyRootFilesystem": function.readonly_root_filesystem or extra.readonly,
    }
    return {key: value for key, value in body.items() if value or key in ("labels", "annotations")}


def image_of(stack: Stack, function: StackFunction, tag: str) -> str:
    """The image with what ``--tag`` adds to it."""
    image = function.image or f"{function.name}:latest"
    return image if tag == "latest" else images.tagged(image, tag, function.handler, stack.folder)


def pairs(_: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Read repeated KEY=VALUE options."""
    found: dict[str, str] = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{each!r} is not KEY=VALUE", param=parameter)
        found[key] = value
    return found


def needs_gateway(stack: Stack, functions: Sequence[StackFunction]) -> bool:
    """Whether pushing these means to upload bundles. A template that is not here yet makes one, for all we know."""
    for each in functions:
        if not each.is_built:
            continue
        try:
            template = template_of(stack, each, fetches=False, progress=lambda _: None)
        except InvalidSpec:
            return True
        if template is not None and template.kind is not None:
            return True
    return False


_Made = Built | _Image | None


@contextmanager
def _making(
    stack: Stack,
    functions: Sequence[StackFunction],
    extra: Extra,
    building: Building,
    steps: Steps,
    targets: Targets,
    results: Sequence[dict[str, Any]],
    quiet: bool,
) -> Iterator[list[Callable[[], _Made]]]:
    """
    Give for each function how to come by what is made of it: by building it now, or from one of ``parallel`` threads
    that have begun to. Building is work of other processes (pip, build.py, docker) and of the disk.
    """

    def make(index: int, alone: bool) -> _Made:
        return (
            _make(stack, functions[index], extra, building, steps, targets, results[index], quiet, alone)
            if (functions[index].is_built)
            else None
        )

    if building.parallel <= 1 or len(functions) < 2:
        yield [lambda index=index: make(index, alone=True) for index in range(len(functions))]  # type: ignore[misc]
        return
    with ThreadPoolExecutor(building.parallel) as pool:
        begun: list[Future[_Made]] = [pool.submit(make, index, False) for index in range(len(functions))]
        try:
            yield [each.result for each in begun]
        finally:
            for each in begun:
                each.cancel()


def _make(
    stack: Stack,
    function: StackFunction,
    extra: Extra,
    building: Building,
    steps: Steps,
    targets: Targets,
    result: dict[str, Any],
    quiet: bool,
    alone: bool,
) -> _Made:
    with output.waiting(f"Building {function.name}") if alone else _lines_of(function.name) as shown:
        progress = _unheard if building.quiet else shown
        template = template_of(stack, function, not building.disable_stack_pull, progress)
        request = _request(stack, function, extra, building, template, targets)
        if building.shrinkwrap:
            folder = images.make_context(request, template)
            result["context"] = str(folder)
            if not quiet:
                output.show(f"Shrink-wrapped: {function.name} in {folder}.")
            return None
        if template is None or template.kind is None:
            return _make_image(stack, function, building, steps, request, template, result, quiet, progress)
        if not quiet:
            output.show(f"Building: {function.name} with template {function.lang}.")
        built = build(request, progress)
    result |= {"digest": built.digest, "up_to_date": built.up_to_date, "seconds": round(built.seconds, 3)}
    if not quiet:
        weights = f" and {format_bytes(built.manifest.weight_bytes)} of weights" if built.weights else ""
        size = f"{format_bytes(built.bundle_tar.stat().st_size)}{weights}"
        how = "was up to date" if built.up_to_date else f"in {output.format_seconds(built.seconds)}"
        output.show(f"Built: {function.name} {built.digest[:_SHORT]}, {size}, {how}.")
    return built


def _make_image(
    stack: Stack,
    function: StackFunction,
    building: Building,
    steps: Steps,
    request: BuildRequest,
    template: Template | None,
    result: dict[str, Any],
    quiet: bool,
    progress: Callable[[str], None],
) -> _Image:
    name = image_of(stack, function, building.tag)
    result["image"] = name
    if not steps.build:
        return _Image(name, template, is_built=False)
    options = images.ImageOptions(
        build_args=request.build_args,
        build_options=tuple(dict.fromkeys((*function.build_options, *building.build_options))),
        labels=building.build_labels,
        secrets=function.build_secrets,
        no_cache=building.no_cache,
        squash=building.squash,
        pull=building.pull,
        platforms=building.platforms or function.platforms,
        extra_tags=building.extra_tags,
    )
    context = images.make_context(request, template)
    if not quiet:
        output.show(f"Building: {name} with {function.lang} template. Please wait..")
    if building.remote is not None:
        _build_remotely(building.remote, name, context, template, options, steps, progress)
    else:
        (images.publish_image if steps.buildx else images.build_image)(name, context, template, options, progress)
    if not quiet:
        how = f"built by {building.remote.url}" if building.remote else "built and pushed" if steps.buildx else "built"
        output.show(f"Image: {name} {how}.")
    return _Image(name, template, is_built=True)


def _build_remotely(
    builder: RemoteBuilder,
    name: str,
    context: Path,
    template: Template | None,
    options: images.ImageOptions,
    steps: Steps,
    progress: Callable[[str], None],
) -> None:
    platforms = tuple(each.strip() for each in (options.platforms or "linux/amd64").split(","))
    config = BuildConfig(name, images.build_arguments(template, options), platforms, not steps.push_images)
    builder.build(config, context, {each: Path(path) for each, path in options.secrets.items()}, progress)


def _request(
    stack: Stack,
    function: StackFunction,
    extra: Extra,
    building: Building,
    template: Template | None,
    targets: Targets,
) -> BuildRequest:
    assert function.lang is not None
    assert function.handler is not None
    root = stack.root
    return BuildRequest(
        name=function.name,
        lang=template.name if template else function.lang,
        handler=function.handler if root == Path() else function.handler.absolute(),
        build_args={**function.build_args, **building.build_args},
        annotations={**function.annotations, **extra.annotations},
        copy=list(dict.fromkeys((*stack.copy, *building.copy_extra))),
        build_root=stack.folder / "build",
        template_dirs=stack.template_dirs(),
        root=root,
        target=lambda: targets.of(deployment(function, extra, None)),
    )


def _unheard(_: str) -> None: ...


@contextmanager
def _lines_of(name: str) -> Iterator[Callable[[str], None]]:
    """Where several are built at once: each line says whose it is."""
    yield lambda text: output.note(f"  {name}: {text}")


def _push(
    client: Client | None,
    function: StackFunction,
    building: Building,
    made: _Made,
    steps: Steps,
    result: dict[str, Any],
    quiet: bool,
) -> None:
    match made:
        case Built():
            assert client is not None
            uploads = [(made.digest, made.bundle_tar, "bundle")]
            uploads += [(weights.sha256, path, path.name) for weights, path in made.weights]
            sent = [_upload(client, digest, path, f"{function.name}: {what}") for digest, path, what in uploads]
            result["uploaded_bytes"] = sum(sent)
            if not quiet and any(sent):
                output.show(f"Uploaded: {format_bytes(sum(sent))}.")
        case _Image(name=name):
            if steps.buildx or not steps.push_images:
                return
            if not _has_registry(name):
                if not quiet:
                    output.show(f"Not pushed: {name} names no registry or user; it stays in the engine that built it.")
                return
            if not quiet:
                output.show(f"Pushing {function.name} [{name}]")
            with output.waiting(f"Pushing {function.name}") as progress:
                images.push_image(name, _unheard if building.quiet else progress)
        case None:
            return


def _has_registry(image: str) -> bool:
    return "/" in image


def _deploy(
    client: Client,
    function: StackFunction,
    extra: Extra,
    building: Building,
    stack: Stack,
    made: _Made,
    result: dict[str, Any],
    quiet: bool,
) -> None:
    digest = made.digest if isinstance(made, Built) else None
    template = made.template if isinstance(made, _Image) else None
    fprocess = images.fprocess_of(template) if extra.read_template else None
    image = None if building.tag == "latest" else image_of(stack, function, building.tag)
    if not quiet:
        output.show(f"Deploying: {function.name}.")
    body = deployment(function, extra, digest, image, fprocess)
    with output.waiting(f"Deploying {function.name}"):
        status, reason = client.deploy(body, update=extra.update, replace=extra.replace)
    url = client.shown + function_path(function.name, extra.namespace or function.namespace)
    result |= {"status": status, "url": url}
    if not quiet:
        reserves = "" if digest is None else _reserves(client, function.name, extra.namespace or function.namespace)
        output.show(f"\nDeployed. {status} {reason}.\nURL: {url}\n{reserves}")


def _reserves(client: Client, name: str, namespace: str | None) -> str:
    """Return a line about the memory that the function reserves, and why so much; empty: the gateway does not say."""
    try:
        ours = client.function(name, namespace, usage=False).get("gpufaas") or {}
    except GpufaasError:
        return ""  # it is deployed all the same
    if not ours.get("memory") or not ours.get("memoryReason"):
        return ""
    return f"Reserves {format_bytes(int(ours['memory']))}: {ours['memoryReason']}.\n"


def _upload(client: Client, digest: str, path: Path, what: str) -> int:
    """Send the file unless the gateway has it; return the bytes sent."""
    if client.has_artifact(digest):
        return 0
    size = path.stat().st_size
    with output.upload_bar(what, size) as progress:
        client.put_artifact(digest, path, progress)
    return size
