"""The host tier of this machine, as its options say."""

import contextlib
import logging
import os
from pathlib import Path
from typing import Final

from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_core.bundle import WeightsFile
from gpufaas_core.descriptors import weights_share
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.units import Bytes, MiB, format_bytes
from gpufaas_gpu_manager.host_cache import HostCache

log = logging.getLogger("node")

_SHARE: Final = 8
"""By default the host tier is this part of the memory."""
_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of the memory of a container, as seen from inside."""


def host_budget(asked: Bytes | None) -> Bytes:
    """
    Return the size of the host tier: *asked*, or an eighth of the memory of this machine or container.

    :raises InvalidSpec: there is less memory than *asked*
    """
    memory = _memory()
    if asked is None:
        return memory // _SHARE // MiB * MiB
    if asked > memory:
        raise InvalidSpec(
            f"--host-cache {format_bytes(asked)}: there are {format_bytes(memory)} of memory here, "
            "also for the workers: give it less"
        )
    return asked


def host_cache(budget: Bytes, artifacts: ArtifactStore) -> HostCache:
    """Return the host tier of *budget* bytes."""

    def on_corrupt(weights: WeightsFile) -> None:
        with contextlib.suppress(GpufaasError):  # loads get this error, too
            artifacts.recheck(weights.sha256)

    return HostCache(HostTier(budget, weights_share()), log.warning, on_corrupt)


def _memory() -> Bytes:
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(path.read_text()))
    return min(sizes)
