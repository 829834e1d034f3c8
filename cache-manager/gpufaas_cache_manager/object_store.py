"""
Object stores: where artifacts outlive the nodes that have them. A shared directory, or anything that speaks S3.

::

    dir:/mnt/share/gpufaas                                    ROOT/sha256/ab/abcdef…
    s3://bucket/prefix?endpoint=http://minio:9000             prefix/sha256/abcdef…

Objects are named by the sha256 of their bytes, so they never change, and two writers of one object write the same.
`write` looks at what it writes; who reads compares the hash of the whole, as `fetch` does. Nothing is deleted here but
on an operator's word: other nodes, and clusters, may use the same store.
"""

import asyncio
import configparser
import contextlib
import datetime
import hashlib
import os
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import SplitResult, parse_qsl, urlsplit

from gpufaas_cache_manager.artifacts import ArtifactStore, check_digest, storage_errors, sync_directory
from gpufaas_core.errors import CorruptArtifact, InvalidSpec, StorageAway, StorageFailed, UnknownArtifact
from gpufaas_core.units import Bytes, MiB, Seconds

if TYPE_CHECKING:
    from obstore.store import S3Credential, S3Store

T = TypeVar("T")
_PIECE: Final[Bytes] = 4 * MiB
_AHEAD: Final = 4
"""Ranges of one object that are asked for at once: one connection to S3 carries about 90 MB/s, a node takes more."""
_PART: Final[Bytes] = 16 * MiB
_MAX_PARTS: Final = 9_000  # S3 takes 10,000
_UNSIZED_PART: Final[Bytes] = 64 * MiB  # of a stream whose length is not known: up to 576 GB
_ABANDONED_S: Final = 86_400.0
_ANSWERS_S: Final[Seconds] = 10.0
"""A store that says nothing for so long stands still: who waits for it is told so, and gives his thread back."""
_SLOWEST: Final = MiB / 4
"""Per second, of a request with data."""
_REFUSED: Final = re.compile(r"status code: (4\d\d|507)|redirect")
"""In the library's messages, which has one class for all that is not of the object itself."""
_CREDENTIALS_KEPT: Final = datetime.timedelta(minutes=10)
_FORMS: Final = "dir:/path, or s3://bucket/prefix?endpoint=http://host:9000"


class ObjectStore(Protocol):
    """
    The port. Safe to use from many tasks at once.

    All raise `StorageAway` when the store does not answer, `StorageFailed` when it refuses, and `InvalidSpec` for what
    is no digest.
    """

    url: str
    """Its name in messages; without credentials."""

    async def open(self) -> None:
        """Make sure that it can be read: a wrong name or key is to be told at start, not at the first load."""

    async def head(self, digest: str) -> Bytes | None:
        """Return the size of *digest*; None: it is not there."""

    def read(self, digest: str, start: Bytes, end: Bytes) -> AsyncGenerator[bytes]:
        """
        Yield the bytes from *start* up to *end*, in pieces of at most a few MiB.

        :raises UnknownArtifact: it is not there
        """

    async def write(self, digest: str, source: Path | AsyncIterator[bytes]) -> None:
        """
        Take *source* as *digest*: all of it, or nothing.

        :raises CorruptArtifact: its bytes have another sha256; nothing is kept
        """

    async def delete(self, digest: str) -> None:
        """Forget *digest*; no error when it is not there."""

    def digests(self) -> AsyncIterator[str]:
        """Yield what is there, in no order."""

    async def close(self) -> None: ...


def object_store(url: str, environ: Mapping[str, str] = os.environ) -> ObjectStore:
    """
    Return the store that *url* names; nothing is asked of it yet.

    :param environ: where S3's credentials and region are looked for, under the usual AWS_* names
    :raises InvalidSpec: no such kind of store, or something missing in *url*
    """
    scheme, _, rest = url.partition(":")
    if scheme == "dir":
        if not rest.startswith("/") or not rest.strip("/"):
            raise InvalidSpec(f"object store {url!r}: an absolute path is expected, as in dir:/mnt/share/gpufaas")
        return DirectoryStore(Path("/" + rest.strip("/")))
    if scheme == "s3":
        return _s3_store(url, environ)
    raise InvalidSpec(f"object store {url!r} is of no known kind: expected {_FORMS}")


async def publish(artifacts: ArtifactStore, store: ObjectStore, digest: str) -> None:
    """Have *digest*, which is here, in *store* too; nothing is sent when it is there already."""
    path = await asyncio.to_thread(artifacts.path, digest)
    if await store.head(digest) != path.stat().st_size:
        await store.write(digest, path)


class DirectoryStore:
    """`ObjectStore` on a file system that every node has mounted. The directory must be there."""

    def __init__(self, root: Path) -> None:
        self.url = f"dir:{root}"
        self._root = root
        self._files = root / "sha256"
        self._incoming = root / "incoming"
        # Of its own: a share that hangs must not take the threads that everything else waits for.
        self._threads = ThreadPoolExecutor(8, "object-store")

    async def open(self) -> None:
        await self._run(self._open)

    def _open(self) -> None:
        if not self._root.is_dir():  # made here, it would hide that a share is not mounted
            raise StorageFailed(f"object store {self.url}: {self._root} is no directory: mount it, or make it")
        with storage_errors(self._root):
            self._files.mkdir(exist_ok=True)
            self._incoming.mkdir(exist_ok=True)
            for leftover in self._incoming.iterdir():
                # By age, since locks of other machines may not be seen here.
                with contextlib.suppress(FileNotFoundError):
                    if leftover.stat().st_mtime < time.time() - _ABANDONED_S:
                        leftover.unlink()

    async def head(self, digest: str) -> Bytes | None:
        path = self._path(digest)

        def size() -> Bytes | None:
            with self._reading(path):
                try:
                    return path.stat().st_size
                except FileNotFoundError:
                    return None

        return await self._run(size)

    async def read(self, digest: str, start: Bytes, end: Bytes) -> AsyncGenerator[bytes]:
        path = self._path(digest)

        def piece(descriptor: int, at: Bytes) -> bytes:
            with self._reading(path):
                return os.pread(descriptor, min(_PIECE, end - at), at)

        def opened() -> int:
            with self._reading(path):
                try:
                    return os.open(path, os.O_RDONLY)
                except FileNotFoundError:
                    raise UnknownArtifact(f"object store {self.url} has no {digest}") from None

        descriptor = await self._run(opened)
        reading: asyncio.Future[bytes] | None = None
        try:
            while start < end:
                reading = asyncio.ensure_future(self._run(lambda at=start: piece(descriptor, at)))  # type: ignore[misc]
                data = await asyncio.shield(reading)
                if not data:
                    raise StorageFailed(f"object store {self.url}: {digest} ends at byte {start}, before {end}")
                yield data
                start += len(data)
        finally:
            if reading is not None and not reading.done():
                reading.add_done_callback(lambda _: os.close(descriptor))  # not under a thread that reads it
            else:
                os.close(descriptor)

    async def write(self, digest: str, source: Path | AsyncIterator[bytes]) -> None:
        target = self._path(digest)
        aside = self._incoming / f"{digest}.{secrets.token_hex(8)}"
        pieces = _file_pieces(source, self._run) if isinstance(source, Path) else source
        hasher = hashlib.sha256()

        def put(data: bytes) -> None:
            hasher.update(data)
            with storage_errors(aside):
                _write_all(descriptor, data)

        def commit() -> None:
            with storage_errors(target):
                os.fsync(descriptor)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.rename(aside, target)
                sync_directory(target.parent)

        def create() -> int:
            with storage_errors(aside):
                return os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

        descriptor = await self._run(create)
        working: asyncio.Future[None] | None = None
        try:
            async for data in pieces:
                working = asyncio.ensure_future(self._run(lambda data=data: put(data)))  # type: ignore[misc]
                await asyncio.shield(working)
            if hasher.hexdigest() != digest:
                raise CorruptArtifact(f"artifact {digest}: the bytes to store have sha256 {hasher.hexdigest()}")
            working = asyncio.ensure_future(self._run(commit))
            await asyncio.shield(working)
        finally:

            def end() -> None:
                os.close(descriptor)
                with contextlib.suppress(OSError):
                    aside.unlink(missing_ok=True)

            if working is not None and not working.done():
                await asyncio.wait([working])
            await self._run(end)

    async def delete(self, digest: str) -> None:
        path = self._path(digest)

        def unlink() -> None:
            with storage_errors(path):
                path.unlink(missing_ok=True)

        await self._run(unlink)

    async def digests(self) -> AsyncIterator[str]:
        def found() -> list[str]:
            with self._reading(self._files):
                return [path.name for path in self._files.glob("??/*")]

        for name in await self._run(found):
            if len(name) == 64:
                yield name

    async def close(self) -> None:
        self._threads.shutdown(wait=False)

    def _path(self, digest: str) -> Path:
        check_digest(digest)
        return self._files / digest[:2] / digest

    async def _run(self, action: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, action)

    @contextlib.contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise StorageFailed(f"object store {self.url}: cannot read {path}: {exc.strerror or exc}") from exc


class S3ObjectStore:
    """
    `ObjectStore` in a bucket. Requests are made by Rust's object_store, off the event loop and off Python's lock.

    What was begun and broke off (multipart uploads) is aborted; after a kill, a lifecycle rule of the bucket does it.
    """

    def __init__(self, url: str, store: "S3Store") -> None:
        self.url = url
        self._store = store

    async def open(self) -> None:
        # A list, since a HEAD of an object says the same of a bucket that is not there as of the object.
        async for _ in self.digests():
            return

    async def head(self, digest: str) -> Bytes | None:
        import obstore

        key = self._key(digest)
        try:
            async with self._answering(digest):
                return (await obstore.head_async(self._store, key))["size"]
        except UnknownArtifact:
            return None

    async def read(self, digest: str, start: Bytes, end: Bytes) -> AsyncGenerator[bytes]:
        import obstore

        key = self._key(digest)

        async def part(begin: Bytes) -> bytes:
            stop = min(begin + _PIECE, end)
            async with self._answering(digest, stop - begin):
                data = bytes(await obstore.get_range_async(self._store, key, start=begin, end=stop))
            if len(data) != stop - begin:
                raise StorageFailed(f"object store {self.url}: {digest} ends at byte {begin + len(data)}, before {end}")
            return data

        parts: deque[asyncio.Task[bytes]] = deque()
        try:
            while start < end or parts:
                while start < end and len(parts) < _AHEAD:
                    parts.append(asyncio.get_running_loop().create_task(part(start)))
                    start += _PIECE
                data = await parts[0]
                parts.popleft()
                yield data
        finally:
            for each in parts:
                each.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def write(self, digest: str, source: Path | AsyncIterator[bytes]) -> None:
        import obstore

        key = self._key(digest)
        part, size = _UNSIZED_PART, None
        if isinstance(source, Path):
            with storage_errors(source):
                size = (await asyncio.to_thread(source.stat)).st_size
            part = max(_PART, -(-size // _MAX_PARTS))
        checked = _checked(source if not isinstance(source, Path) else _file_pieces(source, _in_thread), digest)
        if size is not None and size <= part:
            whole = b"".join([piece async for piece in checked])
            async with self._answering(digest, size):
                await obstore.put_async(self._store, key, whole, use_multipart=False)
            return
        # An error that the source raises aborts the upload, and comes back as one of the library's: keep our own.
        raised: list[Exception] = []

        async def watched() -> AsyncIterator[bytes]:
            try:
                async for piece in checked:
                    yield piece
            except Exception as exc:  # passed on as it is
                raised.append(exc)
                raise

        try:
            with self._errors(digest):
                await obstore.put_async(
                    self._store, key, watched(), use_multipart=True, chunk_size=part, max_concurrency=_AHEAD
                )
        except Exception as exc:
            if raised:
                raise raised[0] from exc
            raise

    async def delete(self, digest: str) -> None:
        import obstore

        key = self._key(digest)
        with contextlib.suppress(UnknownArtifact):
            async with self._answering(digest):
                await obstore.delete_async(self._store, key)

    async def digests(self) -> AsyncIterator[str]:
        import obstore

        stream = obstore.list(self._store, "sha256/", chunk_size=1000)
        while True:
            async with self._answering("its list"):
                try:
                    page = await stream.__anext__()
                except StopAsyncIteration:
                    return
            for each in page:
                yield each["path"].rpartition("/")[2]

    async def close(self) -> None:
        pass

    def _key(self, digest: str) -> str:
        check_digest(digest)
        return f"sha256/{digest}"

    @contextlib.asynccontextmanager
    async def _answering(self, what: str, size: Bytes = 0) -> AsyncIterator[None]:
        """A request with *size* bytes; of many parts, the client bounds each."""
        with self._errors(what):
            async with asyncio.timeout(_ANSWERS_S + size / _SLOWEST):
                yield

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        try:
            yield
        except (BaseError, OSError) as exc:
            if "NoSuchBucket" in str(exc):
                raise StorageFailed(f"object store {self.url}: there is no such bucket: make it first") from exc
            if isinstance(exc, FileNotFoundError):  # what the library raises for any other 404
                raise UnknownArtifact(f"object store {self.url} has no {what}") from None
            if isinstance(exc, PermissionDeniedError | UnauthenticatedError):
                raise StorageFailed(
                    f"object store {self.url} refused access to {what}: check AWS_ACCESS_KEY_ID, "
                    f"AWS_SECRET_ACCESS_KEY and the bucket's policy ({_brief(exc)})"
                ) from exc
            if isinstance(exc, TimeoutError):
                raise StorageAway(f"object store {self.url} does not answer on {what}: try again") from exc
            kind = StorageFailed if _REFUSED.search(str(exc)) else StorageAway
            raise kind(f"object store {self.url} failed on {what}: {_brief(exc)}") from exc


def _s3_store(url: str, environ: Mapping[str, str]) -> S3ObjectStore:
    parts = urlsplit(url)
    asked = _s3_parameters(url, parts)
    try:
        from obstore.store import S3Store
    except ModuleNotFoundError:
        raise InvalidSpec(f"object store {url!r} needs a package: pip install 'gpufaas[s3]'") from None
    known: dict[str, Any] = {}
    endpoint = asked.get("endpoint") or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        known["endpoint"] = endpoint
    known["region"] = asked.get("region") or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION", "us-east-1")
    if environ.get("AWS_ACCESS_KEY_ID"):
        known["access_key_id"] = environ["AWS_ACCESS_KEY_ID"]
        known["secret_access_key"] = environ.get("AWS_SECRET_ACCESS_KEY", "")
        if environ.get("AWS_SESSION_TOKEN"):
            known["session_token"] = environ["AWS_SESSION_TOKEN"]
    elif (file := _credentials_file(environ)) is not None:
        known["credential_provider"] = _FromFile(file, environ.get("AWS_PROFILE", "default"))
    store = S3Store(
        parts.netloc,
        prefix=parts.path.strip("/") or None,
        client_options={
            "allow_http": bool(endpoint and endpoint.startswith("http:")),
            "connect_timeout": datetime.timedelta(seconds=5),
            "timeout": datetime.timedelta(minutes=5),  # of one request: a part, or a range
        },
        retry_config={"max_retries": 3, "retry_timeout": datetime.timedelta(seconds=20)},
        **known,
    )
    return S3ObjectStore(f"s3://{parts.netloc}{parts.path.rstrip('/')}", store)


def _s3_parameters(url: str, parts: SplitResult) -> dict[str, str]:
    if parts.username or parts.password or "@" in parts.netloc:
        raise InvalidSpec(
            "object store: an s3 URL carries no credentials: give them as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or in the file that AWS_SHARED_CREDENTIALS_FILE names"
        )
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", parts.netloc):
        raise InvalidSpec(f"object store {url!r}: {parts.netloc!r} is no bucket's name: expected {_FORMS}")
    asked = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(asked.keys() - {"endpoint", "region"}):
        raise InvalidSpec(f"object store {url!r}: no parameter {unknown[0]!r}: there are endpoint and region")
    endpoint = urlsplit(asked.get("endpoint", "http://x"))
    if endpoint.scheme not in ("http", "https") or not endpoint.netloc:
        raise InvalidSpec(f"object store {url!r}: endpoint={asked['endpoint']} is no URL, as http://minio:9000 is one")
    return asked


def _credentials_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file of credentials, unless the environment names others (a role's token, a container's)."""
    named = environ.get("AWS_SHARED_CREDENTIALS_FILE")
    if named:
        return Path(named)
    if environ.get("AWS_WEB_IDENTITY_TOKEN_FILE") or environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        return None
    usual = Path(environ.get("HOME", "/nonexistent"), ".aws", "credentials")
    return usual if usual.is_file() else None


class _FromFile:
    """Credentials from an INI file as AWS's tools write it; read again now and then, so that they can be rotated."""

    def __init__(self, path: Path, profile: str) -> None:
        self._path = path
        self._profile = profile

    def __call__(self) -> "S3Credential":
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read_string(self._path.read_text())
            section = parser[self._profile]
            found: S3Credential = {
                "access_key_id": section["aws_access_key_id"],
                "secret_access_key": section["aws_secret_access_key"],
                "expires_at": datetime.datetime.now(datetime.UTC) + _CREDENTIALS_KEPT,
            }
        except (OSError, UnicodeDecodeError, configparser.Error, KeyError) as exc:
            raise StorageFailed(
                f"no S3 credentials in {self._path}: {exc} is missing or unreadable in [{self._profile}]"
            ) from exc
        if token := section.get("aws_session_token"):
            found["token"] = token
        return found


async def _checked(pieces: AsyncIterator[bytes], digest: str) -> AsyncIterator[bytes]:
    """Pass *pieces* on; fail at their end, before they are committed, when their sha256 is another."""
    hasher = hashlib.sha256()
    async for piece in pieces:
        await asyncio.to_thread(hasher.update, piece)
        yield piece
    if hasher.hexdigest() != digest:
        raise CorruptArtifact(f"artifact {digest}: the bytes to store have sha256 {hasher.hexdigest()}")


class _Run(Protocol):
    async def __call__(self, action: Callable[[], bytes]) -> bytes: ...


async def _in_thread(action: Callable[[], bytes]) -> bytes:
    return await asyncio.to_thread(action)


async def _file_pieces(path: Path, run: _Run) -> AsyncIterator[bytes]:
    with storage_errors(path):
        file = open(path, "rb", buffering=0)  # noqa: ASYNC230, SIM115 - a local file; closed below
    try:
        while data := await run(lambda: file.read(_PIECE)):
            yield data
    finally:
        file.close()


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _brief(exc: Exception) -> str:
    """The library's messages go over many lines, with what it was made of."""
    return " ".join(str(exc).split())[:300]
