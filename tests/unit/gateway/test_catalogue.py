"""Deploying is all or nothing; finding is by any name that a URL uses."""

import asyncio
import math
import re

import pytest
from msgspec.structs import replace
from tests.unit.gateway.fakes import FakeScheduler, FakeWorkers, MemoryArtifacts, MemorySecrets, MemoryStore

from gpufaas_core.bundle import Kind, Manifest
from gpufaas_core.errors import (
    CorruptArtifact,
    FunctionExists,
    GpufaasError,
    InvalidSpec,
    NoDeviceFits,
    StorageAway,
    StorageFailed,
    UnknownArtifact,
    UnknownFunction,
)
from gpufaas_core.model import Device, DeviceId, FunctionId, Learnt, Need, Profile
from gpufaas_core.units import GiB, MiB
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.keeper import Keeper
from gpufaas_gateway.revision import _why_memory, worker_spec
from gpufaas_gateway.spec import Defaults, FunctionSpec, read_options

ECHO = "echo.openfaas-fn"


class Platform:
    """A catalogue among fakes; `restart` is what a kill and a start leave of it."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.artifacts = MemoryArtifacts()
        self.revisions = (f"r{number}" for number in range(1, 1000))
        self.restart()

    def restart(self) -> None:
        self.workers = FakeWorkers()
        self.scheduler = FakeScheduler()
        self.deployer = Deployer(
            self.store, self.artifacts, self.workers, self.scheduler,
            secrets=MemorySecrets(), clock=lambda: 1000.0, new_revision=self.revisions.__next__,
        )  # fmt: skip
        self.catalogue = self.deployer.catalogue
        self.keeper = Keeper(self.store, self.catalogue)

    def bundle(self, content: bytes = b"bundle", *, kind: Kind = "model", weights: int = 0) -> str:
        digest = self.artifacts.add(content)
        self.workers.bundle(digest, kind=kind, weights=weights)
        return digest

    def spec(self, name: str = "echo", *, bundle: str | None = None, **annotations: str) -> FunctionSpec:
        digest = bundle or self.bundle()
        ours = {f"gpufaas.{key.replace('_', '-')}": value for key, value in annotations.items()}
        return FunctionSpec(service=name, image="echo:1", annotations={"gpufaas.bundle": digest, **ours})

    def state(self) -> object:
        """All that a failed deployment must not have touched."""
        return (
            dict(self.store.records), dict(self.scheduler.functions), dict(self.workers.defined),
            self.catalogue.everywhere(),
        )  # fmt: skip


@pytest.fixture
async def platform() -> Platform:
    platform = Platform()
    await platform.deployer.load()
    return platform


async def test_a_deployed_function_is_found_by_both_forms_of_its_name(platform: Platform) -> None:
    deployed = await platform.deployer.deploy(platform.spec(), update=False)

    assert platform.catalogue.find("echo") is deployed
    assert platform.catalogue.find(ECHO) is deployed
    assert platform.catalogue.find("echo.other") is None
    assert deployed.function_id == "echo.openfaas-fn@r1"
    assert platform.store.records[ECHO].revision == "r1"
    assert platform.scheduler.functions.keys() == {"echo.openfaas-fn@r1"}
    assert platform.workers.checked == ["echo.openfaas-fn@r1"]


async def test_a_model_function_has_its_device_to_itself(platform: Platform) -> None:
    deployed = await platform.deployer.deploy(platform.spec(), update=False)

    assert deployed.compute == 100
    assert platform.workers.defined[deployed.function_id] == deployed.spec
    assert (deployed.spec.kind, deployed.spec.need.slots, deployed.spec.stall_s) == ("model", 1, 60.0)
    assert platform.scheduler.functions[deployed.function_id].need.compute == 100


async def test_a_function_without_a_model_has_slots(platform: Platform) -> None:
    bundle = platform.bundle(kind="http")

    deployed = await platform.deployer.deploy(platform.spec(bundle=bundle), update=False)
    wider = await platform.deployer.deploy(platform.spec("wide", bundle=bundle, slots="64"), update=False)

    assert deployed.compute == 0
    assert (deployed.spec.kind, deployed.spec.need.slots) == ("http", 32)
    assert platform.workers.defined[deployed.function_id] == deployed.spec  # what the node has is the last word
    assert wider.spec.need.slots == 64
    with pytest.raises(InvalidSpec, match=r"gpufaas.slots: 241 calls at once in one process .* over its limit of 240"):
        await platform.deployer.deploy(platform.spec("wider", bundle=bundle, slots="241"), update=False)


async def test_a_function_that_has_only_an_image_runs_where_there_is_an_engine(platform: Platform) -> None:
    platform.workers.containers = True
    annotations = {
        "com.openfaas.ready.http.path": "/ready", "com.openfaas.health.http.path": "/health",
        "com.openfaas.health.http.periodSeconds": "5", "gpufaas.memory": "1GiB",
    }  # fmt: skip
    asked = FunctionSpec(
        "web", "ghcr.io/x/web:2", annotations=annotations, labels={"team": "a"}, env_process="cat",
        limits={"memory": "64Mi", "cpu": "500m"}, read_only_root_filesystem=True,
    )  # fmt: skip

    deployed = await platform.deployer.deploy(asked, update=False)

    spec = deployed.spec
    assert (spec.kind, spec.image, spec.digest) == ("server", "ghcr.io/x/web:2", "image:ghcr.io/x/web:2")
    assert (spec.memory, spec.memory_limit, spec.cpus, spec.read_only) == (64 * MiB, 64 * MiB, 0.5, True)
    assert (spec.ready_path, spec.health_path, spec.health_period_s) == ("/ready", "/health", 5.0)
    assert spec.env["fprocess"] == "cat"
    assert spec.labels == {"team": "a", "faas_function": "web"}
    assert deployed.compute == 0
    assert spec.need.slots == 100


async def test_all_annotations_of_probes_reach_the_node(platform: Platform) -> None:
    platform.workers.containers = True
    given = {
        "ready.http.initialDelay": "1m30s", "ready.http.periodSeconds": "2", "ready.http.timeoutSeconds": "3",
        "ready.http.successThreshold": "4", "ready.http.failureThreshold": "5",
        "health.http.initialDelaySeconds": "6", "health.http.periodSeconds": "7", "health.http.timeoutSeconds": "8",
        "health.http.failureThreshold": "9", "health.http.successThreshold": "1",
    }  # fmt: skip
    annotations = {f"com.openfaas.{name}": text for name, text in given.items()}

    spec = (await platform.deployer.deploy(FunctionSpec("web", "web:2", annotations=annotations), update=False)).spec

    assert (spec.ready_delay_s, spec.ready_period_s, spec.ready_timeout_s, spec.ready_successes) == (90, 2, 3, 4)
    assert (spec.health_delay_s, spec.health_period_s, spec.health_timeout_s, spec.health_failures) == (6, 7, 8, 9)
    assert spec.stall_s == 60 + 90 + 2 * 4, "its start may make no progress while it is not asked"


async def test_0_is_the_default_of_a_probe_and_a_delay_has_a_bound(platform: Platform) -> None:
    platform.workers.containers = True
    given = {
        "ready.http.initialDelay": "9" * 400, "ready.http.periodSeconds": "0", "ready.http.timeoutSeconds": "0",
        "ready.http.successThreshold": "0", "ready.http.failureThreshold": "0", "health.http.path": "",
        "health.http.initialDelaySeconds": "0", "health.http.periodSeconds": "0", "health.http.failureThreshold": "0",
    }  # fmt: skip
    annotations = {f"com.openfaas.{name}": text for name, text in given.items()}

    spec = (await platform.deployer.deploy(FunctionSpec("web", "web:2", annotations=annotations), update=False)).spec

    assert (spec.ready_delay_s, spec.ready_period_s, spec.ready_timeout_s, spec.ready_successes) == (86400, 0, 5, 1)
    assert (spec.health_path, spec.health_delay_s, spec.health_period_s, spec.health_failures) == ("", 0, 10, 3)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("ready.http.path", "ready", "'ready' is not a path"),
        ("ready.http.initialDelay", "soon", "'soon' is not a duration"),
        ("ready.http.initialDelaySeconds", "1m", "'1m' is not a whole number"),
        ("health.http.periodSeconds", "0.1", "'0.1' is not a whole number"),
        ("health.http.timeoutSeconds", "-1", "'-1' is not a whole number"),
        ("health.http.failureThreshold", "", "'' is not a whole number"),
        ("health.http.intialDelay", "2s", "did you mean com.openfaas.health.http.initialDelay?"),
        ("ready.path", "/", "did you mean com.openfaas.ready.http.path?"),
    ],
)
async def test_a_wrong_annotation_of_a_probe_is_refused(platform: Platform, name: str, text: str, said: str) -> None:
    asked = FunctionSpec("web", "web:2", annotations={f"com.openfaas.{name}": text})

    with pytest.raises(InvalidSpec, match=re.escape(said)) as refused:
        await platform.deployer.deploy(asked, update=False)

    assert f"annotation com.openfaas.{name}" in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "weights", "annotations", "limits", "memory"),
    [
        ("model", 100 * MiB, {}, None, 317 * MiB),
        ("http", 0, {}, None, 96 * MiB),
        ("model", 100 * MiB, {"memory": "1GiB"}, None, GiB),
        ("model", 100 * MiB, {}, {"memory": "512Mi"}, 512 * MiB),
        ("model", 100 * MiB, {"memory": "1GiB"}, {"memory": "512Mi"}, GiB),
    ],
)
async def test_the_first_reservation_is_declared_or_derived(
    platform: Platform, kind: str, weights: int, annotations: dict[str, str], limits: dict[str, str], memory: int
) -> None:
    spec = platform.spec(bundle=platform.bundle(kind=kind, weights=weights), **annotations)
    spec = FunctionSpec(spec.service, spec.image, annotations=spec.annotations, limits=limits)

    deployed = await platform.deployer.deploy(spec, update=False)

    assert deployed.spec.memory == memory
    assert sum(each.bytes for each in deployed.spec.weights) == weights
    declared = bool(annotations or limits)
    assert (deployed.function.floor, deployed.function.elastic) == (memory if declared else 0, not declared)
    assert deployed.function.profiles["*"] == Profile(0.5 + weights / 1e9, 0.1, memory)


async def test_all_files_but_code_count_for_the_first_reservation_and_it_says_so(platform: Platform) -> None:
    spec = platform.spec(bundle=platform.bundle(kind="model", weights=100 * MiB))
    digest = spec.annotations["gpufaas.bundle"]
    platform.workers.manifests[digest] = replace(platform.workers.manifests[digest], data_bytes=20 * MiB)

    deployed = await platform.deployer.deploy(spec, update=False)

    assert deployed.spec.memory == (192 + 150) * MiB
    assert deployed.why_memory == (
        "120 MiB of files x 1.25 + 192 MiB; more while there is room; set gpufaas.memory to change it"
    )


async def test_a_worker_that_imports_torch_itself_has_memory_for_that_beside_what_is_declared(
    platform: Platform,
) -> None:
    spec = platform.spec(bundle=platform.bundle(kind="model"), memory="48Mi")
    spec = FunctionSpec(spec.service, spec.image, annotations=spec.annotations, env_vars={"LD_PRELOAD": "x.so"})
    on_gpu = FunctionSpec(
        "gpu", spec.image, annotations={**(spec.annotations or {}), "gpufaas.device": "cuda"}, env_vars=spec.env_vars
    )

    deployed = await platform.deployer.deploy(spec, update=False)

    assert deployed.spec.memory == deployed.function.floor == (48 + 192) * MiB
    assert deployed.why_memory == "declared + 192 MiB: LD_PRELOAD needs a new process, which imports torch"
    options = read_options(on_gpu, Defaults())
    assert worker_spec(deployed.record, options, "model", Need(), 48 * MiB).memory == 48 * MiB, (
        "it is no memory of a GPU"
    )
    why = _why_memory(Manifest("model", "python3-torch"), options, deployed.function, "LD_PRELOAD")
    assert why == "declared; LD_PRELOAD needs a new process, which imports torch"


async def test_annotations_set_limits(platform: Platform) -> None:
    spec = platform.spec(timeout="1m30s", queue="5", max_body="1Mi", load_stall="10s")

    deployed = await platform.deployer.deploy(spec, update=False)

    assert (deployed.timeout_s, deployed.max_body) == (90.0, MiB)
    assert deployed.function.max_queue == 5
    assert deployed.spec.stall_s == 10.0


async def test_exec_timeout_of_stock_stack_files_limits_the_run_and_gpufaas_timeout_all(platform: Platform) -> None:
    bundle = {"gpufaas.bundle": platform.bundle()}
    env = {"exec_timeout": "2m"}

    both = FunctionSpec("both", "i", annotations={**bundle, "gpufaas.timeout": "5s"}, env_vars=env)
    unlimited = FunctionSpec("unlimited", "i", annotations=bundle, env_vars={"exec_timeout": "0"})

    short = FunctionSpec("short", "i", annotations=bundle, env_vars={"exec_timeout": "1s"})
    none = FunctionSpec("none", "i", annotations=bundle)
    specs = (both, unlimited, short, none)
    found = [await platform.deployer.deploy(each, update=False) for each in specs]
    limits = [(each.timeout_s, each.exec_s, each.whole_s) for each in found]
    assert limits == [
        (5.0, 120.0, 5.0), (86_400.0, 86_400.0, math.inf), (60.0, 1.0, math.inf), (60.0, math.inf, 60.0),
    ]  # fmt: skip


async def test_workers_get_the_environment_and_openfaas_variables(platform: Platform) -> None:
    annotations = {"gpufaas.bundle": platform.bundle()}
    spec = FunctionSpec("echo", "i", annotations=annotations, env_vars={"a": "1"}, env_process="python x.py")

    deployed = await platform.deployer.deploy(spec, update=False)

    assert deployed.spec.env == {
        "a": "1", "fprocess": "python x.py", "OPENFAAS_NAME": "echo", "OPENFAAS_NAMESPACE": "openfaas-fn",
    }  # fmt: skip
    assert deployed.record.spec.env_vars == {"a": "1"}


@pytest.mark.parametrize("where", ["labels", "annotations"])
async def test_a_minimum_counts_only_when_it_is_set(platform: Platform, where: str) -> None:
    annotations = {"gpufaas.bundle": platform.bundle()}
    minimum = {"com.openfaas.scale.min": "2"}
    spec = FunctionSpec(
        "echo", "i",
        annotations=annotations | minimum if where == "annotations" else annotations,
        labels=minimum if where == "labels" else None,
    )  # fmt: skip

    deployed = await platform.deployer.deploy(spec, update=False)
    plain = await platform.deployer.deploy(platform.spec("plain"), update=False)

    assert deployed.function.min_copies == 2
    assert plain.function.min_copies == 0


async def test_an_update_takes_over_and_the_old_revision_drains(platform: Platform) -> None:
    old = await platform.deployer.deploy(platform.spec(), update=False)
    old.stats.begun += 1
    old.stats.observe(200, 0.1)

    new = await platform.deployer.deploy(platform.spec(timeout="5s"), update=True)

    assert platform.catalogue.find("echo") is new
    assert platform.scheduler.removed == [(old.function_id, True)]
    assert platform.workers.forgotten == [old.function_id]
    assert new.stats.invocations == 1
    assert new.record.created_at == old.record.created_at


async def test_creating_twice_and_updating_nothing_are_refused(platform: Platform) -> None:
    with pytest.raises(UnknownFunction, match=r"echo.*create it with POST"):
        await platform.deployer.deploy(platform.spec(), update=True)
    await platform.deployer.deploy(platform.spec(), update=False)

    with pytest.raises(FunctionExists, match="update it with PUT"):
        await platform.deployer.deploy(platform.spec(), update=False)


async def test_of_two_creations_at_once_one_wins(platform: Platform) -> None:
    results = await asyncio.gather(
        *(platform.deployer.deploy(platform.spec(), update=False) for _ in range(5)), return_exceptions=True
    )

    assert sum(isinstance(each, FunctionExists) for each in results) == 4
    assert len(platform.scheduler.functions) == 1


async def test_removing_evicts_and_forgets(platform: Platform) -> None:
    deployed = await platform.deployer.deploy(platform.spec(), update=False)

    await platform.deployer.remove("echo", "openfaas-fn")

    assert platform.catalogue.find("echo") is None
    assert platform.catalogue.find(ECHO) is None
    assert platform.store.records == {}
    assert platform.scheduler.removed == [(deployed.function_id, False)]
    assert platform.workers.defined == {}
    assert platform.catalogue.everywhere() == []
    with pytest.raises(UnknownFunction):
        await platform.deployer.remove("echo", "openfaas-fn")


async def test_a_removed_function_that_could_not_be_unstored_is_still_there(platform: Platform) -> None:
    await platform.deployer.deploy(platform.spec(), update=False)
    before = platform.state()
    platform.store.failure = "read-only"

    with pytest.raises(StorageFailed):
        await platform.deployer.remove("echo", "openfaas-fn")

    assert platform.state() == before


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("define", CorruptArtifact("bundle is damaged")),
        ("define", UnknownArtifact("no weights")),
        ("check", InvalidSpec("ImportError: no module named x")),
        ("store", StorageFailed("full")),
        ("scheduler", GpufaasError("the scheduler is not there")),
        ("devices", NoDeviceFits("too large")),
    ],
)
async def test_a_deployment_that_fails_leaves_everything_as_it_was(
    platform: Platform, update: bool, where: str, error: GpufaasError
) -> None:
    if update:
        await platform.deployer.deploy(platform.spec(), update=False)
    spec = platform.spec()
    before = platform.state()
    match where:
        case "define":
            platform.workers.define_failure = error
        case "check":
            platform.workers.check_failure = error
        case "store":
            platform.store.failure = str(error)
        case "scheduler":
            platform.scheduler.failure = error
        case "devices":
            platform.workers.joined = [Device(DeviceId("n1/cpu:0"), "cpu", MiB)]

    with pytest.raises(type(error)):
        await platform.deployer.deploy(spec, update=update)

    assert platform.state() == before


async def test_the_old_revision_answers_while_the_new_one_is_checked(platform: Platform) -> None:
    old = await platform.deployer.deploy(platform.spec(), update=False)
    seen: list[object] = []
    platform.workers.during_check = lambda: seen.append(platform.catalogue.find("echo"))

    await platform.deployer.deploy(platform.spec(), update=True)

    assert seen == [old]


async def test_a_model_larger_than_any_device_is_refused_with_the_sizes(platform: Platform) -> None:
    platform.workers.joined = [
        Device(DeviceId("n1/cpu:0"), "cpu", 1 * GiB), Device(DeviceId("n1/cpu:1"), "cpu", 2 * GiB),
    ]  # fmt: skip

    with pytest.raises(NoDeviceFits, match=r"echo needs 4.0 GiB \(declared\).*n1/cpu:1\) has 2.0 GiB.*gpufaas.memory"):
        await platform.deployer.deploy(platform.spec(memory="4GiB"), update=False)


async def test_what_was_measured_counts_more_than_what_is_declared(platform: Platform) -> None:
    bundle = platform.bundle()
    platform.store.save_profile(bundle, "cpu", Profile(1.0, 0.1, 3 * GiB, measured=True))

    with pytest.raises(NoDeviceFits, match=r"needs 3.0 GiB \(measured\)"):
        await platform.deployer.deploy(platform.spec(bundle=bundle, memory="1GiB"), update=False)


async def test_costs_that_were_learnt_are_those_of_the_same_environment_and_share(platform: Platform) -> None:
    bundle = platform.bundle()
    small = replace(platform.spec("small", bundle=bundle), env_vars={"MODEL": "small"})
    large = replace(platform.spec("large", bundle=bundle), env_vars={"MODEL": "large"})
    third = platform.spec("third", bundle=bundle, sharing="share", compute="30")
    learnt = await platform.deployer.deploy(large, update=False)
    too_much = Profile(9.0, 5.0, 900 * GiB, measured=True)
    platform.keeper.learn(Learnt(learnt.function_id, "cpu", too_much))
    await platform.keeper.save()

    for spec in (small, third, platform.spec("plain", bundle=bundle)):
        deployed = await platform.deployer.deploy(spec, update=False)
        assert not deployed.function.profile("cpu").measured, f"{deployed.name} is another one, of the same bundle"
    with pytest.raises(NoDeviceFits, match=r"needs 900.0 GiB \(measured\)"):
        await platform.deployer.deploy(replace(large, service="again"), update=False)


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        ({"gpufaas.memroy": "1Gi"}, "gpufaas.memroy is not known: did you mean gpufaas.memory"),
        ({"gpufaas.memory": "lots"}, "annotation gpufaas.memory: 'lots' is not a memory size"),
        ({"gpufaas.memory": "0"}, "annotation gpufaas.memory: '0' must be more"),
        ({"gpufaas.timeout": "soon"}, "annotation gpufaas.timeout: 'soon' is not a duration"),
        ({"gpufaas.load-stall": "-1s"}, "annotation gpufaas.load-stall: '-1s' is not a duration"),
        ({"gpufaas.queue": "0"}, "annotation gpufaas.queue: '0' must be at least 1"),
        ({"gpufaas.queue": "many"}, "annotation gpufaas.queue: 'many' is not a whole number"),
        ({"gpufaas.max-body": "1.5.2"}, "annotation gpufaas.max-body: '1.5.2' is not"),
        ({"gpufaas.slots": "5000"}, "annotation gpufaas.slots: '5000' is over the limit"),
        ({"gpufaas.bundle": "abc"}, "annotation gpufaas.bundle: 'abc' is not a sha256"),
        ({"gpufaas.bundle": "0" * 64}, "no bundle 0{64} was uploaded"),
        ({"com.openfaas.scale.min": "-1"}, "annotation com.openfaas.scale.min: '-1' is not a whole"),
    ],
)
async def test_bad_annotations_are_named(platform: Platform, annotations: dict[str, str], message: str) -> None:
    spec = platform.spec()
    spec = FunctionSpec(spec.service, spec.image, annotations={**(spec.annotations or {}), **annotations})

    with pytest.raises(InvalidSpec, match=message):
        await platform.deployer.deploy(spec, update=False)

    assert platform.catalogue.everywhere() == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"service": "Echo"}, "service: 'Echo' is not a function name"),
        ({"service": "a.b"}, "service: 'a.b' is not"),
        ({"service": "x" * 64}, "at most 63"),
        ({"service": "../../etc"}, "is not a function name"),
        ({"service": "echo\n"}, "is not a function name"),
        ({"annotations": None}, "only an image .*no Docker engine"),
        ({"namespace": "dev"}, "namespace: 'dev' does not exist: .* or 'gpufaas namespace create'"),
        ({"secrets": ("key",)}, "secrets: 'key' does not exist in openfaas-fn: .* or 'gpufaas secret create'"),
        ({"env_vars": {"a=b": "1"}}, "envVars: 'a=b' is not a name"),
        ({"env_vars": {"a": "\0"}}, "envVars a: the value contains a NUL"),
        ({"env_vars": {"exec_timeout": "later"}}, "envVars exec_timeout: 'later' is not a duration"),
        ({"limits": {"memory": "big"}}, "limits.memory: 'big' is not a memory size"),
        ({"limits": {"cpu": "many"}}, "limits.cpu: 'many' is not a number of cores"),
        ({"image": "", "annotations": None}, "image: '' is not the name of an image"),
        ({"annotations": {"com.openfaas.ready.http.path": "x y"}}, "com.openfaas.ready.http.path: 'x y' is not a path"),
        ({"labels": {"com.openfaas.scale.min": "two"}}, "label com.openfaas.scale.min: 'two'"),
    ],
)
async def test_bad_fields_are_named(platform: Platform, fields: dict[str, object], message: str) -> None:
    given = {"service": "echo", "image": "i", "annotations": platform.spec().annotations, **fields}

    with pytest.raises(InvalidSpec, match=message):
        await platform.deployer.deploy(FunctionSpec(**given), update=False)  # type: ignore[arg-type]

    assert platform.catalogue.everywhere() == []


# --- restarts ---


async def test_after_a_restart_everything_is_deployed_again(platform: Platform) -> None:
    bundle = platform.bundle()
    before = await platform.deployer.deploy(platform.spec(bundle=bundle, memory="1GiB"), update=False)
    platform.store.save_profile(bundle, "cpu", Profile(1.0, 0.1, 300 * MiB, measured=True))
    platform.restart()
    platform.workers.bundle(bundle)

    assert not platform.catalogue.loaded
    await platform.deployer.load()

    assert platform.catalogue.loaded
    after = platform.catalogue.find("echo")
    assert after is not None
    assert after.function_id == before.function_id
    assert after.spec == before.spec
    assert platform.scheduler.functions[after.function_id].profiles["cpu"].occupation == 300 * MiB
    assert platform.workers.checked == []  # it was checked when it was deployed


async def test_an_upload_that_no_node_has_heard_of_yet_is_no_fault_of_the_authors(platform: Platform) -> None:
    uploaded = platform.bundle(b"new")
    platform.workers.define_failure = UnknownArtifact(f"artifact {uploaded} is on no node and in no object store")

    with pytest.raises(StorageAway, match=f"{uploaded} was uploaded, but no node finds it yet"):
        await platform.deployer.deploy(platform.spec("new", bundle=uploaded), update=False)


async def test_a_damaged_function_is_listed_with_the_reason_and_the_others_answer(platform: Platform) -> None:
    lost = platform.bundle(b"lost")
    kept = platform.bundle(b"kept")
    await platform.deployer.deploy(platform.spec("lost", bundle=lost), update=False)
    await platform.deployer.deploy(platform.spec("kept", bundle=kept), update=False)
    platform.restart()
    platform.workers.bundle(kept)

    await platform.deployer.load()

    broken, whole = platform.catalogue.find("lost"), platform.catalogue.find("kept")
    assert broken is not None
    assert whole is not None
    assert broken.unavailable == f"no bundle {lost} here: upload it"
    assert whole.unavailable is None
    assert platform.scheduler.functions.keys() == {whole.function_id}


async def test_a_damaged_function_is_mended_by_deploying_it_or_removed(platform: Platform) -> None:
    bundle = platform.bundle()
    for name in ("mended", "removed"):
        await platform.deployer.deploy(platform.spec(name, bundle=bundle), update=False)
    platform.restart()
    await platform.deployer.load()
    platform.workers.bundle(bundle)

    mended = await platform.deployer.deploy(platform.spec("mended", bundle=bundle), update=True)
    await platform.deployer.remove("removed", "openfaas-fn")

    assert mended.unavailable is None
    assert platform.scheduler.functions.keys() == {mended.function_id}
    assert platform.scheduler.removed == []  # what the scheduler never knew is not taken from it


async def test_counts_survive_restarts_and_updates(platform: Platform) -> None:
    bundle = platform.bundle()
    deployed = await platform.deployer.deploy(platform.spec(bundle=bundle), update=False)
    for _ in range(3):
        deployed.stats.begun += 1
        deployed.stats.observe(200, 0.1)
    await platform.keeper.save()
    await platform.keeper.save()
    assert platform.store.records[ECHO].invocations == 3
    platform.restart()
    platform.workers.bundle(bundle)
    await platform.deployer.load()

    again = platform.catalogue.find("echo")

    assert again is not None
    again.stats.observe(200, 0.1)
    assert again.stats.invocations == 4
    await platform.keeper.save()
    assert platform.store.records[ECHO].invocations == 4


async def test_learnt_profiles_are_kept_for_the_bundle(platform: Platform) -> None:
    deployed = await platform.deployer.deploy(platform.spec(), update=False)
    profile = Profile(1.0, 0.1, 300 * MiB, measured=True)

    platform.keeper.learn(Learnt(deployed.function_id, "cpu", profile))
    platform.keeper.learn(Learnt(FunctionId("gone.openfaas-fn@r0"), "cpu", profile))
    await platform.keeper.save()

    assert deployed.profiles == {"cpu": profile}
    assert platform.store.known_profiles == {(deployed.spec.digest, "cpu"): profile}


async def test_what_could_not_be_saved_is_saved_at_the_end(platform: Platform) -> None:
    deployed = await platform.deployer.deploy(platform.spec(), update=False)
    deployed.stats.observe(200, 0.1)
    platform.store.failure = "the disk is full"
    with pytest.raises(StorageFailed):
        await platform.keeper.save()
    platform.store.failure = None

    stopped = asyncio.Event()
    keeping = asyncio.create_task(platform.keeper.keep(stopped, every_s=3600))
    await asyncio.sleep(0)
    stopped.set()
    await keeping

    assert platform.store.records[ECHO].invocations == 1


async def test_a_full_disk_does_not_end_the_keeping(platform: Platform, caplog: pytest.LogCaptureFixture) -> None:
    deployed = await platform.deployer.deploy(platform.spec(), update=False)
    deployed.stats.observe(200, 0.1)
    platform.store.failure = "the disk is full"

    stopped = asyncio.Event()
    keeping = asyncio.create_task(platform.keeper.keep(stopped, every_s=3600))
    await asyncio.sleep(0)
    stopped.set()
    await keeping

    assert "not saved, will be tried again: the disk is full" in caplog.text
