"""When calls find a new revision, and which one serves if it does not load: `Handovers` and `Calls` among fakes."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.gateway.conftest import DEVICE, Gateway, calling
from tests.unit.gateway.fakes import idle
from tests.unit.gateway.test_contract_checklist import Exchange, Functions
from tests.waiting import eventually

from gpufaas_core.errors import GpufaasError, LoadFailed, NoRoom, OutOfMemory, UnknownFunction
from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, Failing, FunctionId, ResidentStatus
from gpufaas_core.wire.heads import AnswerHead, CallHead
from gpufaas_gateway import handover

ECHO = "echo.openfaas-fn"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "LOOK_S", 0.002)
    monkeypatch.setattr(handover, "OTHERS_S", 0.002)


def has(gateway: Gateway, *functions: FunctionId, loading: FunctionId | None = None, **fields: Any) -> None:
    """Let the scheduler say that it has one copy of each of *functions*, and one that loads."""
    of_loading = () if loading is None else (loading,)
    copies = tuple(
        ResidentStatus(each, 1, 0, loading=each == loading, pinned=False, last_used=0.0)
        for each in (*functions, *of_loading)
    )
    fields = {"failing": {}, "lacking": {}, "kept_out": {}, "rolling": (), "age_s": 0.0, **fields}
    gateway.scheduler.now = replace(gateway.scheduler.now, devices=(replace(idle(DEVICE), resident=copies),), **fields)


def failing(function: FunctionId, reason: str = "no such weights") -> dict[FunctionId, Failing]:
    return {function: Failing(reason, 1, 0.0, 0.0)}


async def update(gateway: Gateway, **fields: object) -> FunctionId:
    """PUT echo; return the id of the new revision, which the scheduler was told of."""
    known = set(gateway.scheduler.functions)
    answer = await gateway.client.put("/system/functions", json=gateway.body(envVars={"N": token_hex(4)}, **fields))
    assert answer.status_code == 200, answer.text
    (new,) = gateway.scheduler.functions.keys() - known
    return new


async def resident(gateway: Gateway) -> FunctionId:
    """Deploy echo, which has one copy then."""
    old = await gateway.deployed()
    has(gateway, old)
    return old


async def shown(gateway: Gateway) -> dict[str, Any]:
    found: dict[str, Any] = (await gateway.client.get("/system/function/echo")).json()["gpufaas"]
    return found


def history(gateway: Gateway) -> dict[str, tuple[str, str]]:
    return {each.revision: (each.status, each.reason) for each in gateway.store.history(ECHO)}


def revision(function: FunctionId) -> str:
    return function.partition("@")[2]


def serves(gateway: Gateway, function: FunctionId) -> Callable[[], bool]:
    return lambda: gateway.found().function_id == function


async def looked(gateway: Gateway, times: int = 3) -> None:
    """Return when the status was read so many times more."""
    seen, ask = 0, gateway.scheduler.status

    def status() -> Any:
        nonlocal seen
        seen += 1
        return ask()

    gateway.scheduler.status = status  # type: ignore[method-assign]
    gateway.deployer.handovers.scheduler = gateway.scheduler
    await eventually(lambda: seen >= times)


async def test_the_new_revision_is_shown_once_its_copies_are_loaded_and_the_old_one_drains(
    gateway: Gateway,
) -> None:
    old = await resident(gateway)

    new = await update(gateway)
    has(gateway, old, new, loading=new)
    await looked(gateway)

    assert serves(gateway, old)()
    assert gateway.scheduler.successors == {new: old}
    said = await shown(gateway)
    assert (said["revision"], said["pending"]) == (revision(old), revision(new))
    assert history(gateway)[revision(new)] == ("pending", "")
    has(gateway, old, new)
    await eventually(serves(gateway, new))
    await eventually(lambda: gateway.scheduler.removed == [(old, True)])
    assert "pending" not in await shown(gateway)
    assert history(gateway) == {revision(new): ("serving", ""), revision(old): ("superseded", "")}


@pytest.mark.parametrize("names", [False, True])
async def test_a_rollback_while_a_revision_is_pending_withdraws_it_and_loads_nothing(
    gateway: Gateway, names: bool
) -> None:
    old = await resident(gateway)
    new = await update(gateway)
    known = set(gateway.scheduler.functions)

    body = {"revision": revision(old)} if names else None
    answer = await gateway.client.post("/system/function/echo/rollback", json=body)

    assert answer.json() == {"revision": revision(old), "to": revision(old)}
    assert gateway.scheduler.removed == [(new, False)]
    assert gateway.scheduler.functions.keys() <= known
    reason = f"a rollback went back to {revision(old)} before it was loaded"
    assert history(gateway) == {revision(new): ("failed", reason), revision(old): ("serving", "")}
    assert serves(gateway, old)()


async def test_a_rollback_from_a_revision_that_failed_does_not_take_the_calls_of_the_one_that_serves(
    gateway: Gateway,
) -> None:
    """In a script, ``up || rollback`` went back behind the revision that served all the time."""
    first = await resident(gateway)
    second = await update(gateway)
    has(gateway, second)
    await eventually(serves(gateway, second))
    third = await update(gateway)
    has(gateway, second, failing=failing(third))
    await eventually(lambda: gateway.found().record.handover.failed is not None)

    unnamed = await gateway.client.post("/system/function/echo/rollback")

    assert unnamed.status_code == 409
    assert f"revision {revision(third)} of function echo never served" in unnamed.text
    assert serves(gateway, second)()
    named = await gateway.client.post("/system/function/echo/rollback", json={"revision": revision(first)})
    assert named.json()["to"] == revision(first)


async def test_an_update_right_after_a_hand_over_waits_for_its_own_copies_only(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for up to 3 s more: the look for the one before it was still to come."""
    monkeypatch.setattr(handover, "OTHERS_S", 3600.0)
    revisions = [await resident(gateway)]

    for _ in range(2):
        revisions.append(await update(gateway))
        has(gateway, *revisions)
        await eventually(serves(gateway, revisions[-1]))
        await eventually(lambda: (revisions[-2], True) in gateway.scheduler.removed)


async def test_an_update_soon_after_one_on_trial_does_not_wait_for_the_look_at_that_one(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "OTHERS_S", 3600.0)
    old = await resident(gateway)
    tried = await update(gateway)
    has(gateway, old, lacking={tried: "there is no room"})
    await eventually(serves(gateway, tried))
    await gateway.found().trial("")  # type: ignore[misc]  # it has answered
    has(gateway, tried)

    new = await update(gateway)
    has(gateway, tried, new)

    await eventually(serves(gateway, new))


async def test_a_revision_that_does_not_load_is_dropped_with_its_reason_until_the_next_deployment(
    gateway: Gateway,
) -> None:
    old = await resident(gateway)
    new = await update(gateway)

    has(gateway, old, failing=failing(new))
    await eventually(lambda: gateway.scheduler.removed == [(new, False)])

    assert serves(gateway, old)()
    said = await shown(gateway)
    assert said["failed"] == {"revision": revision(new), "reason": "no such weights"}
    assert "pending" not in said
    assert history(gateway)[revision(new)] == ("failed", "no such weights")
    assert new in gateway.workers.forgotten
    await update(gateway)
    assert "failed" not in await shown(gateway)


async def test_a_revision_has_failed_with_its_first_load_though_it_is_loaded_once_more_by_then(
    gateway: Gateway,
) -> None:
    """One that hung was told to its author after three times 60 s."""
    old = await resident(gateway)
    new = await update(gateway)

    has(gateway, old, loading=new, failing=failing(new))
    await eventually(lambda: gateway.scheduler.removed == [(new, False)])

    assert history(gateway)[revision(new)] == ("failed", "no such weights")


async def test_a_revision_that_others_keep_out_is_dropped_and_the_one_that_has_room_goes_on(gateway: Gateway) -> None:
    """It took the calls, and all of them were refused."""
    old = await resident(gateway)
    new = await update(gateway)

    has(gateway, old, lacking={new: "there is no room"}, kept_out={new: "a minimum holds its room"})
    await eventually(lambda: gateway.scheduler.removed == [(new, False)])

    assert serves(gateway, old)()
    assert history(gateway)[revision(new)] == ("failed", "a minimum holds its room")


async def test_without_room_for_both_the_new_one_takes_the_calls_and_the_old_one_is_kept_in_mind(
    gateway: Gateway,
) -> None:
    old = await resident(gateway)
    new = await update(gateway)

    has(gateway, old, lacking={new: "there is no room"})
    await eventually(serves(gateway, new))
    before = gateway.found().record.handover.before
    assert before is not None
    assert before.function_id == old
    assert (await shown(gateway))["before"] == revision(old)
    has(gateway, new)

    await eventually(lambda: gateway.found().record.handover.before is None)
    assert gateway.found().trial is None
    assert gateway.store.records[ECHO].handover.before is None
    assert "before" not in await shown(gateway)


async def test_without_room_the_old_one_serves_again_if_the_new_one_does_not_load(gateway: Gateway) -> None:
    old = await resident(gateway)
    new = await update(gateway)
    has(gateway, old, lacking={new: "there is no room"})
    await eventually(serves(gateway, new))

    has(gateway, failing=failing(new))
    await eventually(serves(gateway, old))

    await eventually(lambda: gateway.scheduler.removed == [(old, True), (new, False)])
    assert old in gateway.scheduler.functions
    assert gateway.store.records[ECHO].function_id == old
    assert (await shown(gateway))["failed"]["revision"] == revision(new)


async def test_while_copies_of_the_old_one_make_room_one_by_one_it_has_all_calls(gateway: Gateway) -> None:
    old = await resident(gateway)
    new = await update(gateway)

    has(gateway, old, new, lacking={new: "there is no room"}, rolling=(new,))
    await looked(gateway)
    assert serves(gateway, old)()
    has(gateway, old, new, lacking={new: "there is no room"})

    await eventually(serves(gateway, new))
    assert gateway.found().record.handover.before is None, "a copy of it is loaded"


async def test_a_status_that_is_old_decides_nothing(gateway: Gateway) -> None:
    """No scheduler leads at the moment."""
    old = await resident(gateway)
    new = await update(gateway)

    has(gateway, old, new, age_s=1.0)
    await looked(gateway)

    assert serves(gateway, old)()


async def test_another_update_replaces_what_is_pending(gateway: Gateway) -> None:
    old = await resident(gateway)
    first = await update(gateway)

    second = await update(gateway)

    assert gateway.scheduler.removed == [(first, False)]
    assert history(gateway)[revision(first)] == ("failed", f"revision {revision(second)} came before it was loaded")
    has(gateway, old, second)
    await eventually(serves(gateway, second))


async def test_another_update_of_one_on_trial_keeps_the_last_revision_that_was_loaded(gateway: Gateway) -> None:
    old = await gateway.deployed()
    first = await update(gateway)
    has(gateway, loading=first)

    second = await update(gateway)

    assert serves(gateway, second)()
    before = gateway.found().record.handover.before
    assert before is not None
    assert before.function_id == old


async def test_one_on_trial_that_was_loaded_without_a_call_is_on_trial_no_more_and_serves_beside_the_next(
    gateway: Gateway,
) -> None:
    """A plan that came later loads it: who waited for it to take calls waited for its first call."""
    await gateway.deployed()
    first = await update(gateway)
    await looked(gateway, 1)
    assert "before" in await shown(gateway)

    has(gateway, first)

    assert "before" not in await shown(gateway)
    await update(gateway)
    assert serves(gateway, first)(), "the next one is loaded beside it"


async def test_another_update_of_one_on_trial_that_has_just_failed_keeps_the_one_before_too(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had nothing to go back to: if it did not load either, calls failed."""
    monkeypatch.setattr(handover, "LOOK_S", 3600.0)
    old = await gateway.deployed()
    first = await update(gateway)
    has(gateway, loading=first, failing=failing(first))

    second = await update(gateway)

    assert serves(gateway, second)()
    before = gateway.found().record.handover.before
    assert before is not None
    assert before.function_id == old
    assert history(gateway)[revision(first)] == ("failed", "no such weights")


async def test_a_removal_ends_the_pending_one_too(gateway: Gateway) -> None:
    old = await resident(gateway)
    new = await update(gateway)

    assert (await gateway.delete({"functionName": "echo"})).status_code == 202

    assert gateway.scheduler.functions == {}
    assert {each for each, _ in gateway.scheduler.removed} == {old, new}
    has(gateway, old, new)
    await eventually(lambda: not gateway.deployer.handovers._looking, "nobody looks any more")
    assert gateway.catalogue.find("echo") is None


async def test_after_a_restart_the_pending_one_takes_the_calls_on_trial(gateway: Gateway) -> None:
    old = await resident(gateway)
    new = await update(gateway)
    gateway.catalogue.drop(gateway.found())
    await eventually(lambda: not gateway.deployer.handovers._looking, "as after a kill")
    has(gateway)

    await gateway.deployer.load()

    assert serves(gateway, new)()
    before = gateway.found().record.handover.before
    assert before is not None
    assert before.function_id == old


async def test_a_gateway_hands_over_what_another_one_deployed_and_left(gateway: Gateway, tmp_path: Any) -> None:
    old = await resident(gateway)
    new = await update(gateway)
    other = Gateway(tmp_path / "other")
    other.store, other.deployer.handovers.store = gateway.store, gateway.store
    other.workers.bundle(other.bundle)
    found = gateway.found()
    other.deployer.adopt(replace(found.record, handover=type(found.record.handover)()), found.spec, found.function)
    gateway.deployer.handovers._looking[ECHO].cancel()

    other.deployer.adopt(found.record, found.spec, found.function)
    other.scheduler.functions[new] = gateway.scheduler.functions[new]
    has(other, old, new)

    await eventually(serves(other, new))
    assert gateway.store.records[ECHO].function_id == new
    other.logs.close()


def another(gateway: Gateway, root: Path) -> Gateway:
    """Return a gateway with the same store, which has heard of what *gateway* serves."""
    other = Gateway(root / "other")
    other.store = other.deployer._store = other.deployer.handovers.store = gateway.store
    other.artifacts = other.deployer._artifacts = gateway.artifacts
    other.workers.bundle(other.bundle)
    found = gateway.found()
    other.deployer.adopt(found.record, found.spec, found.function)
    other.catalogue.loaded = True
    return other


async def test_an_update_goes_on_what_another_gateway_has_deployed_before_this_one_heard_of_it(
    gateway: Gateway, tmp_path: Path
) -> None:
    first = await gateway.deployed()
    other = another(gateway, tmp_path)
    second = await update(gateway)
    await gateway.found().trial("")  # type: ignore[misc]  # it has answered

    answer = await other.client.put("/system/functions", json=other.body(envVars={"N": "last"}))

    assert answer.status_code == 200
    last = other.found().function_id
    assert gateway.store.records[ECHO].function_id == last
    assert [*history(gateway)] == [revision(each) for each in (last, second, first)]
    assert history(gateway)[revision(second)] == ("superseded", "")
    before = other.found().record.handover.before
    assert before is not None
    assert before.function_id == second, "that is what serves again if this one does not load"
    other.logs.close()


async def test_a_hand_over_does_not_take_back_what_another_gateway_has_deployed_meanwhile(
    gateway: Gateway, tmp_path: Path
) -> None:
    old = await resident(gateway)
    new = await update(gateway)
    other = another(gateway, tmp_path)
    other.scheduler.functions[new] = gateway.scheduler.functions[new]
    last = await update(other)

    has(gateway, old, new)
    await looked(gateway)

    assert gateway.store.records[ECHO].function_id == last
    record = other.found().record
    gateway.deployer.adopt(record, other.found().spec, other.found().function)
    await eventually(serves(gateway, last))
    other.logs.close()


@pytest.mark.parametrize(("method", "status"), [("put", 404), ("post", 409)])
async def test_a_deployment_that_another_gateway_made_impossible_is_refused(
    gateway: Gateway, tmp_path: Path, method: str, status: int
) -> None:
    await gateway.deployed()
    other = another(gateway, tmp_path)
    if method == "post":
        other.catalogue.drop(other.found())
    else:
        await gateway.delete({"functionName": "echo"})

    answer = await getattr(other.client, method)("/system/functions", json=other.body(envVars={"N": "2"}))

    assert answer.status_code == status, answer.text
    assert len(gateway.store.records) == (method == "post")
    assert [*other.workers.defined] == [each.function_id for each in gateway.store.all()]
    other.logs.close()


async def test_a_function_that_others_change_all_the_time_cannot_be_updated(gateway: Gateway) -> None:
    await gateway.deployed()
    kept = gateway.store.records[ECHO]
    gateway.workers.during_check = lambda: gateway.store.put(replace(kept, revision=token_hex(4)))

    answer = await gateway.client.put("/system/functions", json=gateway.body(envVars={"N": "2"}))

    assert answer.status_code == 409
    assert "was changed through another gateway at the same moment: try again" in answer.text


async def test_a_hand_over_that_cannot_be_stored_is_tried_again(gateway: Gateway) -> None:
    old = await resident(gateway)
    new = await update(gateway)
    gateway.store.failure = "the disk is full"
    has(gateway, old, new)
    await looked(gateway)
    assert serves(gateway, old)()

    gateway.store.failure = None

    await eventually(serves(gateway, new))


async def test_an_idle_function_is_updated_at_once_and_asks_for_no_copy(gateway: Gateway) -> None:
    old = await gateway.deployed()

    new = await update(gateway)

    assert serves(gateway, new)()
    assert gateway.scheduler.successors == {}
    assert gateway.scheduler.removed == [(old, True)]


class Failed(Functions):
    """Calls of some revisions get an error in place of an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[FunctionId, GpufaasError] = {}
        self.before = asyncio.Event()
        """Set when such a call has got its error."""

    def call(self, grant: Grant, head: CallHead, body: bytes | memoryview) -> Exchange:
        exchange = super().call(grant, head, body)
        if (error := self.errors.get(grant.function)) is not None:

            async def answer() -> tuple[AnswerHead, bytes, bool]:
                self.before.set()
                raise error

            exchange.answer = answer  # type: ignore[method-assign]
        return exchange


async def test_calls_of_a_revision_on_trial_that_does_not_load_are_answered_by_the_one_before(gateway: Gateway) -> None:
    functions = Failed()
    calls = await gateway.calls(functions)
    old = gateway.found().function_id
    new = await update(gateway)
    functions.errors[new] = LoadFailed("no such weights")

    async with calling(calls.run) as client:
        answers = await asyncio.gather(*(client.post("/function/echo", content=b"%d" % each) for each in range(3)))

    assert [(each.status_code, each.content) for each in answers] == [(200, b"0"), (200, b"1"), (200, b"2")]
    assert serves(gateway, old)()
    assert (await shown(gateway))["failed"] == {"revision": revision(new), "reason": "no such weights"}
    assert history(gateway)[revision(new)] == ("failed", "no such weights")


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize(
    "error",
    [LoadFailed("failed 3 times in a row"), OutOfMemory("it had all there is"), NoRoom("others keep it")],
    ids=type,
)
async def test_calls_that_the_scheduler_refuses_for_a_revision_on_trial_are_answered_by_the_one_before(
    gateway: Gateway, error: GpufaasError, later: bool
) -> None:
    """Those that came after its loads had failed got its error, until the gateway looked; so did want of memory."""
    functions = Functions()
    calls, ask = await gateway.calls(functions), functions.place
    old = gateway.found().function_id
    new = await update(gateway)

    def place(call: CallId, function: FunctionId, *args: Any) -> Grant | asyncio.Future[Grant]:
        if function != new:
            return ask(call, function, *args)
        if not later:
            raise error
        refused: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        refused.set_exception(error)
        return refused

    functions.place = place  # type: ignore[method-assign, assignment]
    async with calling(calls.run) as client:
        answer = await client.post("/function/echo", content=b"a body")

    assert (answer.status_code, answer.content) == (200, b"a body")
    assert serves(gateway, old)()
    assert (await shown(gateway))["failed"]["reason"] == str(error)


async def test_a_revision_that_has_answered_is_on_trial_no_more(gateway: Gateway) -> None:
    functions = Failed()
    functions.answer = AnswerHead(200, [], run_s=0.001)
    calls = await gateway.calls(functions)
    new = await update(gateway)

    async with calling(calls.run) as client:
        assert (await client.post("/function/echo")).status_code == 200
        await eventually(lambda: gateway.found().record.handover.before is None)
        functions.errors[new] = LoadFailed("its weights are gone")
        assert (await client.post("/function/echo")).status_code == 502

    assert serves(gateway, new)()


async def test_a_first_deployment_that_does_not_load_answers_with_its_error(gateway: Gateway) -> None:
    functions = Failed()
    calls = await gateway.calls(functions)
    functions.errors[gateway.found().function_id] = LoadFailed("no such weights")

    async with calling(calls.run) as client:
        answer = await client.post("/function/echo")

    assert answer.status_code == 502
    assert "no such weights" in answer.text


async def test_a_call_of_a_revision_that_the_scheduler_removed_first_goes_to_the_next_one(gateway: Gateway) -> None:
    functions = Failed()
    calls = await gateway.calls(functions)
    old = gateway.found().function_id
    functions.errors[old] = UnknownFunction("it was removed")

    async with calling(calls.run) as client:
        answer = asyncio.create_task(client.post("/function/echo", content=b"x"))
        await functions.before.wait()
        await update(gateway)
        assert (await answer).content == b"x"


async def test_a_call_of_a_revision_that_was_removed_is_told_so_when_the_function_goes(gateway: Gateway) -> None:
    functions = Failed()
    calls = await gateway.calls(functions)
    functions.errors[gateway.found().function_id] = UnknownFunction("echo was removed")

    async with calling(calls.run) as client:
        answer = asyncio.create_task(client.post("/function/echo", content=b"x"))
        await functions.before.wait()
        await gateway.delete({"functionName": "echo"})
        assert (await answer).status_code == 404
