"""What no deployed function uses is collected after a while; what is used, or was asked for lately, is not."""

import os
import time
from pathlib import Path

import pytest
from tests.unit.cache_manager.test_bundles import WEIGHTS, Stores, manifest_of, sha256

from gpufaas_cache_manager.collect import collect, kept
from gpufaas_core.bundle import WeightsFile

DAY_S = 86_400.0


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return Stores(tmp_path)


def age(stores: Stores, *digests: str, days: float = 3) -> None:
    """Let *digests* look unused for so long."""
    then = time.time() - days * DAY_S
    for digest in digests:
        place = stores.root / "artifacts" / "sha256" / digest[:2] / digest
        os.utime(f"{place}.json", (then, then))


def swept(stores: Stores, *used: str) -> set[str]:
    """Collect what was not used for a day; return the artifacts that are left."""
    collect(stores.artifacts, stores.bundles, set(used), time.time() - DAY_S)
    return set(stores.artifacts.digests())


def test_a_bundle_that_is_used_keeps_its_weights_however_old(stores: Stores) -> None:
    bundle = stores.put_all()
    stores.bundles.install(bundle)
    age(stores, bundle, sha256(WEIGHTS))

    assert swept(stores, bundle) == {bundle, sha256(WEIGHTS)}
    assert stores.bundles.install(bundle).is_dir()


def test_what_nobody_uses_or_asks_for_goes_with_its_directory(stores: Stores) -> None:
    bundle = stores.put_all()
    directory = stores.bundles.install(bundle)
    age(stores, bundle, sha256(WEIGHTS))

    collected = collect(stores.artifacts, stores.bundles, set(), time.time() - DAY_S)

    assert collected.artifacts == 2
    assert collected.size > len(WEIGHTS)
    assert not directory.exists()
    assert not list((stores.root / "artifacts" / "sha256").glob("??/*"))


def test_a_dry_run_says_what_would_go_and_removes_nothing(stores: Stores) -> None:
    bundle = stores.put_all()
    directory = stores.bundles.install(bundle)
    age(stores, bundle, sha256(WEIGHTS))

    told = collect(stores.artifacts, stores.bundles, set(), time.time() - DAY_S, dry=True)

    assert set(stores.artifacts.digests()) == {bundle, sha256(WEIGHTS)}
    assert directory.is_dir()
    assert told == collect(stores.artifacts, stores.bundles, set(), time.time() - DAY_S)


def test_weights_that_another_used_bundle_shares_stay(stores: Stores) -> None:
    one = stores.put_all()
    other = stores.put_bundle(
        manifest=manifest_of("function/same.safetensors"),
        files={"function/handler.py": b"def handle(event, context): 1"},
    )
    age(stores, one, other, sha256(WEIGHTS))

    assert swept(stores, other) == {other, sha256(WEIGHTS)}


def test_an_upload_that_is_not_deployed_yet_is_left_for_the_grace(stores: Stores) -> None:
    bundle = stores.put_all()

    assert swept(stores) == {bundle, sha256(WEIGHTS)}


def test_whoever_was_told_that_an_artifact_is_there_need_not_upload_it(stores: Stores) -> None:
    bundle = stores.put_all()
    age(stores, bundle, sha256(WEIGHTS))

    assert stores.artifacts.has(sha256(WEIGHTS))

    assert swept(stores) == {sha256(WEIGHTS)}


def test_the_grace_counts_from_the_last_use_and_not_from_the_upload(stores: Stores) -> None:
    bundle = stores.put_all()
    age(stores, bundle, sha256(WEIGHTS))
    swept(stores, bundle)

    assert swept(stores) == {bundle, sha256(WEIGHTS)}


def test_a_used_bundle_that_is_damaged_does_not_stop_the_others(stores: Stores) -> None:
    damaged, idle = stores.put(b"no tar"), stores.put_all()
    age(stores, damaged, idle, sha256(WEIGHTS))

    assert swept(stores, damaged) == {damaged}


def test_a_directory_whose_artifact_is_gone_goes_too(stores: Stores) -> None:
    bundle = stores.put_all()
    directory = stores.bundles.install(bundle)
    stores.artifacts.remove(bundle)

    swept(stores)

    assert not directory.exists()


def test_what_was_fetched_in_part_goes_when_nobody_went_on_with_it(stores: Stores) -> None:
    partial = stores.root / "artifacts" / "partial"
    (partial / ("a" * 64)).write_bytes(b"old")
    (partial / ("b" * 64)).write_bytes(b"new")
    then = time.time() - 3 * DAY_S
    os.utime(partial / ("a" * 64), (then, then))

    assert swept(stores) == set()
    assert [path.name for path in partial.iterdir()] == ["b" * 64]


def test_who_announced_an_artifact_is_told_that_it_goes(stores: Stores) -> None:
    bundle = stores.put_all()
    age(stores, bundle, sha256(WEIGHTS))
    gone: list[str] = []

    collect(stores.artifacts, stores.bundles, set(), time.time() - DAY_S, gone.append)

    assert set(gone) == {bundle, sha256(WEIGHTS)}


def versions(stores: Stores, count: int, weights: bytes = WEIGHTS) -> list[str]:
    """Put bundles of one size that name the same weights."""
    stores.put(weights)
    named = (WeightsFile("function/weights.safetensors", sha256(weights), len(weights)),)
    return [stores.put_bundle({"function/handler.py": b"# %d" % i}, manifest_of(weights=named)) for i in range(count)]


def test_the_newest_earlier_revisions_that_fit_are_kept_and_what_they_share_counts_once(stores: Stores) -> None:
    newest_first = versions(stores, 3)
    size = stores.artifacts.size(newest_first[0])

    def fit(most: int) -> set[str]:
        return kept(stores.artifacts, stores.bundles, set(), newest_first, most)[0]

    assert fit(3 * size + len(WEIGHTS)) == set(newest_first)
    assert fit(3 * size + len(WEIGHTS) - 1) == set(newest_first[:2]), "the oldest goes first"
    assert fit(size + len(WEIGHTS) - 1) == set()
    assert fit(0) == set()


def test_what_is_used_stays_and_does_not_count(stores: Stores) -> None:
    serves, before = versions(stores, 2)
    size = stores.artifacts.size(before)

    assert kept(stores.artifacts, stores.bundles, {serves}, [serves, before], size)[0] == {serves, before}
    assert kept(stores.artifacts, stores.bundles, {serves}, [serves, before], size - 1)[0] == {serves}


def test_a_revision_that_is_too_large_does_not_cost_the_smaller_ones_before_it(stores: Stores) -> None:
    [small] = versions(stores, 1)
    [large] = versions(stores, 1, b"more" + 1000 * WEIGHTS)

    assert kept(stores.artifacts, stores.bundles, set(), [large, small], 100 * len(WEIGHTS) + 20_000)[0] == {small}


def test_a_revision_that_lacks_a_file_is_not_kept(stores: Stores) -> None:
    [lacking] = versions(stores, 1)
    [whole] = versions(stores, 1, b"others")
    stores.artifacts.remove(sha256(WEIGHTS))

    assert kept(stores.artifacts, stores.bundles, set(), [lacking, "f" * 64, whole], 1 << 30) == (
        {whole},
        {lacking, "f" * 64},
    )


def test_an_earlier_revision_without_its_weights_goes_though_it_was_asked_for_since(stores: Stores) -> None:
    """Who looks at a history asks for its bundles: they were said to be there, and could not be rolled back to."""
    [lacks], [whole] = versions(stores, 1), versions(stores, 1, b"others")
    stores.artifacts.remove(sha256(WEIGHTS))

    def sweep() -> None:
        _, lacking = kept(stores.artifacts, stores.bundles, set(), [lacks, whole], 0)
        collect(stores.artifacts, stores.bundles, set(), time.time() - DAY_S, lacking=lacking)

    sweep()
    assert stores.artifacts.has(lacks), "what it lacks may be on its way"
    age(stores, lacks, whole, days=0.1)
    sweep()
    assert not stores.artifacts.has(lacks)
    assert stores.artifacts.has(whole)
