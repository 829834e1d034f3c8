"""
Removal of bundles, parts and weights that no deployed function uses: they were updated, removed, or never deployed.

The last use is recorded on the disk (`ArtifactStore.touch`), so that restarts of the platform change nothing. Copies in
an object store stay: other nodes and clusters may rely on them (docs/adr/0023).
"""

import logging
from collections.abc import Callable, Iterable, Set
from typing import NamedTuple

from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.bundles import BundleStore
from gpufaas_core.errors import GpufaasError, UnknownArtifact
from gpufaas_core.units import Bytes

log = logging.getLogger(__name__)


class Collected(NamedTuple):
    artifacts: int
    size: Bytes
    """The bytes of artifacts and partial files. The bytes of a file that a worker has mapped are free when the worker
    ends."""


def kept(artifacts: ArtifactStore, bundles: BundleStore, used: Set[str], past: Iterable[str], most: Bytes) -> set[str]:
    """Return those of *past*, newest first, that fit into *most* bytes beside *used*; files of several count once."""
    found, counted = set[str](), set[str]()
    for digest in (*used, *past):
        try:
            more = {digest, *(each.sha256 for each in bundles.named_by(digest))} - counted
            size = 0 if digest in used else sum(map(artifacts.size, more))
        except (GpufaasError, OSError):
            continue  # a file is gone: it cannot be rolled back to
        if size <= most:
            most -= size
            counted |= more
            found.add(digest)
    return found


def collect(
    artifacts: ArtifactStore,
    bundles: BundleStore,
    used: Set[str],
    before: float,
    on_removed: Callable[[str], None] = lambda _: None,
    *,
    dry: bool = False,
) -> Collected:
    """
    Remove every artifact that no bundle of *used* needs and that was last asked for before *before* (Unix time).

    Partial files of that age go too. Blocks: one look at each file. An upload counts as asked for when it arrives.

    :param on_removed: called in this thread with each artifact before it is removed: other nodes must not fetch it here
    :param dry: remove nothing: say what would go, but for partial files
    :raises StorageFailed: a file could not be removed
    """
    needed = set(used)
    for digest in used:
        try:
            needed.update(each.sha256 for each in bundles.named_by(digest))
        except UnknownArtifact:
            pass  # a node of a cluster has the bundles only of what it loaded
        except GpufaasError as exc:
            # A call of its function gets this error; uploading it again brings what is missing.
            log.warning("collect.unreadable bundle=%s reason=%s", digest, exc)
    count, size = 0, 0
    for digest in artifacts.digests():
        if digest in needed:
            artifacts.touch(digest)
        elif (last := artifacts.asked_for(digest)) is not None and last < before:
            size += artifacts.size(digest)
            count += 1
            if dry:
                continue
            on_removed(digest)
            bundles.remove(digest)
            artifacts.remove(digest)
    for digest in () if dry else bundles.digests():
        if digest not in needed and artifacts.asked_for(digest) is None:
            bundles.remove(digest)
    return Collected(count, size if dry else size + artifacts.drop_partials(before))
