"""
The object store that speaks S3: Amazon's, or any other with the same interface. The port is in `object_store.py`.

It looks for credentials where AWS's own tools do: in the environment, then in the credentials file.
"""

import asyncio
import configparser
import contextlib
import datetime
import hashlib
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, parse_qsl, urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from gpufaas_cache_manager.artifacts import PIECE, check_digest, file_pieces, storage_errors
from gpufaas_core.errors import CorruptArtifact, InvalidSpec, StorageAway, StorageFailed, UnknownArtifact
from gpufaas_core.units import Bytes, MiB, Seconds

if TYPE_CHECKING:
    from obstore.store import S3Credential  # not there at run time

_AHEAD: Final = 4
"""Ranges of one object that are asked for at once: one connection to S3 carries about 90 MB/s, a node takes more."""
_PART: Final[Bytes] = 16 * MiB
_MAX_PARTS: Final = 9_000  # S3 takes 10,000
_UNSIZED_PART: Final[Bytes] = 64 * MiB  # of a stream whose length is not known: up to 576 GB
_ANSWERS_S: Final[Seconds] = 10.0
"""A store that does not answer for so long is reported as away, so that its callers do not wait longer."""
_SLOWEST: Final = MiB / 4
"""Per second, of a request with data."""
_REFUSED: Final = re.compile(r"status code: (4\d\d|507)|redirect")
"""In the library's messages, which has one class for all that is not of the object itself."""
_CREDENTIALS_KEPT: Final = datetime.timedelta(minutes=10)


class S3ObjectStore:
    """
    `ObjectStore` in a bucket. Rust's object_store makes the requests, off the event loop and without Python's lock.

    A multipart upload that breaks off is aborted; after a kill, a lifecycle rule of the bucket has to do it.
    """

    def __init__(self, url: str, store: S3Store) -> None:
        self.url = url
        self._store = store

    async def open(self) -> None:
        # A list, since a HEAD of an object says the same of a bucket that is not there as of the object.
        async with self._answering("its list"):
            with contextlib.suppress(StopAsyncIteration):
                await obstore.list(self._store, "sha256/").__anext__()

    async def head(self, digest: str) -> Bytes | None:
        key = self._key(digest)
        try:
            async with self._answering(digest):
                return (await obstore.head_async(self._store, key))["size"]
        except UnknownArtifact:
            return None

    async def read(self, digest: str, start: Bytes, end: Bytes) -> AsyncGenerator[bytes]:
        key = self._key(digest)

        async def part(begin: Bytes) -> bytes:
            stop = min(begin + PIECE, end)
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
                    start += PIECE
                data = await parts[0]
                parts.popleft()
                yield data
        finally:
            for each in parts:
                each.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def write(self, digest: str, source: Path | AsyncIterator[bytes]) -> None:
        key = self._key(digest)
        part, size = _UNSIZED_PART, None
        if isinstance(source, Path):
            with storage_errors(source):
                size = (await asyncio.to_thread(source.stat)).st_size
            part = max(_PART, -(-size // _MAX_PARTS))
        checked = _checked(source if not isinstance(source, Path) else file_pieces(source, asyncio.to_thread), digest)
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


def s3_store(url: str, environ: Mapping[str, str]) -> S3ObjectStore:
    """Return the store that *url* names. :raises InvalidSpec: it is wrong"""
    parts = urlsplit(url)
    asked = _s3_parameters(url, parts)
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
        raise InvalidSpec(
            f"object store {url!r}: {parts.netloc!r} is no bucket's name: expected dir:/path, or "
            "s3://bucket/prefix?endpoint=http://host:9000"
        )
    asked = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(asked.keys() - {"endpoint", "region"}):
        raise InvalidSpec(f"object store {url!r}: no parameter {unknown[0]!r}: there are endpoint and region")
    endpoint = urlsplit(asked.get("endpoint", "http://x"))
    if endpoint.scheme not in ("http", "https") or not endpoint.netloc:
        raise InvalidSpec(f"object store {url!r}: endpoint={asked['endpoint']} is not a URL such as http://minio:9000")
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


def _brief(exc: Exception) -> str:
    """The library's messages go over many lines, with what it was made of."""
    return " ".join(str(exc).split())[:300]
