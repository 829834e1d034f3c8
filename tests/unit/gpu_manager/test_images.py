"""Images of which the registry may have a newer version."""

import pytest

from gpufaas_gpu_manager.launch.docker_images import is_from_registry


@pytest.mark.parametrize(
    ("image", "digest", "is_from"),
    [
        ("ghcr.io/me/fn:1", "ghcr.io/me/fn@sha256:00", True),
        ("127.0.0.1:5000/fn", "127.0.0.1:5000/fn@sha256:00", True),
        ("127.0.0.1:5000/fn:1", "127.0.0.1:5000/fn@sha256:00", True),
        ("docker.io/library/python:3", "python@sha256:00", True),
        ("me/fn:1", "python@sha256:00", False),
        ("me/fn:1", "ghcr.io/me/fn@sha256:00", False),
    ],
)
def test_an_image_is_from_a_registry_if_the_engine_knows_it_by_that_repositorys_digest(
    image: str, digest: str, is_from: bool
) -> None:
    assert is_from_registry(image, [digest]) == is_from
    assert not is_from_registry(image, [])
