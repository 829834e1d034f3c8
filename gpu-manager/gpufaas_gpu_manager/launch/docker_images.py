"""Images of the Docker engine: the newest of a tag, and what an image says of itself by its labels."""

import contextlib
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from gpufaas_core.errors import InvalidSpec

log = logging.getLogger(__name__)

READY_LABEL: Final = "com.openfaas.ready.http.path"
HEALTH_LABEL: Final = "com.openfaas.health.http.path"
_PATH: Final = re.compile(r"/[!-~]*")


def pull(client: Any, image: str) -> Mapping[str, str]:
    """
    Have *image* here, and the newest of its tag if it came from a registry; return its labels that are paths. Blocks.

    An image that was built here, or is named by its digest, is not asked for at a registry. Where the registry does
    not answer, the image that is here is used.

    :raises InvalidSpec: it cannot be had; says why, in plain words
    """
    from docker.errors import DockerException, ImageNotFound

    here = None
    try:
        with contextlib.suppress(ImageNotFound):
            here = client.images.get(image)
            if "@" in image or not is_from_registry(image, here.attrs.get("RepoDigests") or ()):
                return _labels_of(here)
        name, tag = image, None
        if "@" not in image and ":" not in image.rpartition("/")[2]:
            tag = "latest"  # the SDK would pull every tag there is
        return _labels_of(client.images.pull(name, tag=tag))
    except (DockerException, OSError) as exc:
        if here is not None:
            log.warning("docker.not_pulled image=%s, the one that is here is used: %s", image, explanation(exc))
            return _labels_of(here)
        raise InvalidSpec(
            f"image: {image} is not on this machine and cannot be pulled: {explanation(exc)}: check its name and tag, "
            "log in to its registry (docker login), or build it here"
        ) from exc


def explanation(exc: Exception) -> str:
    """Return the engine's words of an error, without the URL that it was asked by."""
    return str(getattr(exc, "explanation", None) or exc)


def _labels_of(image: Any) -> dict[str, str]:
    labels = image.labels or {}
    return {name: labels[name] for name in (READY_LABEL, HEALTH_LABEL) if _PATH.fullmatch(labels.get(name, ""))}


def is_from_registry(image: str, digests: Iterable[str]) -> bool:
    """Whether one of *digests*, ``NAME@sha256:...`` that the engine knows an image by, is of *image*'s repository."""
    return _repository(image) in {_repository(each.partition("@")[0]) for each in digests}


def _repository(image: str) -> str:
    name, colon, tag = image.rpartition(":")
    name = image if not colon or "/" in tag else name
    return name.removeprefix("docker.io/").removeprefix("library/")
