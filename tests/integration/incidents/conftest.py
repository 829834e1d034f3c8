"""What several incidents begin with."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.test_layers import LayerRig


@pytest.fixture
async def rig(tmp_path: Path, warm_fork_servers: object) -> AsyncIterator[LayerRig]:  # noqa: ARG001
    """A node that forks its workers, and keeps one standby."""
    rig = LayerRig(tmp_path, "auto", 1)
    await rig.node.start()
    yield rig
    await rig.node.close()
