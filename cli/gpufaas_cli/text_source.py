"""Text from a URL or a file: stack files and the two stores."""

import json
from pathlib import Path
from typing import Final

from gpufaas_core.errors import GpufaasError

_TIMEOUT_S: Final = 5.0  # as faas-cli waits for its stores
_MOST: Final = 16 << 20  # bytes that are held in memory; stores have some 50 KB


class NotFetched(GpufaasError):
    """The text is missing, cannot be reached, or is not what was asked for."""


def fetch_text(place: str) -> str:
    """
    Return the text at *place*, an http(s) URL or a file.

    :raises NotFetched: says where it looked
    """
    try:
        is_url = place.lower().startswith(("http://", "https://"))
        return (_download(place) if is_url else Path(place).expanduser().read_bytes()).decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise NotFetched(f"{place}: it is not text in UTF-8 (byte {exc.start})") from exc
    except OSError as exc:
        raise NotFetched(f"{place}: {exc.strerror or exc}") from exc


def fetch_json(place: str) -> object:
    """:raises NotFetched: as of `fetch_text`, or it is not JSON"""
    try:
        return json.loads(fetch_text(place))
    except ValueError as exc:
        raise NotFetched(f"{place}: it is not JSON: {exc}") from exc


def _download(url: str) -> bytes:
    import httpx

    content = bytearray()
    try:
        with httpx.stream("GET", url, timeout=_TIMEOUT_S, follow_redirects=True) as answer:
            if not answer.is_success:
                raise NotFetched(f"{url}: it answers {answer.status_code} {answer.reason_phrase}".rstrip())
            for part in answer.iter_bytes():
                content += part
                if len(content) > _MOST:
                    raise NotFetched(f"{url}: it is larger than {_MOST >> 20} MiB: is it the right address?")
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise NotFetched(f"{url}: it cannot be reached: {exc or type(exc).__name__}") from exc
    return bytes(content)
