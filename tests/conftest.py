"""Fixtures for tests of several kinds."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.nursery import Nursery

_IMAGES = Path(__file__).parent / "images"
sys.path.insert(0, str(Path(__file__).parent / "fakes"))  # stand-ins for servers of others: `import kubernetes_server`


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def warm_fork_servers(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork servers of this test come from a process that has imported torch already."""
    monkeypatch.setattr("gpufaas_gpu_manager.forks.launch", nursery.launch)


@pytest.fixture(scope="session")
def test_image() -> str:
    """An image of the test server in the Docker engine. Without one: skipped, or failed if GPUFAAS_REQUIRE says so."""
    return _made_by("build.py")


@pytest.fixture(scope="session")
def python_image() -> str:
    """An image with Python and pip to build others from; without an engine as `test_image`."""
    return _made_by("python_base.py")


def _made_by(script: str) -> str:
    try:
        import docker

        client = docker.from_env(timeout=5)
        try:
            client.ping()
        finally:
            client.close()
    except Exception as exc:
        reason = f"no Docker engine answers ({type(exc).__name__}); start dockerd to run this"
        if "docker" in os.environ.get("GPUFAAS_REQUIRE", "").split(","):
            pytest.fail(reason)
        pytest.skip(reason)
    done = subprocess.run([sys.executable, str(_IMAGES / script)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"the test image was not made: {done.stderr}")
    return done.stdout.strip()
