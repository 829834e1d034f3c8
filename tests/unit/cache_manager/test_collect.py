"""What no deployed function uses is collected after a while; what is used, or was asked for lately, is not."""

import os
import time
from pathlib import Path

import pytest
from tests.unit.cache_manager.test_bundles import WEIGHTS, Stores, manifest_of, sha256

from gpufaas_cache_manager.collect import collect

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
