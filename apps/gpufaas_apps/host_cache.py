"""The host tier of this machine, as its options say."""

import contextlib
import logging
from typing import Final

from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_core.bundle import WeightsFile
from gpufaas_core.descriptors import weights_share
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.units import Bytes, MiB, format_bytes
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.machine_memory import total_memory

log = logging.getLogger("node")

_SHARE: Final = 8
"""By default the host tier is this part of the memory."""


def host_budget(asked: Bytes | None) -> Bytes:
    """
    Return the size of the host tier: *asked*, or an eighth of the memory of this machine or container.

    :raises InvalidSpec: there is less memory than *asked*
    """
    memory = total_memory()
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
