"""
The remote builder: builds images from sources that arrive as a signed tar.

The signature with the payload secret takes the place of the password. The body is not read as a tar before its
signature is checked. It is never unpacked here: its context is written again as a tar of plain files and directories,
which the engine unpacks.
"""

import asyncio
import contextlib
import logging
import re
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import StreamingResponse

from gpufaas_core.errors import BodyTooLarge, GpufaasError, InvalidSpec, Overloaded, StorageFailed, UnknownName
from gpufaas_core.remote_build import (
    BUILD_PATH,
    CONFIG,
    CONTEXT,
    NDJSON,
    PUBLIC_KEY_PATH,
    SECRETS,
    SIGNATURE_HEADER,
    BuildConfig,
    BuildStatus,
    Signer,
)
from gpufaas_core.sealing import ALGORITHM, key_id, public_of, unseal
from gpufaas_core.units import Bytes, MiB, Seconds, format_bytes
from gpufaas_gateway.bodies import pieces
from gpufaas_gateway.errors import BadSignature, BodyTooSlow
from gpufaas_gateway.ports import ImageBuilder
from gpufaas_gateway.typed_routes import encode, json_of, lines_of, refuses, router
from gpufaas_gateway.wire import PublicKey

log = logging.getLogger(__name__)

_OFF: Final = "this platform builds no images: start it with 'gpufaas serve --builder-secret FILE'"
_SIGNED_BY: Final = "HMAC-SHA256 of the body with the payload secret"
_AT_ONCE: Final = 16
"""Builds that are received, wait, or run. Each has at most two files of the size of a body."""
_RETRY_AFTER_S: Final[Seconds] = 10.0
_RECEIVE_S: Final[Seconds] = 600.0
_WRITE_BYTES: Final[Bytes] = 1 * MiB
_SMALL: Final[Bytes] = 1 * MiB  # of the configuration, and of the sealed secrets
_LINES_KEPT: Final = 10_000  # of a log that is not streamed
_LINES_AHEAD: Final = 1000  # of a reader that is slow
_DOCKERFILE: Final = "Dockerfile"

_SIGNATURE: Final = re.compile(r"sha256=[0-9a-f]{64}")
_PART: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE: Final = re.compile(
    rf"(?:[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?/)?{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?"
)
_ARGUMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_SECRET: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PLATFORM: Final = re.compile(r"[a-z0-9]+/[a-z0-9_]+(?:/[a-z0-9]+)?")


@dataclass(frozen=True, slots=True)
class BuildSettings:
    payload_secret: bytes = field(repr=False)
    private_key: str = field(repr=False)
    """Opens build secrets; see `sealing`."""
    spool: Path
    """Directory for bodies. It is emptied when the platform starts."""
    max_body: Bytes


class Builds:
    """Runs one build at a time: builds in parallel would compete for the cores, also with functions."""

    def __init__(self, builder: ImageBuilder, settings: BuildSettings) -> None:
        """:raises InvalidSpec: the payload secret is empty, or the private key is none"""
        if not settings.payload_secret.strip():
            raise InvalidSpec("the payload secret is empty: 'gpufaas secret generate -o FILE' makes one")
        self.public_key = public_of(settings.private_key)
        self._builder = builder
        self._settings = settings
        self.begun = 0
        """Builds that are received, wait, or run."""
        self._turn = asyncio.Lock()
        self._jobs: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Cancel all builds and wait for their end."""
        jobs = list(self._jobs)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    async def answer(self, request: Request) -> Response:
        """
        Receive a signed tar, build it, and answer with the status of the build: 200, also when the build fails.

        :raises BodyTooLarge, BodyTooSlow, Overloaded, StorageFailed: the tar was not taken
        """
        given = request.headers.get(SIGNATURE_HEADER, "").strip()
        if not _SIGNATURE.fullmatch(given):
            raise _unsigned()
        if self.begun >= _AT_ONCE:
            raise Overloaded(f"{_AT_ONCE} builds wait already: try again", _RETRY_AFTER_S)
        self.begun += 1
        task: asyncio.Task[None] | None = None
        body = _temporary(self._settings.spool)
        try:
            async with asyncio.timeout(_RECEIVE_S):
                is_signed = await self._receive(request, body, given)
            if not is_signed:
                raise _unsigned()
            job = _Job(body)
            task = asyncio.create_task(self._run(job))
            self._jobs.add(task)
            task.add_done_callback(lambda ended: self._end(job, ended))
        except TimeoutError:
            raise BodyTooSlow(f"the build did not arrive within {_RECEIVE_S:g} s") from None
        finally:
            if task is None:
                body.close()
                self.begun -= 1
        if NDJSON in request.headers.get("Accept", ""):
            return _Stream(job, task)
        said: list[str] = []
        last = BuildStatus()
        try:
            async for last in job:
                said += last.log
        finally:
            task.cancel()
        return Response(encode(msgspec.structs.replace(last, log=said[-_LINES_KEPT:])), media_type="application/json")

    def _end(self, job: "_Job", task: "asyncio.Task[None]") -> None:
        """Release what a build holds. Called also for a task that was cancelled before its first step."""
        self.begun -= 1
        self._jobs.discard(task)
        job.body.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("build.broken error=%r", error, exc_info=error)

    async def _receive(self, request: Request, body: IO[bytes], signature: str) -> bool:
        """Write the request's body; return whether *signature* is valid for it. Hashes and writes in a thread."""
        limit = self._settings.max_body
        signer = Signer(self._settings.payload_secret)

        def take(part: bytearray) -> None:
            signer.update(part)
            with _storage_errors(self._settings.spool):
                body.write(part)

        size, part = 0, bytearray()
        async for chunk in pieces(request):
            size += len(chunk)
            if size > limit:
                raise BodyTooLarge(
                    f"the build is over {format_bytes(limit)}: leave out of its context what it does not need, or "
                    "start the platform with a larger --max-body"
                )
            part += chunk
            if len(part) >= _WRITE_BYTES:
                await asyncio.to_thread(take, part)
                part = bytearray()
        await asyncio.to_thread(take, part)
        return signer.matches(signature)

    async def _run(self, job: "_Job") -> None:
        """Ends with a last status of *job*, whatever happens."""
        image = ""
        try:
            with _temporary(self._settings.spool) as context:
                config, sealed = await asyncio.to_thread(_repack, job.body, context, self._settings.spool)
                image = config.image
                secrets = unseal(self._settings.private_key, sealed) if sealed is not None else {}
                for name in secrets:
                    _check(_SECRET, name, "the name of a secret")
                if self._turn.locked():
                    await job.tell(BuildStatus(["waiting for another build to end"], image))
                async with self._turn, contextlib.aclosing(self._builder.build(config, context, secrets)) as lines:
                    async for line in lines:
                        await job.tell(BuildStatus([line], image))
            await job.tell(BuildStatus([], image, "success"))
        except GpufaasError as exc:
            await job.tell(BuildStatus([], image, "failed", str(exc)))
        except asyncio.CancelledError:
            job.give_up(BuildStatus([], image, "failed", "the platform is stopping: build it again"))
            raise
        except Exception as exc:
            job.give_up(BuildStatus([], image, "failed", f"the builder failed: {exc!r}"))
            raise


class _Job:
    """The statuses of one build, passed from its task to the answer."""

    def __init__(self, body: IO[bytes]) -> None:
        self.body = body
        self._told: asyncio.Queue[BuildStatus] = asyncio.Queue(_LINES_AHEAD)

    async def tell(self, status: BuildStatus) -> None:
        await self._told.put(status)

    def give_up(self, status: BuildStatus) -> None:
        """Tell a last *status*; an earlier one that was not read may be dropped for it."""
        if self._told.full():
            self._told.get_nowait()
        self._told.put_nowait(status)

    async def __aiter__(self) -> AsyncIterator[BuildStatus]:
        while True:
            status = await self._told.get()
            yield status
            if status.status != "in_progress":
                return


class _Stream(StreamingResponse):
    """The statuses of a build as they come. The build is cancelled when the client hangs up."""

    def __init__(self, job: _Job, task: "asyncio.Task[None]") -> None:
        super().__init__(_lines(job), media_type=NDJSON)
        self._task = task

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._task.cancel()  # nothing happens when it is done


async def _lines(job: _Job) -> AsyncIterator[bytes]:
    async for status in job:
        yield encode(status) + b"\n"


def build_routes(builds: Builds | None) -> APIRouter:
    """:param builds: None if the platform does not build"""
    routes = router()
    answers = json_of(BuildStatus)
    answers["content"] |= lines_of(BuildStatus, NDJSON)["content"]

    @routes.post(
        BUILD_PATH,
        responses={
            200: answers,
            **refuses(BadSignature, UnknownName, BodyTooSlow, BodyTooLarge, Overloaded, StorageFailed),
        },
        openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {}}}},
    )
    async def build(
        request: Request, _signature: Annotated[str, Header(alias=SIGNATURE_HEADER, description=_SIGNED_BY)] = ""
    ) -> Response:
        """Build an image of sources, as a remote builder."""
        if builds is None:
            raise UnknownName(_OFF)
        return await builds.answer(request)

    @routes.get(PUBLIC_KEY_PATH, responses=refuses(UnknownName))
    async def describe_key() -> PublicKey:
        """The key that build secrets are sealed for."""
        if builds is None:
            raise UnknownName(_OFF)
        return PublicKey(key_id(builds.public_key), ALGORITHM, builds.public_key)

    return routes


def _unsigned() -> BadSignature:
    return BadSignature(
        f"{SIGNATURE_HEADER}: it is missing, or not of this body and the payload secret of this platform "
        "(serve --builder-secret)"
    )


def _repack(body: IO[bytes], context: IO[bytes], spool: Path) -> tuple[BuildConfig, str | None]:
    """
    Copy the files below the folder of the context from the tar *body* to the tar *context*.

    :return: the configuration of the build, and its sealed secrets or None
    :raises InvalidSpec: *body* is not such a tar, or has anything but files and directories
    :raises StorageFailed: *context* cannot be written
    """
    small: dict[str, bytes] = {}
    has_dockerfile = False
    body.seek(0)
    try:
        with (
            _storage_errors(spool),
            tarfile.open(fileobj=body, mode="r:") as tar,
            tarfile.open(fileobj=context, mode="w:", format=tarfile.PAX_FORMAT) as out,
        ):
            for member in tar:
                path = _path(member)
                if path.parts[:1] != (CONTEXT,):
                    if member.name in (CONFIG, SECRETS) and member.isreg() and not member.issparse():
                        small[member.name] = _small(tar, member)
                    continue
                inner = PurePosixPath(*path.parts[1:])
                if not inner.parts:
                    continue
                has_dockerfile = has_dockerfile or (member.isreg() and str(inner) == _DOCKERFILE)
                out.addfile(_plain(member, inner), tar.extractfile(member) if member.isreg() else None)
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as exc:
        raise InvalidSpec(f"the build is not a whole tar: {exc}") from exc
    config = _config(small.get(CONFIG))
    if not has_dockerfile:
        raise InvalidSpec(f"the build has no {CONTEXT}/{_DOCKERFILE}: add the one from which the image is built")
    context.flush()
    context.seek(0)
    sealed = small.get(SECRETS)
    try:
        return config, sealed.decode() if sealed is not None else None
    except UnicodeDecodeError as exc:
        raise InvalidSpec(f"{SECRETS} is not text") from exc


def _path(member: tarfile.TarInfo) -> PurePosixPath:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\0" in member.name:
        raise InvalidSpec(f"the build has a file {member.name[:200]!r}, which leads out of it")
    return path


def _plain(member: tarfile.TarInfo, path: PurePosixPath) -> tarfile.TarInfo:
    """Return a tar header for *path* that has only size, permissions and time of *member*."""
    if not (member.isdir() or member.isreg()) or member.issparse():
        raise InvalidSpec(
            f"{CONTEXT}/{path} is neither a file nor a directory: links, devices and the like are refused"
        )
    plain = tarfile.TarInfo(str(path))
    plain.type = tarfile.DIRTYPE if member.isdir() else tarfile.REGTYPE
    plain.size = member.size if member.isreg() else 0
    plain.mode = member.mode & 0o777
    plain.mtime = max(0, min(int(member.mtime), 2**33 - 1))
    return plain


def _small(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.size > _SMALL:
        raise InvalidSpec(f"{member.name} is over {format_bytes(_SMALL)}")
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


def _config(text: bytes | None) -> BuildConfig:
    if text is None:
        raise InvalidSpec(f"the build has no file {CONFIG}: it names the image")
    try:
        config = msgspec.json.decode(text, type=BuildConfig)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidSpec(f"{CONFIG}: {exc}") from exc
    _check(_IMAGE, config.image, f"image of {CONFIG}, which should be the name of one, as registry/user/name:tag")
    for name, value in config.build_args.items():
        _check(_ARGUMENT, name, f"the name of a build argument of {CONFIG}")
        if "\0" in value:
            raise InvalidSpec(f"the build argument {name} has a NUL byte in it")
    for each in config.platforms:
        _check(_PLATFORM, each, f"a platform of {CONFIG}, as linux/amd64")
    return config


def _check(pattern: re.Pattern[str], text: str, what: str) -> None:
    if not pattern.fullmatch(text):
        raise InvalidSpec(f"{text[:200]!r} is not {what}")


def _temporary(spool: Path) -> IO[bytes]:
    """Return a file without a name. It is gone when it is closed, or when the platform is killed."""
    with _storage_errors(spool):
        return tempfile.TemporaryFile(dir=spool)


@contextlib.contextmanager
def _storage_errors(spool: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise StorageFailed(f"the build could not be kept in {spool} ({exc.strerror or exc}): make room there") from exc
