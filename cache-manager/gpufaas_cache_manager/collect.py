"""
Collection of what no deployed function uses: bundles and weights that were updated, removed, or never deployed.

"Used" is recorded on the disk (`ArtifactStore.touch`), so that a platform that restarts often collects as well as one
that does not. Weights are found through the bundles that name them.

Local only: a copy in an object store is not touched, since other nodes and clusters may rely on it (docs/adr/0023).
"""

import logging
from collections.abc import Callable, Set
from typing import NamedTuple

from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.bundles import BundleStore
from gpufaas_core.errors import GpufaasError, UnknownArtifact
from gpufaas_core.units import Bytes

log = logging.getLogger(__name__)


class Collected(NamedTuple):
    artifacts: int
    size: Bytes
    """
    Of the artifacts, and of what was fetched in part; a worker that still has one mapped keeps its bytes until it ends.
    """


def collect(
    artifacts: ArtifactStore,
    bundles: BundleStore,
    used: Set[str],
    before: float,
    on_removed: Callable[[str], None] = lambda _: None,
) -> Collected:
    """
    Remove every artifact that no bundle of *used* needs, and that nobody asked for since *before*, in Unix seconds.

    What was fetched in part, and not gone on with since then, goes too; it is not counted as artifacts.
    Blocks: one look at each file. An upload that is not deployed yet was asked for when it came.

    :param on_removed: told of each artifact, in this thread, before it goes: nobody is to be sent here for it

    :raises StorageFailed: a file could not be removed
    """
    needed = set(used)
    for digest in used:
        try:
            needed.update(weights.sha256 for weights in bundles.manifest(digest).weights)
        except UnknownArtifact:
            pass  # a node of a cluster has the bundles only of what it loaded
        except GpufaasError as exc:
            # Its function says so when it is called; uploaded again, what is missing of its weights comes with it.
            log.warning("collect.unreadable bundle=%s reason=%s", digest, exc)
    count, size = 0, 0
    for digest in artifacts.digests():
        if digest in needed:
            artifacts.touch(digest)
        elif (last := artifacts.asked_for(digest)) is not None and last < before:
            size += artifacts.size(digest)
            count += 1
            on_removed(digest)
            bundles.remove(digest)
            artifacts.remove(digest)
    for digest in bundles.digests():
        if digest not in needed and artifacts.asked_for(digest) is None:
            bundles.remove(digest)
    size += artifacts.drop_partials(before)
    return Collected(count, size)
