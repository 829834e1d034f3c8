"""
Removal of bundles, parts and weights that no deployed function uses: they were updated, removed, or never deployed.

The last use is recorded on the disk (`ArtifactStore.touch`), so that restarts of the platform change nothing. Copies in
an object store stay: other nodes and clusters may rely on them (docs/adr/0023).
"""

import logging
import time
from collections.abc import Callable, Iterable, Set
from typing import Final, NamedTuple

from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.bundles import BundleStore
from gpufaas_core.errors import GpufaasError, UnknownArtifact
from gpufaas_core.units import Bytes, Seconds

_UPLOAD_S: Final[Seconds] = 3600.0
log = logging.getLogger(__name__)


class Collected(NamedTuple):
    artifacts: int
    size: Bytes
    """The bytes of artifacts and partial files. The bytes of a file that a worker has mapped are free when the worker
    ends."""


def kept(
    artifacts: ArtifactStore, bundles: BundleStore, used: Set[str], past: Iterable[str], most: Bytes
) -> tuple[set[str], set[str]]:
    """
    Return those of *past*, newest first, that fit into *most* bytes beside *used*, where files of several count once;
    and those that lack a file: they cannot be rolled back to.
    """
    found, lacking, counted = set[str](), set[str](), set[str]()
    for digest in (*used, *past):
        try:
            more = {digest, *(each.sha256 for each in bundles.named_by(digest))} - counted
            size = 0 if digest in used else sum(map(artifacts.size, more))
        except (GpufaasError, OSError):
            lacking.add(digest)
            continue
        if size <= most:
            most -= size
            counted |= more
            found.add(digest)
    return found, lacking


def collect(
    artifacts: ArtifactStore,
    bundles: BundleStore,
    used: Set[str],
    before: float,
    on_removed: Callable[[str], None] = lambda _: None,
    *,
    lacking: Set[str] = frozenset(),
    dry: bool = False,
) -> Collected:
    """
    Remove every artifact that no bundle of *used* needs and that was last asked for before *before* (Unix time).

    Partial files of that age go too. Blocks: one look at each file. An upload counts as asked for when it arrives.

    :param lacking: bundles of no use, which go an hour after they were asked for: their upload may go on until then
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
    count, size, late = 0, 0, max(before, time.time() - _UPLOAD_S)
    for digest in artifacts.digests():
        if digest in needed:
            artifacts.touch(digest)
        elif (last := artifacts.asked_for(digest)) is not None and last < (late if digest in lacking else before):
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
