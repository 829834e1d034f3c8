"""The ``docker`` command of this machine: whether it is there, answers, and what it can do."""

import os
import shutil
import subprocess

from gpufaas_core.errors import GpufaasError


class NoDocker(GpufaasError):
    """There is nobody to build, push or run an image."""


def check_engine(what: str) -> None:
    """:raises NoDocker: no docker command, or no engine that answers it; says what would help"""
    if shutil.which("docker") is None:
        raise NoDocker(
            f"{what} needs docker, and there is no docker command here: install Docker, or use a template that runs as "
            "a process ('gpufaas template list' shows their kind)"
        )
    answer = subprocess.run(
        ["docker", "version", "--format", "{{.Server.Version}}"],
        check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    if answer.returncode:
        said = " ".join(answer.stderr.split()) or "it did not say why"
        raise NoDocker(
            f"{what} needs a Docker engine, and none answers ({said}): start it, or name yours in DOCKER_HOST"
        )


def environment(buildkit: bool = True) -> dict[str, str]:
    """Return the environment of a docker command; *buildkit*: ask for it where it is not the default."""
    return {**os.environ, **({"DOCKER_BUILDKIT": "1"} if buildkit else {})}


def has_buildkit() -> bool:
    """Whether `docker build` can mount secrets: older commands have BuildKit in them, newer ones as buildx."""
    return "--secret" in (ask(["build", "--help"]) or "")


def ask(arguments: list[str]) -> str | None:
    """Return what ``docker ARGUMENTS`` prints; None: it failed."""
    done = subprocess.run(
        ["docker", *arguments], check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        env=environment(),
    )  # fmt: skip
    return done.stdout if done.returncode == 0 else None
