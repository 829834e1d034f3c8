"""
What every `FunctionStore` and `QuotaStore` does: the fake that tests use, SQLite and etcd. Another adapter is added
to `store`; what only one of them does stands below.
"""

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from math import nan
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from msgspec.structs import replace
from tests.etcd_process import EtcdProcess
from tests.unit.gateway.fakes import MemoryStore
from tests.waiting import LIMIT_S, until

from gpufaas_adapters.etcd.client import Etcd, EtcdSettings, Listed
from gpufaas_adapters.etcd.deployed import (
    DeployedFunctions,
    EntryChange,
    EntryChanged,
    EntryRemoved,
    FunctionEntry,
    QuotaChanged,
)
from gpufaas_adapters.etcd.functions import EtcdFunctionStore
from gpufaas_adapters.sqlite.functions import SqliteStore
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import StorageAway, StorageFailed
from gpufaas_core.model import Function, Profile, SizesDoc, TimesDoc
from gpufaas_gateway.errors import Overtaken
from gpufaas_gateway.history import KEPT, Revision
from gpufaas_gateway.spec import (
    FailedRevision,
    FunctionRecord,
    FunctionSpec,
    Handover,
    Namespace,
    PendingRevision,
    Quota,
)

Store: TypeAlias = MemoryStore | SqliteStore | EtcdFunctionStore
FULL_SPEC = FunctionSpec(
    service="echo",
    image="echo:1",
    namespace="openfaas-fn",
    env_process="python index.py",
    env_vars={"greeting": "grüß dich"},
    constraints=("gpu=true",),
    secrets=(),
    labels={},
    annotations={"topic": "a,b"},
    limits={"memory": "128Mi"},
    requests={"cpu": "100m"},
    read_only_root_filesystem=False,
)
TIMES = TimesDoc(3, 1.1, (3.0, 3.3, 4.0), 40, (2.0, 0.0, 1.0), SizesDoc(1.1, 3.0, 6.0, 0.6, 14.0, 1.4, 0.14, 0.1, 0.3))
PROFILE = Profile(load_s=1.5, service_s=0.02, occupation=300, measured=True, times=TIMES)


@pytest.fixture(params=["memory", "sqlite", "etcd"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store
    match request.param:
        case "memory":
            made = MemoryStore()
        case "sqlite":
            made = SqliteStore(tmp_path / "functions.db")
        case _:
            made = EtcdFunctionStore(request.getfixturevalue("etcd_elsewhere"))
    yield made
    if isinstance(made, SqliteStore):
        made.close()


def record(
    name: str = "echo", *, revision: str = "r1", namespace: str = "openfaas-fn", **fields: object
) -> FunctionRecord:
    spec = FunctionSpec(service=name, image="echo:1")
    return FunctionRecord(name, namespace, spec, revision, **{"created_at": 1000.25, **fields})  # type: ignore[arg-type]


def test_a_new_store_is_empty(store: Store) -> None:
    assert store.all() == []
    assert store.profiles("d" * 64) == {}


def test_a_record_comes_back_as_it_was(store: Store) -> None:
    """Absent, empty and false are three things to clients that compare."""
    kept = FunctionRecord("echo", "openfaas-fn", FULL_SPEC, "r1", 1000.25, 7)

    store.put(kept)
    store.put(record("bare"))

    assert store.all() == [record("bare"), kept]


def test_records_are_ordered_by_namespace_and_name(store: Store) -> None:
    for name, namespace in (("b", "two"), ("c", "one"), ("a", "two")):
        store.put(record(name, namespace=namespace))

    assert [each.full_name for each in store.all()] == ["c.one", "a.two", "b.two"]


def test_put_replaces_the_record_and_keeps_its_count(store: Store) -> None:
    store.put(record(revision="r1"))
    store.add_invocations({"echo.openfaas-fn": 3})

    store.put(record(revision="r2"))

    assert store.all() == [record(revision="r2", invocations=3)]


def test_a_record_replaces_only_what_its_writer_has_seen(store: Store) -> None:
    first = record(revision="r1")
    store.put(first, seen="")
    second = replace(first, handover=Handover(failed=FailedRevision("r2", "no such weights")))
    store.put(second, seen=first.state)

    for seen in ("", first.state, "r9"):
        with pytest.raises(Overtaken, match=r"function echo\.openfaas-fn was changed through another gateway"):
            store.put(record(revision="r3"), noted=[noted("r3")], seen=seen)

    assert store.all() == [second]
    assert store.history("echo.openfaas-fn") == []
    store.put(record(revision="r3"), seen=second.state)
    assert store.all() == [record(revision="r3")]


def test_a_record_is_not_stored_for_a_function_that_was_removed_meanwhile(store: Store) -> None:
    store.put(record())
    store.remove("echo.openfaas-fn")

    with pytest.raises(Overtaken):
        store.put(record(revision="r2"), seen=record().state)

    assert store.all() == []


def test_of_those_who_replace_the_same_at_once_one_wins(store: Store) -> None:
    """As several gateways do."""
    store.put(record())

    def put(number: int) -> str:
        try:
            store.put(record(revision=f"n{number}"), seen=record().state)
        except Overtaken:
            return ""
        return f"n{number}"

    with ThreadPoolExecutor(4) as threads:
        done = "".join(threads.map(put, range(12)))

    assert done == store.all()[0].revision


def test_counts_add_up_and_unknown_names_are_skipped(store: Store) -> None:
    store.put(record("a"))
    store.put(record("b"))

    store.add_invocations({"a.openfaas-fn": 2, "gone.openfaas-fn": 9})
    store.add_invocations({"a.openfaas-fn": 1, "b.openfaas-fn": 5})
    store.add_invocations({})

    assert [each.invocations for each in store.all()] == [3, 5]


def test_removed_functions_are_gone_and_removing_twice_is_no_error(store: Store) -> None:
    store.put(record("a"))
    store.put(record("b"))

    store.remove("a.openfaas-fn")
    store.remove("a.openfaas-fn")

    assert [each.name for each in store.all()] == ["b"]


def test_a_removed_function_counts_from_zero_again(store: Store) -> None:
    store.put(record("a"))
    store.add_invocations({"a.openfaas-fn": 4})
    store.remove("a.openfaas-fn")

    store.put(record("a"))

    assert store.all()[0].invocations == 0


def noted(revision: str, **fields: Any) -> Revision:
    return Revision(revision, FunctionSpec("echo", f"echo:{revision}"), 1000.25, "admin", **fields)


def deployed(store: Store, *revisions: str, name: str = "echo") -> None:
    for each in revisions:
        store.put(record(name, revision=each), noted=[noted(each)])


def attempted(store: Store, serving: str, revision: str, *, failed: str = "") -> None:
    """*revision* is pending beside *serving*, or has failed for the reason that is given."""
    kept = record(revision=serving)
    if failed:
        handover = Handover(failed=FailedRevision(revision, failed))
    else:
        now = entry(revision=revision)
        assert now.worker is not None
        assert now.function is not None
        handover = Handover(pending=PendingRevision(now.record, now.worker, now.function))
    store.put(replace(kept, handover=handover), noted=[noted(revision)])


def old(revision: str) -> Revision:
    return noted(revision, status="superseded")


def test_a_history_has_the_revisions_newest_first_and_says_which_one_serves(store: Store) -> None:
    deployed(store, "r1", "r2", "r3")
    deployed(store, "x1", name="other")

    assert store.history("echo.openfaas-fn") == [noted("r3"), old("r2"), old("r1")]
    assert store.history("gone.openfaas-fn") == []


def test_a_revision_that_loads_or_has_failed_is_noted_beside_the_one_that_serves(store: Store) -> None:
    deployed(store, "r1")
    attempted(store, "r1", "r2")
    attempted(store, "r1", "r3", failed="it has no weights")
    attempted(store, "r1", "r4")

    replaced = noted("r2", status="failed", reason="revision r3 came before it was loaded")
    failed = noted("r3", status="failed", reason="it has no weights")
    assert store.history("echo.openfaas-fn") == [noted("r4", status="pending"), failed, replaced, noted("r1")]
    assert [each.revision for each in store.all()] == ["r1"]
    deployed(store, "r4")
    assert store.history("echo.openfaas-fn") == [noted("r4"), failed, replaced, old("r1")]


def test_a_revision_that_takes_its_calls_again_serves_in_the_history_too(store: Store) -> None:
    deployed(store, "r1", "r2")

    attempted(store, "r1", "r2", failed="no such weights")

    assert store.history("echo.openfaas-fn") == [noted("r2", status="failed", reason="no such weights"), noted("r1")]


def test_what_a_release_without_histories_has_deployed_is_noted_with_the_next_revision(store: Store) -> None:
    store.put(record(revision="r1"))

    for revision in ("r2", "r3"):
        store.put(record(revision=revision), noted=[noted("r1"), noted(revision)])

    assert store.history("echo.openfaas-fn") == [noted("r3"), old("r2"), old("r1")]


def test_a_history_keeps_the_last_revisions_and_first_drops_those_that_failed(store: Store) -> None:
    deployed(store, "r0", "r1")
    for number in range(KEPT + 2):
        attempted(store, "r1", f"f{number:02}", failed="no room")
    attempts = [each.revision for each in store.history("echo.openfaas-fn")]

    deployed(store, *(f"s{number:02}" for number in range(KEPT - 1)))

    assert attempts == [*(f"f{number:02}" for number in reversed(range(4, KEPT + 2))), "r1", "r0"]
    served = [each.revision for each in store.history("echo.openfaas-fn")]
    assert served == [*(f"s{number:02}" for number in reversed(range(KEPT - 1))), "r1"]


def test_revisions_that_many_note_at_once_are_all_there(store: Store) -> None:
    """As several gateways do."""
    deployed(store, "r1")

    with ThreadPoolExecutor(4) as threads:
        for number in range(KEPT - 1):
            threads.submit(attempted, store, "r1", f"f{number}", failed="no room")

    found = [each.revision for each in store.history("echo.openfaas-fn")]
    assert sorted(found) == [*(f"f{number}" for number in range(KEPT - 1)), "r1"]


def test_a_removed_function_has_no_history(store: Store) -> None:
    deployed(store, "r1", "r2")
    deployed(store, "x1", name="echo-2")
    store.remove("echo.openfaas-fn")

    assert store.history("echo.openfaas-fn") == []
    deployed(store, "r4")

    assert [each.revision for each in store.history("echo.openfaas-fn")] == ["r4"]
    assert [each.revision for each in store.history("echo-2.openfaas-fn")] == ["x1"]


def test_profiles_belong_to_the_bundle_and_kind(store: Store) -> None:
    better = Profile(load_s=1.0, service_s=0.01, occupation=200, measured=True)
    store.save_profile("d1", "cpu", PROFILE)
    store.save_profile("d1", "NVIDIA H200", PROFILE)
    store.save_profile("d2", "cpu", PROFILE)

    store.save_profile("d1", "cpu", better)

    assert store.profiles("d1") == {"cpu": better, "NVIDIA H200": PROFILE}
    assert store.profiles("d2") == {"cpu": PROFILE}


def test_profiles_outlive_the_function(store: Store) -> None:
    store.put(record("a"))
    store.save_profile("d1", "cpu", PROFILE)

    store.remove("a.openfaas-fn")

    assert store.profiles("d1") == {"cpu": PROFILE}


def test_namespaces_come_back_as_they_were_in_order(store: Store) -> None:
    for namespace in (Namespace("dev", {"openfaas": "1", "team": "a"}, {}), Namespace("bare")):
        store.put_namespace(namespace)

    store.put_namespace(Namespace("dev", {"team": "b"}))

    assert store.namespaces() == [Namespace("bare"), Namespace("dev", {"team": "b"})]


def test_removed_namespaces_are_gone_and_removing_twice_is_no_error(store: Store) -> None:
    store.put_namespace(Namespace("dev"))
    store.put(record(namespace="dev"))

    store.remove_namespace("dev")
    store.remove_namespace("dev")

    assert store.namespaces() == []
    assert store.all() == [record(namespace="dev")]


def test_quotas_come_back_as_they_were_in_order(store: Store) -> None:
    assert store.quotas() == {}
    full = Quota(max_functions=10, max_waiting=0, max_in_flight=4, max_memory=2 << 30)

    store.put_quota("dev", Quota(max_functions=3))
    store.put_quota("alpha", Quota())
    store.put_quota("dev", full)

    assert list(store.quotas().items()) == [("alpha", Quota()), ("dev", full)]


def test_removed_quotas_are_gone_and_removing_twice_is_no_error(store: Store) -> None:
    store.put_quota("dev", Quota(max_functions=3))

    store.remove_quota("dev")
    store.remove_quota("dev")

    assert store.quotas() == {}


def test_counts_of_many_who_add_at_once_add_up(store: Store) -> None:
    """As several gateways do."""
    store.put(record("a"))
    store.put(record("b"))

    with ThreadPoolExecutor(8) as threads:
        for _ in range(40):
            threads.submit(store.add_invocations, {"a.openfaas-fn": 1, "b.openfaas-fn": 2})

    if not isinstance(store, MemoryStore):  # which has no lock
        assert [each.invocations for each in store.all()] == [40, 80]


# --- SQLite alone ---


def test_sqlite_finds_everything_again_after_it_was_closed(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path / "functions.db")
    first.put(record())
    first.add_invocations({"echo.openfaas-fn": 2})
    first.save_profile("d1", "cpu", PROFILE)
    first.close()

    second = SqliteStore(tmp_path / "functions.db")

    assert second.all() == [record(invocations=2)]
    assert second.profiles("d1") == {"cpu": PROFILE}
    second.close()


@pytest.mark.parametrize("kept", [b"", b"{}", b'{"load_s":null,"service_s":1.0,"occupation":1}', b"\xff"])
def test_sqlite_leaves_out_a_profile_that_cannot_be_read(tmp_path: Path, kept: bytes) -> None:
    """It is learnt again; the bundle can be deployed."""
    store = SqliteStore(tmp_path / "functions.db")
    store.save_profile("d1", "cpu", PROFILE)
    store._file.db.execute("INSERT INTO profiles (digest, kind, profile) VALUES ('d1', 'gpu', ?)", (kept,))
    assert store.profiles("d1") == {"cpu": PROFILE}
    store.close()


def test_sqlite_has_what_it_acknowledged_after_a_kill(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from gpufaas_gateway.spec import FunctionRecord, FunctionSpec
from gpufaas_adapters.sqlite.functions import SqliteStore
store = SqliteStore(Path({str(tmp_path)!r}) / "functions.db")
store.put(FunctionRecord("echo", "openfaas-fn", FunctionSpec("echo", "echo:1"), "r1", 1000.25))
os.kill(os.getpid(), signal.SIGKILL)
"""

    killed = subprocess.run([sys.executable, "-c", program], check=False, timeout=LIMIT_S)

    assert killed.returncode == -9
    store = SqliteStore(tmp_path / "functions.db")
    assert store.all() == [record()]
    store.close()


def test_sqlite_says_what_to_do_when_the_disk_is_full_and_keeps_what_was(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "functions.db")
    store.put(record())
    # The same error as that of a full disk, without filling one.
    (pages,) = store._file.db.execute("PRAGMA page_count").fetchone()
    store._file.db.execute(f"PRAGMA max_page_count = {pages}")
    huge = FunctionSpec(service="huge", image="huge:1", env_vars={"blob": "x" * 1_000_000})

    with pytest.raises(StorageFailed, match="full: free space on the disk"):
        store.put(FunctionRecord("huge", "openfaas-fn", huge, "r1", 1000.25))

    assert store.all() == [record()]
    store.put(record(revision="r2"))
    assert store.all() == [record(revision="r2")]
    store.close()


def test_sqlite_says_what_to_do_when_it_may_not_write(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "functions.db")
    store._file.db.execute(
        "PRAGMA query_only = ON"
    )  # permissions do not bind root, who runs these tests in a container

    with pytest.raises(StorageFailed, match=r"functions\.db.*readonly.*make the data directory writable"):
        store.put(record())

    assert store.all() == []
    store.close()


def test_sqlite_refuses_a_data_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a directory")

    with pytest.raises(StorageFailed, match=r"cannot open .*data/functions\.db"):
        SqliteStore(tmp_path / "data" / "functions.db")


def test_sqlite_refuses_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "functions.db").write_text("no database" * 1000)

    with pytest.raises(StorageFailed, match="not a database: restore the file"):
        SqliteStore(tmp_path / "functions.db")


def test_sqlite_takes_up_the_file_of_the_first_version(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path / "functions.db")
    first.put(record())
    first._file.db.executescript(
        "DROP TABLE namespaces; DROP TABLE quotas; ALTER TABLE functions DROP COLUMN history;"
        " ALTER TABLE functions DROP COLUMN handover; PRAGMA user_version = 1;"
    )
    first.close()

    store = SqliteStore(tmp_path / "functions.db")
    store.put_namespace(Namespace("dev"))
    store.put_quota("dev", Quota(max_functions=1))

    assert store.all() == [record()]
    assert store.namespaces() == [Namespace("dev")]
    assert store.quotas() == {"dev": Quota(max_functions=1)}
    deployed(store, "r2")
    assert store.history("echo.openfaas-fn") == [noted("r2")]
    store.close()


def test_sqlite_refuses_the_file_of_a_newer_version(tmp_path: Path) -> None:
    newer = sqlite3.connect(tmp_path / "functions.db")
    newer.execute("PRAGMA user_version = 99")
    newer.close()

    with pytest.raises(StorageFailed, match="newer version"):
        SqliteStore(tmp_path / "functions.db")


# --- etcd alone ---


def entry(name: str = "echo", *, revision: str = "r1") -> FunctionEntry:
    kept = record(name, revision=revision)
    worker = WorkerSpec(kept.function_id, name, "openfaas-fn", "d1", "model", env={"a": "b"})
    return FunctionEntry(kept, worker, Function(kept.function_id, "d1", profiles={"*": PROFILE}))


async def put_whole(store: EtcdFunctionStore, entry: FunctionEntry) -> None:
    await asyncio.to_thread(store.put, entry.record, entry.worker, entry.function)


async def follow(etcd: Etcd) -> AsyncGenerator[EntryChange]:
    async with asyncio.timeout(30), aclosing(DeployedFunctions(etcd).watch()) as changes:
        async for change in changes:
            yield change


async def test_etcd_keeps_with_a_function_what_nodes_and_the_scheduler_need(etcd: Etcd) -> None:
    store = EtcdFunctionStore(etcd)
    deployed = DeployedFunctions(etcd)

    await put_whole(store, entry())

    assert await deployed.entries() == [entry()]
    assert entry().is_complete
    await asyncio.to_thread(store.put, record(revision="r2"))
    assert [each.is_complete for each in await deployed.entries()] == [False]
    await asyncio.to_thread(store.remove, "echo.openfaas-fn")
    assert await deployed.entries() == []


async def test_etcd_counts_calls_of_whole_entries_too(etcd: Etcd) -> None:
    store = EtcdFunctionStore(etcd)
    await put_whole(store, entry())
    await asyncio.to_thread(store.add_invocations, {"echo.openfaas-fn": 3})

    await put_whole(store, entry(revision="r2"))

    (kept,) = await asyncio.to_thread(store.all)
    assert (kept.revision, kept.invocations) == ("r2", 3)


async def test_etcd_tells_all_who_watch_what_is_deployed(etcd: Etcd, settings: EtcdSettings) -> None:
    store = EtcdFunctionStore(etcd)
    await put_whole(store, entry())
    async with Etcd(settings) as other, aclosing(follow(other)) as changes:
        assert await anext(changes) == EntryChanged(entry())
        assert isinstance(await anext(changes), Listed)

        await put_whole(store, entry(revision="r2"))
        await asyncio.to_thread(store.remove, "echo.openfaas-fn")

        assert await anext(changes) == EntryChanged(entry(revision="r2"))
        assert await anext(changes) == EntryRemoved("echo.openfaas-fn")


async def test_etcd_tells_all_who_watch_what_namespaces_may_use(etcd: Etcd, settings: EtcdSettings) -> None:
    store = EtcdFunctionStore(etcd)
    await asyncio.to_thread(store.put_quota, "dev", Quota(max_functions=1))
    async with (
        asyncio.timeout(30),
        Etcd(settings) as other,
        aclosing(DeployedFunctions(other).watch_quotas()) as changes,
    ):
        assert await anext(changes) == QuotaChanged("dev", Quota(max_functions=1))
        assert isinstance(await anext(changes), Listed)

        await asyncio.to_thread(store.put_quota, "dev", Quota(max_in_flight=2))
        await asyncio.to_thread(store.remove_quota, "dev")
        await etcd.put("v1/quotas/dev", b"tomatoes")

        assert await anext(changes) == QuotaChanged("dev", Quota(max_in_flight=2))
        assert await anext(changes) == QuotaChanged("dev", None)
        assert await anext(changes) == QuotaChanged("dev", None), "a quota that cannot be read limits nothing"


async def test_etcd_shows_what_is_deployed_to_who_looks(etcd: Etcd) -> None:
    await put_whole(EtcdFunctionStore(etcd), entry())

    item = await etcd.get("v1/functions/openfaas-fn/echo")

    assert item is not None
    kept = json.loads(item.value)
    assert (kept["record"]["revision"], kept["worker"]["digest"], kept["function"]["digest"]) == ("r1", "d1", "d1")
    assert "invocations" not in kept["record"]
    count = await etcd.get("v1/counts/openfaas-fn/echo")
    assert count is not None
    assert count.value == b"0"


async def test_etcd_serves_what_it_can_read_beside_what_it_cannot(etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    store = EtcdFunctionStore(etcd)
    await put_whole(store, entry())
    await etcd.put("v1/functions/openfaas-fn/broken", b"tomatoes")

    assert await DeployedFunctions(etcd).entries() == [entry()]

    assert "store.unreadable key=v1/functions/openfaas-fn/broken" in caplog.text


def test_etcd_has_what_it_acknowledged_after_a_kill(
    make_etcd: Callable[..., EtcdProcess], open_etcd: Callable[[EtcdSettings], Etcd]
) -> None:
    server = make_etcd()
    store = EtcdFunctionStore(open_etcd(EtcdSettings((server.endpoint,))))
    store.put(record())
    store.add_invocations({"echo.openfaas-fn": 2})

    server.kill()
    with pytest.raises(StorageAway, match=f"etcd at {server.endpoint}"):
        store.put(record(revision="r2"))
    with pytest.raises(StorageAway, match=f"etcd at {server.endpoint}"):
        store.all()
    server.start()

    def answers() -> bool:
        with suppress(StorageAway):
            return store.all() == [record(invocations=2)]
        return False

    until(answers, "the connection is there again")
    store.put(record(revision="r2"))
    assert store.all() == [record(revision="r2", invocations=2)]


async def test_etcd_is_not_waited_for_on_the_loop_that_asks_it(etcd: Etcd) -> None:
    with pytest.raises(RuntimeError, match=r"asyncio\.to_thread"):
        EtcdFunctionStore(etcd).put(record())


def test_etcd_says_that_its_loop_has_ended(settings: EtcdSettings) -> None:
    async def opened() -> EtcdFunctionStore:
        async with Etcd(settings) as etcd:
            return EtcdFunctionStore(etcd)

    store = asyncio.run(opened())

    with pytest.raises(StorageFailed, match="is not asked any more"):
        store.put(record())


def test_the_fake_can_fail_like_the_real_one() -> None:
    store = MemoryStore()
    store.failure = "the disk is full"

    with pytest.raises(StorageFailed, match="full"):
        store.put(record())

    assert store.all() == []


@pytest.mark.parametrize("wrong", [Profile(nan, 0.1, 1), Profile(1.0, -1.0, 1), Profile(1.0, 0.1, -1)])
def test_a_profile_that_cannot_be_true_is_as_if_it_were_absent(store: Store, wrong: Profile) -> None:
    """It came from a worker's NaN, before those were refused, and the bundle could not be deployed any more."""
    if isinstance(store, MemoryStore):
        pytest.skip("keeps nothing")
    store.save_profile("d1", "cpu", wrong)
    store.save_profile("d1", "NVIDIA H200", PROFILE)

    assert store.profiles("d1") == {"NVIDIA H200": PROFILE}
