"""
Building a function as a container image: OpenFaaS's build context, and docker to build it.

::

    build/NAME/            the template, its Dockerfile among it
        gpufaas/           packages of ours, where the template wants them in its image
        function/          the author's folder and the extra paths; or what the template calls its handler folder

With ``lang: dockerfile`` the author's folder is the context. Only building and pushing need docker, and an engine.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpufaas_cli.bundles import BuildRequest, check_name
from gpufaas_cli.source_files import NOT_HANDLER, Ignored, copy_tree, walk
from gpufaas_cli.subprocess_lines import run_shown
from gpufaas_core.errors import GpufaasError, InvalidSpec, StorageFailed
from gpufaas_templates import Template, bounded_yaml

_PROXIES: Final = ("http_proxy", "https_proxy", "no_proxy")
_OUR_PACKAGES: Final = "gpufaas"
_WITH_BUILDKIT: Final = {"DOCKER_BUILDKIT": "1"}
"""In the environment of a docker command: asks for it where it is not the default."""


class NoDocker(GpufaasError):
    """There is nobody to build, push or run an image."""


@dataclass(frozen=True, slots=True)
class Building:
    """How to build, from the flags; for an image also from its function."""

    build_args: Mapping[str, str] = field(default_factory=dict)
    build_options: Sequence[str] = ()
    build_labels: Mapping[str, str] = field(default_factory=dict)
    build_secrets: Mapping[str, str] = field(default_factory=dict)
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
    lists: bool = False
    """Only say what would be packed."""
    disable_stack_pull: bool = False
    platforms: str | None = None
    """Comma-separated: `images.publish_image` builds for all of them."""
    extra_tags: Sequence[str] = ()
    offline: bool = False
    """Do not ask the gateway what its nodes provide."""


def make_context(request: BuildRequest, template: Template | None) -> Path:
    """
    Write the build context of *request* to a cleared ``build_root/NAME``, and return it.

    :raises InvalidSpec: the author's folder or an extra path is wrong
    :raises StorageFailed: the build folder cannot be written
    """
    check_name(request.name)
    handler = request.handler_folder
    if template is None and not (handler / "Dockerfile").is_file():
        raise InvalidSpec(f"{handler} has no Dockerfile, which function {request.name} with lang dockerfile needs")
    copies = request.copies
    folder = request.build_root / request.name
    try:
        if folder.exists():
            shutil.rmtree(folder)
        inner = folder
        if template is not None:
            copy_tree(template.path, folder)
            for package in template.packages:
                copy_tree(_package_folder(package), folder / _OUR_PACKAGES / package)
            inner = folder / template.handler_folder
        inner.mkdir(parents=True, exist_ok=True)
        # A Dockerfile of the author's copies what it names, which git may not have.
        copy_tree(handler, inner, Ignored(handler, NOT_HANDLER, by_git=template is not None))
        for source, place in copies:
            copy_tree(source, inner / place, Ignored(source, by_git=template is not None))
        # CI servers clean up as another user than the one that builds.
        folder.chmod(0o777 if os.environ.get("CI") in ("true", "1") else 0o700)
    except OSError as exc:
        raise StorageFailed(f"cannot build in {exc.filename or folder}: {exc.strerror or exc}") from exc
    return folder


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise InvalidSpec(f"the template wants the package {name} in its image, and it is not installed here")
    return Path(spec.submodule_search_locations[0])


def check_engine(what: str) -> None:
    """:raises NoDocker: no docker command, or no engine that answers it; says what would help"""
    if shutil.which("docker") is None:
        raise NoDocker(
            f"{what} needs docker, and there is no docker command here: install Docker, or use a template that runs as "
            "a process ('gpufaas template list' shows their kind)"
        )
    answer = _asked("version", "--format", "{{.Server.Version}}")
    if answer.returncode:
        said = " ".join(answer.stderr.split()) or "it did not say why"
        raise NoDocker(
            f"{what} needs a Docker engine, and none answers ({said}): start it, or name yours in DOCKER_HOST"
        )


def build_image(
    image: str, context: Path, template: Template | None, options: Building, progress: Callable[[str], None]
) -> None:
    """
    Run ``docker build`` in *context*; *progress* gets each line of its output.

    :raises NoDocker: there is no docker, or no engine behind it
    :raises InvalidSpec: the build failed, or asks for a build option that the template does not have
    """
    check_engine(f"building the image {image}")
    arguments = ["build", *_arguments(image, template, options), "."]
    # Older docker commands have BuildKit in them, newer ones as buildx.
    if options.build_secrets and "--secret" not in _asked("build", "--help").stdout:
        raise NoDocker(f"build_secrets of {image} need docker's BuildKit: install docker-buildx, or leave them out")
    _docker(arguments, context, f"docker build of {image}", progress)


def publish_image(
    image: str, context: Path, template: Template | None, options: Building, progress: Callable[[str], None]
) -> None:
    """Build with buildx, for all of the platforms at once, and push. Raises as `build_image` does."""
    check_engine(f"publishing the image {image}")
    if _asked("buildx", "version").returncode:
        raise NoDocker(
            "publishing images needs docker's buildx plugin: install docker-buildx, or use 'build' and 'push'"
        )
    arguments = ["--progress=plain", f"--platform={options.platforms or 'linux/amd64'}"]
    arguments += ["--output=type=registry,push=true", *_arguments(image, template, options)]
    _docker(["buildx", "build", *arguments, "."], context, f"docker buildx build of {image}", progress)


def push_image(image: str, progress: Callable[[str], None]) -> None:
    """Raises as `build_image` does."""
    check_engine(f"pushing the image {image}")
    _docker(["push", image], Path(), f"docker push of {image}", progress)


def tagged(image: str, mode: str, handler: Path | None, folder: Path) -> str:
    """
    Return *image* with the tag that ``--tag MODE`` gives it: ``latest`` as it is, ``sha``,
    ``branch`` and ``describe`` with git's words after it, ``digest`` with that of the handler's files instead.

    :param folder: a folder of the git repository
    :raises InvalidSpec: *folder* is not in a repository
    """
    name, colon, tag = image.rpartition(":")
    if not colon or "/" in tag:
        name, tag = image, "latest"
    match mode:
        case "latest":
            return f"{name}:{tag}"
        case "digest":
            if handler is None:
                raise InvalidSpec(f"--tag digest is of a handler's files, and {image} has no handler")
            return f"{name}:{_digest(handler)}"
        case "sha":
            return f"{name}:{tag}-{_git(folder, 'rev-parse', '--short', 'HEAD')}"
        case "branch":
            branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD").replace("/", "-")
            return f"{name}:{tag}-{branch}-{_git(folder, 'rev-parse', '--short', 'HEAD')}"
        case _:
            return f"{name}:{tag}-{_git(folder, 'describe', '--tags', '--always')}"


def fprocess_of(template: Template | None) -> str | None:
    """Return the process that a template's ``template.yml`` names; deployments of its images send it."""
    value = _read(template).get("fprocess")
    return str(value) if value else None


def _arguments(image: str, template: Template | None, options: Building) -> list[str]:
    """:raises InvalidSpec: a build option that the template does not have"""
    args = {name: value for name in _PROXIES if (value := os.environ.get(name))} | dict(options.build_args)
    packages = args.pop("ADDITIONAL_PACKAGE", "").split() + _packages(template, options.build_options)
    args["ADDITIONAL_PACKAGE"] = " ".join(dict.fromkeys(packages))
    tags = (image, *(f"{image.rpartition(':')[0]}:{tag}" for tag in options.extra_tags))
    given = [("--build-arg", f"{key}={value}") for key, value in sorted(args.items())]
    given += [("--label", f"{key}={value}") for key, value in sorted(options.build_labels.items())]
    given += [
        ("--secret", f"id={key},src={Path(path).absolute()}") for key, path in sorted(options.build_secrets.items())
    ]
    given += [("--tag", each) for each in tags]
    found = [*(["--no-cache"] * options.no_cache), *(["--squash"] * options.squash), *(["--pull"] * options.pull)]
    return found + [word for pair in given for word in pair]


def _packages(template: Template | None, wanted: Iterable[str]) -> list[str]:
    """Return the packages of the template's named groups. :raises InvalidSpec: it has no group of that name"""
    listed = _read(template).get("build_options")
    entries = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    groups = {str(each.get("name")): each.get("packages") or [] for each in entries}
    found: list[str] = []
    for name in wanted:
        if name not in groups:
            known = ", ".join(sorted(groups)) or "none"
            raise InvalidSpec(f"build option {name!r} is not one of the template's, which are: {known}")
        found += [str(each) for each in groups[name]]
    return found


def _read(template: Template | None) -> dict[str, Any]:
    if template is None:
        return {}
    content = bounded_yaml.load((template.path / "template.yml").read_text())
    return content if isinstance(content, dict) else {}


def _docker(arguments: list[str], folder: Path, what: str, progress: Callable[[str], None]) -> None:
    env = {**os.environ, **(_WITH_BUILDKIT if "--secret" in arguments else {})}
    run_shown(["docker", *arguments], folder, env, progress, lambda _: f"{what} failed")


def _asked(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Return what the docker command of this machine answers."""
    return subprocess.run(
        ["docker", *arguments], check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        env={**os.environ, **_WITH_BUILDKIT},
    )  # fmt: skip


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], check=False, capture_output=True, text=True, errors="replace"
        )
    except FileNotFoundError as exc:
        raise InvalidSpec("--tag with git's words needs git, which is not installed here") from exc
    if done.returncode:
        said = " ".join(done.stderr.split()) or "git did not say why"
        raise InvalidSpec(f"--tag needs a git repository with a commit in {folder.absolute()}: {said}")
    return done.stdout.strip()


def _digest(handler: Path) -> str:
    """MD5 over the MD5s of the files in order of their paths: a name for a version, not a proof of anything."""
    whole = hashlib.md5(usedforsecurity=False)
    for file in sorted(walk(handler), key=lambda each: each.relative_to(handler).as_posix()):
        whole.update(hashlib.md5(file.read_bytes(), usedforsecurity=False).digest())
    return whole.hexdigest()
