"""Text from a URL: stack files."""

from typing import Final

from gpufaas_core.errors import GpufaasError

_TIMEOUT_S: Final = 5.0
_MOST: Final = 16 << 20  # bytes that are held in memory


class NotFetched(GpufaasError):
    """The text is missing, cannot be reached, or is not what was asked for."""


def fetch_text(url: str) -> str:
    """:raises NotFetched: says where it looked"""
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
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise NotFetched(f"{url}: it is not text in UTF-8 (byte {exc.start})") from exc
