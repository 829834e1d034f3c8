"""
The client's side of a remote builder: OpenFaaS's, or a platform started with
``--builder-secret``. Building there needs no docker here: the build context is sent, and the log comes back meanwhile.
"""

import base64
import binascii
import io
import os
import ssl
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Final
from urllib.parse import urlsplit

import httpx
import msgspec

from gpufaas.client import LOOPBACK
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.remote_build import (
    BUILD_PATH,
    CONFIG,
    CONTEXT,
    NDJSON,
    PUBLIC_KEY_PATH,
    SECRETS,
    SIGNATURE_HEADER,
    BuildConfig,
    Signer,
)
from gpufaas_core.sealing import seal
from gpufaas_core.units import Seconds

_CONNECT_S: Final[Seconds] = 5.0
_SILENCE_S: Final[Seconds] = 1800.0  # a step that compiles may print nothing for so long
_PIECE: Final = 1 << 20
_SHOWN_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class RemoteBuilder:
    url: str
    """Scheme and host; a path is ignored, as by faas-cli."""
    payload_secret: bytes = field(repr=False)
    public_key: str | None = None
    """Key that build secrets are sealed for; None: the builder is asked for it."""
    verify: bool = True

    def build(
        self, config: BuildConfig, context: Path, secrets: Mapping[str, Path], progress: Callable[[str], None]
    ) -> None:
        """
        Have the image of *config* built from the folder *context*; *progress* gets each line of the log.

        :param secrets: files that the Dockerfile mounts at build time, by id
        :raises InvalidSpec: the build failed, or something that it needs is not there
        :raises GpufaasError: the builder cannot be reached, or refuses
        """
        base = _base(self.url)
        with (
            httpx.Client(
                timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S),
                verify=ssl.create_default_context() if base.startswith("https:") and self.verify else False,
                trust_env=urlsplit(base).hostname not in LOOPBACK,
                headers={"User-Agent": "gpufaas-cli"},
            ) as http,
            tempfile.TemporaryFile() as body,
        ):
            try:
                sealed = self._sealed(http, base, secrets) if secrets else None
                pack(body, config, context, sealed)
                self._send(http, base, body, config.image, progress)
            except httpx.HTTPError as exc:
                raise GpufaasError(f"the builder at {base} cannot be reached: {exc or type(exc).__name__}") from exc

    def _sealed(self, http: httpx.Client, base: str, secrets: Mapping[str, Path]) -> str:
        values: dict[str, bytes] = {}
        for name, path in secrets.items():
            try:
                values[name] = path.read_bytes()
            except OSError as exc:
                raise InvalidSpec(f"build secret {name}: {path}: {exc.strerror}") from exc
        if self.public_key is not None:
            return seal(self.public_key, values)
        answer = http.get(base + PUBLIC_KEY_PATH)
        try:
            if answer.status_code != httpx.codes.OK:
                raise ValueError(f"it answers {answer.status_code}")
            told = answer.json()
            return seal(str(told["public_key"]), values, str(told.get("key_id") or "") or None)
        except (ValueError, LookupError, TypeError, AttributeError, InvalidSpec) as exc:
            raise GpufaasError(
                f"the builder at {base} gives no key to seal build secrets for ({exc}): name one with "
                "--builder-public-key"
            ) from exc

    def _send(
        self, http: httpx.Client, base: str, body: IO[bytes], image: str, progress: Callable[[str], None]
    ) -> None:
        signer = Signer(self.payload_secret)
        for piece in _pieces(body):
            signer.update(piece)
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(os.fstat(body.fileno()).st_size),
            "Accept": NDJSON,
            SIGNATURE_HEADER: signer.header(),
        }
        last = None
        with http.stream("POST", base + BUILD_PATH, content=_pieces(body), headers=headers) as answer:
            if answer.status_code not in (200, 202):
                answer.read()
                said = " ".join(answer.text[:_SHOWN_CHARS].split()) or answer.reason_phrase
                raise GpufaasError(f"the builder at {base} answers {answer.status_code}: {said}")
            for line in answer.iter_lines():
                if not line.strip():
                    continue
                last = _told(base, line)
                for text in last.log or ():
                    progress(text.rstrip())
        if last is None or last.status == "in_progress":
            raise GpufaasError(f"the builder at {base} stopped answering before {image} was built: see its own log")
        if last.status != "success":
            raise InvalidSpec(f"the build of {image} failed: {last.error or 'the builder did not say why'}")


def pack(body: IO[bytes], config: BuildConfig, context: Path, sealed: str | None) -> None:
    """
    Write the tar of a build to *body*. The same sources give the same bytes.

    :raises InvalidSpec: there is something in *context* that is neither a file nor a directory
    """
    with tarfile.open(fileobj=body, mode="w:", format=tarfile.PAX_FORMAT) as tar:
        for path in [context, *sorted(context.rglob("*"))]:
            member = tarfile.TarInfo(str(PurePosixPath(CONTEXT) / path.relative_to(context)))
            member.mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0
            if path.is_file():  # also by a link: builders take plain files
                member.size = path.stat().st_size
                with path.open("rb") as file:
                    tar.addfile(member, file)
            elif path.is_dir() and not path.is_symlink():
                member.type = tarfile.DIRTYPE
                tar.addfile(member)
            else:
                raise InvalidSpec(f"{path} is neither a file nor a directory: it cannot be sent to a builder")
        for name, text in ((CONFIG, msgspec.json.encode(config)), (SECRETS, sealed.encode() if sealed else b"")):
            if text:
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(text), 0o664
                tar.addfile(member, io.BytesIO(text))
    body.flush()


def read_payload_secret(path: Path) -> bytes:
    """:raises InvalidSpec: it cannot be read, or is empty"""
    try:
        secret = path.expanduser().read_bytes().strip()
    except OSError as exc:
        raise InvalidSpec(f"payload secret {path}: {exc.strerror}") from exc
    if not secret:
        raise InvalidSpec(f"payload secret {path}: it is empty")
    return secret


def read_public_key(text: str) -> str:
    """
    Return the key *text*, or the one in the file of that name.

    :raises InvalidSpec: it is neither
    """
    try:
        if len(base64.b64decode(text, validate=True)) == 32:
            return text
    except (binascii.Error, ValueError):
        pass
    try:
        return Path(text).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not text"
        raise InvalidSpec(f"builder public key {text}: it is neither base64 of 32 bytes nor a file ({reason})") from exc


def _base(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidSpec(f"{url} is not the URL of a remote builder: write for example http://127.0.0.1:8080")
    return f"{parts.scheme}://{parts.netloc}"


def _pieces(body: IO[bytes]) -> Iterator[bytes]:
    body.seek(0)
    while piece := body.read(_PIECE):
        yield piece


class _Told(msgspec.Struct):
    """A `BuildStatus`, where other builders may send null, and other words."""

    log: list[str] | None = None
    status: str | None = "in_progress"
    error: str | None = None


def _told(base: str, line: str) -> _Told:
    try:
        return msgspec.json.decode(line, type=_Told)
    except msgspec.DecodeError as exc:
        raise GpufaasError(f"the builder at {base} sends what is no status of a build: {line[:_SHOWN_CHARS]}") from exc
