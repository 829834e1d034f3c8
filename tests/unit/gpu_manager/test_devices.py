"""The devices of a node: declared ones, and GPUs through the real NVML binding with a library of ours."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from gpufaas_core.constraints import parse_constraint
from gpufaas_core.cost import Cost
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import NodeId
from gpufaas_core.units import GiB, MiB
from gpufaas_gpu_manager.devices import open_devices
from gpufaas_gpu_manager.machine_memory import available_memory

NODE = NodeId("n")

# Two GPUs of 8 and 16 GiB; process 4242 holds 1 GiB of the first, and 4243 2 GiB of the second, by MPS.
# With MIG, the second one is split: its first and third place have devices of 4 GiB. Only what we call is there.
FAKE_NVML = r"""
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gi, ci; } process_t;
int nvmlInitWithFlags(unsigned f) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { strncpy(s, "550.54/a", n); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(unsigned long)(i + 1); return 0; }
int nvmlDeviceGetMinorNumber(void *h, unsigned *n) {
#ifdef MUTE
    return 3;
#endif
    *n = h == (void *)1 ? 4 : 6; return 0; }
#ifdef MIG
int nvmlDeviceGetGpuInstanceId(void *h, unsigned *n) { *n = (unsigned long)h - 95; return 0; }
int nvmlDeviceGetComputeInstanceId(void *h, unsigned *n) { *n = 0; return 0; }
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *next) {
    if (h == (void *)1) return 3; *now = 1; *next = 0; return 0; }
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *n) { *n = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned i, void **mig) {
    if (i != 0 && i != 2) return 6; *mig = (void *)(unsigned long)(100 + i); return 0; }
#endif
int nvmlDeviceGetMemoryInfo(void *h, memory_t *m) {
    if (h > (void *)99) { m->total = 4ull << 30; m->used = 1ull << 20; m->free = m->total - m->used; return 0; }
    m->total = (unsigned long long)(unsigned long)h * (8ull << 30); m->used = 0; m->free = m->total; return 0; }
int nvmlDeviceGetName(void *h, char *s, unsigned n) {
    strncpy(s, h > (void *)99 ? "Test GPU MIG 1g.4gb" : "Test GPU", n); return 0; }
int nvmlDeviceGetUUID(void *h, char *s, unsigned n) {
    if (h > (void *)99) { strncpy(s, h == (void *)100 ? "MIG-one" : "MIG-three", n); return 0; }
    strncpy(s, h == (void *)1 ? "GPU-one" : "GPU-two", n); return 0; }
static int running(void *h, unsigned *n, process_t *p) {
    if (h == (void *)102) {
        if (*n < 1) { *n = 1; return 7; }
        *n = 1; p->pid = 4244; p->used = 3ull << 30; p->gi = 3; p->ci = 0; return 0; }
    if (h != (void *)1) { *n = 0; return 0; }
    if (*n < 1) { *n = 1; return 7; }
    *n = 1; p->pid = 4242; p->used = 1ull << 30; p->gi = p->ci = 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, process_t *p) { return running(h, n, p); }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *h, unsigned *n, process_t *p) {
    if (h == (void *)1) { *n = 0; return 0; }
    if (*n < 1) { *n = 1; return 7; }
    *n = 1; p->pid = 4243; p->used = 2ull << 30; p->gi = p->ci = 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v2(void *h, unsigned *n, process_t *p) { return running(h, n, p); }
"""


def through_nvml(folder: Path, script: str, *flags: str) -> Any:
    """Run *script* where our library answers as NVML does; return the JSON that it prints."""
    source = folder / "nvml.c"
    source.write_text(FAKE_NVML)
    subprocess.run(["gcc", "-shared", "-fPIC", *flags, "-o", folder / "libnvidia-ml.so.1", source], check=True)
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    found: dict[str, Any] = json.loads(subprocess.run(command, env=env, capture_output=True, check=True).stdout)
    return found


def test_a_cpu_device_is_a_number_and_a_budget() -> None:
    devices = open_devices(["cpu:0=512MiB", "cpu:3=1GiB"], NODE)

    assert [(each.device.id, each.device.kind, each.device.memory) for each in devices] == [
        ("n/cpu:0", "cpu", 512 * MiB),
        ("n/cpu:3", "cpu", GiB),
    ]
    assert all(each.enforced and each.torch_device == "cpu" for each in devices)


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        (["tpu:0=1GiB"], r"'tpu:0=1GiB': write cpu:0=2GiB"),
        (["cpu:0"], "a CPU device needs a budget, for example cpu:0=2GiB"),
        (["cpu:0=lots"], "'lots' is not a memory size"),
        (["cpu:0=0"], "holds no model"),
        (["cpu:0=1GiB", "cpu:0=2GiB"], "cpu:0 is named twice"),
        (["cpu:0=900000GiB"], "this machine has"),
        (["cpu:0=1GiB,cores=none"], "cores=none: write a number from 0.001, for example cores=0.6"),
        (["cpu:0=1GiB,cores=0"], "cores=0: write a number from 0.001"),
        (["cpu:0=1GiB,cores=0.0001"], "cores=0.0001: write a number from 0.001"),
        (["cpu:0=1GiB,cores=1,cores=1"], "cores needs one value: write cores=VALUE, once"),
        (["cpu:0=1GiB,cores=0.5", "cpu:1=1GiB,cores=900"], "cpu:0 with cores=0.5 and cpu:1 with cores=900 is more"),
        (["cpu:0=1GiB,core=1"], "core is no option: did you mean cores[?] Else give the label another name"),
        (["cpu:0=1GiB,mps=off"], "mps is an option of cuda devices: remove it, or give a label another name"),
        (["cpu:0=1GiB,kind=v100"], "kind is an option of emulated devices: remove it"),
        (["cuda:0,mps=perhaps"], "mps=perhaps: write mps=off, or leave it out"),
        (["emulated:0"], r"an emulated device has a size, a kind and a profile: write for example emulated:0=16GiB"),
        (["emulated:0=16GiB,kind=v100"], "an emulated device has a size, a kind and a profile"),
        (["emulated:0=16GiB,kind=,profile=f"], "kind needs one value: write kind=VALUE, once"),
        (["emulated:0=16GiB,kind=v100,profile=f"], "f has no costs on devices of kind v100 .there are: t4"),
        (["emulated:0=16GiB,kind=t4,profile=f", "cpu:0=1GiB"], "it is emulated and others are real"),
    ],
)
def test_a_device_that_makes_no_sense_is_refused_with_what_would(specs: list[str], says: str) -> None:
    with pytest.raises(InvalidSpec, match=says):
        open_devices(specs, NODE, read_costs=lambda _: {"f": {"t4": Cost(1, 1.0, 1.0)}})


def test_a_cpu_device_with_cores_is_of_a_kind_of_its_own_and_says_what_holds_to_them() -> None:
    plain, half = open_devices(["cpu:0=1GiB", "cpu:1=1GiB,cores=.5,rack=1"], NODE, shares_by="cpu-quota")

    assert (plain.device.kind, plain.cores, half.device.kind, half.cores) == ("cpu", 0.0, "cpu-0.5", 0.5)
    labels = half.device.labels
    assert (labels["device.cores"], labels["compute.enforcement"], labels["rack"]) == ("0.5", "cpu-quota", "1")
    assert plain.device.labels["compute.enforcement"] == "none"
    assert not {"cores", "device.cores"} & plain.device.labels.keys()


def test_an_emulated_device_is_named_so_wherever_it_is_seen() -> None:
    costs = {"f": {"*": Cost(1, 1.0, 1.0)}}
    (device,) = open_devices(["emulated:2=16GiB,kind=v100,profile=f,rack=1"], NODE, read_costs=lambda _: costs)

    known = device.device
    assert (known.id, known.kind, known.memory) == ("n/emulated:2", "emulated-v100", 16 * GiB)
    expected = {"device.kind": "emulated", "compute.enforcement": "emulated", "gpu": "true", "rack": "1"}
    assert expected.items() <= known.labels.items()
    assert "kind" not in known.labels


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU here, so these are not the defaults")
def test_without_a_gpu_two_cpu_devices_share_half_of_the_free_memory() -> None:
    devices = open_devices([], NODE)

    assert [each.device.id for each in devices] == ["n/cpu:0", "n/cpu:1"]
    assert sum(each.device.memory for each in devices) == pytest.approx(available_memory() / 2, rel=0.2)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_said_in_one_line() -> None:
    with pytest.raises(InvalidSpec, match="no CUDA device can be used here: NVML says"):
        open_devices(["cuda:0"], NODE)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is needed to build a library that answers as NVML does")
def test_gpus_are_found_and_measured_through_nvml(tmp_path: Path) -> None:
    told = through_nvml(
        tmp_path,
        """
        import json
        from gpufaas_core.errors import InvalidSpec
        from gpufaas_gpu_manager.devices import open_devices
        found = open_devices([], "n")
        limited = open_devices(["cuda:1=2GiB"], "n")[0]
        refusals = []
        for spec in ("cuda:2", "cuda:0=99GiB"):
            try:
                open_devices([spec], "n")
            except InvalidSpec as exc:
                refusals.append(str(exc))
        print(json.dumps({
            "found": [[each.device.id, each.device.kind, each.device.memory, each.uuid] for each in found],
            "limited": [limited.device.id, limited.device.memory],
            "used": [found[0].used_bytes([4242]), found[0].used_bytes([1]), found[1].used_bytes([4242]),
                     found[1].used_bytes([4242, 4243])],
            "refusals": refusals,
            "labels": found[0].device.labels,
            "compiles_for": found[0].compiles_for,
        }))
        """,
    )

    assert told["found"] == [
        ["n/cuda:0", "Test GPU", 8 * GiB - 512 * MiB, "GPU-one"],
        ["n/cuda:1", "Test GPU", 16 * GiB - 512 * MiB, "GPU-two"],
    ]
    assert told["limited"] == ["n/cuda:1", 2 * GiB]
    assert told["used"] == [GiB, 0, 0, 2 * GiB]
    assert told["compiles_for"] == "Test-GPU-driver-550.54-a", "the name of a folder"
    expected = {"gpu": "true", "device.kind": "cuda", "nvidia.com/gpu.product": "Test-GPU", "device.id": "n/cuda:0"}
    assert expected.items() <= told["labels"].items()
    assert "there are 2 GPUs here" in told["refusals"][0]
    assert "that GPU has 8.0 GiB" in told["refusals"][1]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is needed to build a library that answers as NVML does")
def test_a_gpu_that_is_split_stands_for_its_mig_devices(tmp_path: Path) -> None:
    told = through_nvml(
        tmp_path,
        """
        import json
        from gpufaas_gpu_manager.devices import open_devices
        found = open_devices([], "n")
        own = open_devices(["cuda:2=1GiB"], "n")[0]
        print(json.dumps({
            "found": [[each.device.id, each.device.kind, each.device.memory, each.env["CUDA_VISIBLE_DEVICES"]]
                      for each in found],
            "own": [own.device.id, own.uuid, own.total],
            "used": [each.used_bytes([4244]) for each in found],
        }))
        """,
        "-DMIG",
    )

    assert told["found"] == [
        ["n/cuda:0", "Test GPU", 8 * GiB - 512 * MiB, "GPU-one"],
        ["n/cuda:1", "Test GPU MIG 1g.4gb", 4 * GiB - 512 * MiB, "MIG-one"],
        ["n/cuda:2", "Test GPU MIG 1g.4gb", 4 * GiB - 512 * MiB, "MIG-three"],
    ]
    assert told["own"] == ["n/cuda:2", "MIG-three", 4 * GiB]
    assert told["used"] == [0, 0, 3 * GiB]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is needed to build a library that answers as NVML does")
@pytest.mark.parametrize("flag", ["-DNONE", "-DMIG", "-DMUTE"])
def test_the_device_nodes_of_a_gpu_are_its_own_or_all_if_the_driver_does_not_say_which(
    tmp_path: Path, flag: str
) -> None:
    for number, path in (
        (21, "gpu6/mig/gi5"),
        (22, "gpu6/mig/gi5/ci0"),
        (39, "gpu6/mig/gi7"),
        (40, "gpu6/mig/gi7/ci0"),
    ):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "access").write_text(f"DeviceFileMinor: {number}\nDeviceFileMode: 292\n")
    told = through_nvml(
        tmp_path,
        f"""
        import json
        from pathlib import Path
        from gpufaas_gpu_manager import nvml
        nvml._CAPS = Path({str(tmp_path)!r})
        nvml.glob = lambda pattern: [pattern]
        of = nvml.Nvml()
        print(json.dumps([of.nodes(index) for index in range(of.count())]))
        """,
        flag,
    )

    common = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
    caps = "/dev/nvidia-caps/nvidia-cap"
    every = ["/dev/nvidia[0-9]*", "/dev/nvidia-caps/*", "/dev/dxg", *common]
    assert (
        told
        == {
            "-DNONE": [["/dev/nvidia4", *common], ["/dev/nvidia6", *common]],
            "-DMIG": [
                ["/dev/nvidia4", *common],
                ["/dev/nvidia6", f"{caps}21", f"{caps}22", *common],
                ["/dev/nvidia6", f"{caps}39", f"{caps}40", *common],
            ],
            "-DMUTE": [every, every],
        }[flag]
    )


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is needed to build a library that answers as NVML does")
def test_under_strict_a_standby_makes_no_context_whose_threads_landlock_would_not_hold(tmp_path: Path) -> None:
    told = through_nvml(
        tmp_path,
        """
        import json
        from gpufaas_gpu_manager import devices
        found = [devices.open_devices(["cuda:0,mps=off"], "n", standby=1, isolation=each)[0]
                 for each in ("none", "best", "strict")]
        print(json.dumps([[each.contexts, each.device.memory] for each in found]))
        """,
    )

    with_context = [True, 8 * GiB - 1024 * MiB]
    assert told == [with_context, with_context, [False, 8 * GiB - 512 * MiB]]


# --- labels ---


def test_a_device_is_labelled_with_what_it_is_and_where() -> None:
    (device,) = open_devices(["cpu:1=64MiB"], NODE)

    labels = device.device.labels

    assert (labels["node.id"], labels["device.id"], labels["device.kind"], labels["gpu"]) == (
        "n", "n/cpu:1", "cpu", "false",
    )  # fmt: skip
    assert labels["kubernetes.io/hostname"] == labels["node.hostname"] != ""
    assert (labels["node.platform.os"], labels["kubernetes.io/os"]) == ("linux", "linux")
    for key, value in labels.items():
        assert parse_constraint(f"{key}={value}").satisfied_by(labels), "every label can be asked for"


def test_operators_label_all_devices_or_one() -> None:
    devices = open_devices(["cpu:0=64MiB,tier=gold,rack=1", "cpu:1=64MiB"], NODE, ["zone=a"])

    own = [{key: each.device.labels.get(key) for key in ("zone", "tier", "rack")} for each in devices]
    assert own == [{"zone": "a", "tier": "gold", "rack": "1"}, {"zone": "a", "tier": None, "rack": None}]


def test_the_label_of_one_device_goes_before_that_of_all() -> None:
    first, second = open_devices(["cpu:0=64MiB,zone=b", "cpu:1=64MiB"], NODE, ["zone=a"])

    assert (first.device.labels["zone"], second.device.labels["zone"]) == ("b", "a")


@pytest.mark.parametrize(
    ("specs", "labels", "says"),
    [
        ([], ["zone"], "--label: 'zone' is not a label: write KEY=VALUE"),
        ([], ["gpu=true"], "--label: gpu is a label that the platform sets itself"),
        ([], ["zone=a", "zone=b"], "--label: zone is a and b"),
        (["cpu:0=1GiB,zone"], [], "--device cpu:0=1GiB,zone: 'zone' is not a label"),
        (["cpu:0=1GiB,device.id=x"], [], "device.id is a label that the platform sets itself"),
        (["cpu:0,zone=a"], [], "a CPU device needs a budget, for example cpu:0=2GiB"),
    ],
)
def test_a_label_that_makes_no_sense_is_refused(specs: list[str], labels: list[str], says: str) -> None:
    with pytest.raises(InvalidSpec, match=says):
        open_devices(specs, NODE, labels)
