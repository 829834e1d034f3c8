"""`ImageBuilder` of the gateway by docker, for ``gpufaas serve --builder-secret``."""

import asyncio
import contextlib
import platform
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import IO, Final

from gpufaas_core import docker_command
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.remote_build import BuildConfig

_TAIL_LINES: Final = 12
_LINE_BYTES: Final = 1 << 20  # longer ones come in pieces
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


class DockerBuilder:
    """
    Builds with the docker command of this machine. An image stays in the engine that built it, which also runs it.

    :param pushes: push images to the registries in their names, unless the client asks not to
    """

    def __init__(self, pushes: bool) -> None:
        self._pushes = pushes

    async def build(self, config: BuildConfig, context: IO[bytes], secrets: Mapping[str, bytes]) -> AsyncGenerator[str]:
        here = f"linux/{_ARCHITECTURES.get(platform.machine(), platform.machine())}"
        if config.platforms and here not in config.platforms:
            raise InvalidSpec(
                f"this builder makes images for {here}, and {config.image} is asked for {', '.join(config.platforms)}"
            )
        try:
            await asyncio.to_thread(docker_command.check_engine, f"building the image {config.image}")
            if secrets and not await asyncio.to_thread(docker_command.has_buildkit):
                raise InvalidSpec(
                    f"the secrets of {config.image} need BuildKit, which this builder's docker lacks: install "
                    "docker-buildx there, or leave build_secrets out"
                )
        except docker_command.NoDocker as exc:
            raise InvalidSpec(str(exc)) from exc
        if len(config.platforms) > 1:
            yield f"Only {here} is built, of {', '.join(config.platforms)}."
        with tempfile.TemporaryDirectory(prefix="gpufaas-build-") as folder:  # mode 0700
            arguments = ["build", "--force-rm"]  # a step that fails leaves no container behind
            for name, value in sorted(config.build_args.items()):
                arguments += ["--build-arg", f"{name}={value}"]
            arguments += [*_written(secrets, Path(folder)), "--tag", config.image, "-"]
            async with contextlib.aclosing(_docker(arguments, f"docker build of {config.image}", context)) as lines:
                async for line in lines:
                    yield line
        if config.skip_push:
            return
        if not self._pushes or "/" not in config.image:
            yield f"Not pushed: {config.image} is in the engine of the platform, which runs it from there."
            return
        yield f"Pushing {config.image}"
        async with contextlib.aclosing(_docker(["push", config.image], f"docker push of {config.image}")) as lines:
            async for line in lines:
                yield line


def _written(secrets: Mapping[str, bytes], folder: Path) -> list[str]:
    """Write each of *secrets* to a file in *folder*; return docker's options that mount them."""
    found: list[str] = []
    for number, (name, content) in enumerate(sorted(secrets.items())):
        path = folder / str(number)
        path.write_bytes(content)
        found += ["--secret", f"id={name},src={path}"]
    return found


async def _docker(arguments: list[str], what: str, given: IO[bytes] | None = None) -> AsyncGenerator[str]:
    """
    Yield what the docker command prints; it is killed when the iterator is closed.

    :raises InvalidSpec: it failed; the message has its last line
    """
    try:
        process = await asyncio.create_subprocess_exec(
            "docker", *arguments, env=docker_command.environment("--secret" in arguments), limit=_LINE_BYTES,
            stdin=given or asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
    except OSError as exc:
        raise GpufaasError(f"{what}: docker does not start: {exc.strerror or exc}") from exc
    assert process.stdout is not None
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    try:
        while line := await _line(process.stdout):
            if text := line.decode(errors="replace").rstrip():
                tail.append(text)
                yield text
        status = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if status:
        raise InvalidSpec(f"{what} failed: {tail[-1] if tail else 'it said nothing'}")


async def _line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as exc:
        return exc.partial
    except asyncio.LimitOverrunError as exc:
        return await stream.readexactly(exc.consumed)
