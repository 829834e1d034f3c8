"""
What a worker found in memory when it started was wrong, and nothing said so: random numbers that other workers had,
too, modules of the directory in which the platform had been started, and no time zone of its own.
"""

import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.integration.conftest import Platform
from tests.integration.test_layers import LayerRig
from tests.waiting import eventually

from gpufaas_core.errors import OutOfMemory
from gpufaas_core.messages import Loaded
from gpufaas_core.units import MiB


@pytest.fixture
async def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LayerRig]:
    """A node with a fork server of its own, in a directory whose modules raise. The operator has a PYTHONPATH."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("http", "random", "colorsys"):
        (here / f"{name}.py").write_text("raise ImportError('planted')")
    (tmp_path / "installed").mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'installed'}:")
    rig = LayerRig(tmp_path, "auto", 1)
    await rig.node.start()
    yield rig
    await rig.node.close()


CHANCY = """
    import random, numpy, torch
    generators = {
        "python": random.Random(7), "numpy": numpy.random.default_rng(7), "legacy": numpy.random.RandomState(7),
        "torch": torch.Generator(),
    }
    generators["legacy"].standard_normal()  # the second half of a pair is kept
    class Holder:
        def __init__(self):
            self.own = random.Random(7)
    holder = Holder()
"""
DRAWS = """
    import http, multiprocessing, os, random, sys
    import numpy, torch
    first = {
        "python": random.random(), "numpy": numpy.random.random(), "torch": torch.rand(1).item(),
        "spawned": numpy.random.mtrand._rand._bit_generator.seed_seq.generate_state(1).tolist(),
        "key": multiprocessing.current_process().authkey.hex(),
    }
    torch.manual_seed(1)
    numpy.random.seed(1)
    def load(device):
        if "chancy" in sys.modules:
            import chancy
            of = chancy.generators
            first.update({
                "kept python": of["python"].random(), "kept numpy": of["numpy"].random(),
                "kept legacy": of["legacy"].standard_normal(), "its next": of["legacy"].random(),
                "kept torch": torch.rand(1, generator=of["torch"]).item(), "held": chancy.holder.own.random(),
                "kept spawned": of["numpy"].spawn(1)[0].random(),
            })
        return first
    def handle(model, event, context):
        own = [torch.rand(1).item(), numpy.random.random()]
        return {"first": first, "own": own, "server": os.getppid(), "path": sys.path, "http": http.__file__}
"""


@pytest.mark.slow
async def test_no_two_workers_draw_the_same_and_none_imports_from_where_the_platform_was_started(
    elsewhere: LayerRig, tmp_path: Path
) -> None:
    (tmp_path / "installed" / "chancy.py").write_text(textwrap.dedent(CHANCY))
    rig, said = elsewhere, []
    for name, preload in (("plain", ()), ("layered", ("chancy", "colorsys"))):
        function = await rig.preloading(name, preload, DRAWS)
        said.append(await rig.first(function))  # from a standby, or a fork of the layer
        await rig.end(function)
        rig.node.host.standbys.close()  # from now on workers are forked
        said.append(await rig.first(function))
    assert rig.node.host.standbys.taken

    assert len({each["server"] for each in said}) == 2
    for what in {key for each in said for key in each["first"]}:
        drawn = [str(each["first"][what]) for each in said if what in each["first"]]
        assert len(drawn) == len(set(drawn)) >= 2, what
    assert len({str(each["own"]) for each in said}) == 1, "the author's seed counts"
    for each, name in zip(said, ("plain", "plain", "layered", "layered"), strict=True):
        own = [str(tmp_path / name / part) for part in ("function", "site")]
        assert each["path"][:3] == [*own, str(tmp_path / "installed")]
        assert not {"", ".", str(tmp_path / "here")} & set(each["path"])
        assert not each["http"].startswith(str(tmp_path))
    assert rig.said == []


SEES = """
    import ctypes, faulthandler, os, sys, time, warnings
    import numpy, torch
    zone = time.strftime("%Z")
    def load(device):
        return None
    def handle(model, event, context):
        if event.text == "takes":
            return str(len(bytearray(300 << 20)))
        print("printed in the call")
        assert event.text == "x"
        blas = ctypes.CDLL(next(each.split()[-1] for each in open("/proc/self/maps") if "openblas" in each))
        return {
            "zone": zone, "path": sys.path, "filter": [str(each) for each in warnings.filters[0]], "hash": hash("word"),
            "tells faults": faulthandler.is_enabled(),
            "writes": not sys.dont_write_bytecode, "torch": torch.get_num_threads(), "optimize": sys.flags.optimize,
            "numpy": blas.scipy_openblas_get_num_threads64_(), "environment": dict(os.environ), "pid": os.getpid(),
            "session": os.getsid(0), "server": os.getppid(), "group": open("/proc/self/cgroup").read(),
            "allocator": torch._C._accelerator_getAllocatorSettings(),
            "began with": open("/proc/self/environ").read(), "open": len(os.listdir("/proc/self/fd")),
        }
"""


async def start(rig: LayerRig, name: str, env: dict[str, str], body: bytes = b"x") -> dict[str, Any]:
    function = await rig.preloading(name, (), SEES, env)
    status, said = await rig.call(rig.grant(function, cold=True, memory=300 * MiB), body)
    assert status == 200, said
    found: dict[str, Any] = msgspec.json.decode(said)
    await rig.end(function)
    return found


async def test_a_forked_worker_obeys_its_environment_as_a_process_that_starts_with_it(
    rig: LayerRig, tmp_path: Path
) -> None:
    env = {
        "TZ": "Asia/Tokyo", "PYTHONPATH": f"{tmp_path}/more:beside:", "PYTHONWARNINGS": "ignore,error::BytesWarning",
        "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "3", "PYTHON_LEVEL": "ours",
        "PYTHONFAULTHANDLER": "1", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": "x:1",
    }  # fmt: skip
    said = await start(rig, "given", env)
    plain = await start(rig, "plain", {"TZ": "Nowhere/Land", "OPENBLAS_NUM_THREADS": "2"})

    assert said["zone"] == "JST"
    folders = [str(tmp_path / "given" / each) for each in ("function", "site")]
    assert said["path"][:4] == [*folders, f"{tmp_path}/more", f"{folders[0]}/beside"]
    assert said["filter"][:3:2] == ["error", "<class 'BytesWarning'>"]
    assert plain["filter"] != said["filter"]
    assert (said["tells faults"], plain["tells faults"]) == (True, False)
    assert (said["writes"], plain["writes"]) == (False, True)
    assert said["environment"].items() >= env.items()
    assert (said["allocator"], plain["allocator"]) == ("max_split_size_mb:64", "expandable_segments:True")
    own, platforms = rig.node.host.recipes._threads, plain["torch"]
    assert (said["torch"], platforms) == (3, own)
    assert said["environment"]["MKL_NUM_THREADS"] == "3"
    assert (said["numpy"], plain["numpy"]) == (3, 2), "its library was loaded before the fork"
    assert (plain["environment"]["OMP_NUM_THREADS"], plain["environment"]["OPENBLAS_NUM_THREADS"]) == (f"{own}", "2")
    assert plain["zone"] != "JST"
    await eventually(lambda: any("there is no time zone 'Nowhere/Land' here" in each for each in rig.logs.lines))
    assert said["server"] == plain["server"] == rig.node.host.fork_server.pid
    assert "Asia/Tokyo" not in said["began with"]


@pytest.mark.slow
async def test_a_worker_is_a_process_of_its_own_where_a_fork_cannot_obey(rig: LayerRig, tmp_path: Path) -> None:
    env = {
        "PYTHONHASHSEED": "7", "PYTHONOPTIMIZE": "1", "MALLOC_ARENA_MAX": "1", "TZ": "Asia/Tokyo",
        "PYTHONPATH": f"{tmp_path}/more", "OMP_NUM_THREADS": "2", "LD_PRELOAD": "./libplanted.so",
    }  # fmt: skip
    own, plain = await rig.preloading("own", (), SEES, env), await rig.preloading("plain", (), SEES)
    await rig.check(own)
    with pytest.raises(OutOfMemory):
        await rig.call(rig.grant(own, cold=True, memory=300 * MiB), b"takes")
    (loaded,) = rig.facts_of(Loaded)
    said, forks = [
        msgspec.json.decode((await rig.call(grant, b"x"))[1])
        for grant in (rig.grant(own, memory=300 * MiB), rig.grant(plain, cold=True, memory=50 * MiB))
    ]

    fresh = subprocess.run(
        [sys.executable, "-c", "print(hash('word'))"], env={"PYTHONHASHSEED": "7"}, capture_output=True, check=True
    )
    assert said["hash"] == int(fresh.stdout)
    assert (said["optimize"], said["zone"], said["torch"], said["numpy"]) == (1, "JST", 2, 2)
    assert said["path"][2] == f"{tmp_path}/more"
    assert said["environment"].items() >= env.items()
    assert "MALLOC_ARENA_MAX=1" in said["began with"]
    assert rig.node.host.standbys.taken == rig.node.host.standbys.size, "by the one that is forked"
    assert 100 * MiB < loaded.occupation < 250 * MiB, "the private memory of torch is its own"  # type: ignore[attr-defined]
    for each in (said, forks):
        assert each["server"] == rig.node.host.fork_server.pid
        assert each["session"] == each["pid"]
    assert said["open"] == forks["open"], "nothing of the fork server is open in it"
    ours = Path("/proc/self/cgroup").read_text()
    assert (said["group"] == ours) == (forks["group"] == ours)
    await eventually(lambda: rig.logs.lines.count("printed in the call") == 2)
    assert any("libplanted.so" in each for each in rig.logs.lines), "the loader says that it is not there"
    assert "GPUFAAS_" not in said["began with"], "with the mark, a child could write lines for other calls"


@pytest.mark.slow
@pytest.mark.long
def test_a_deployment_with_such_variables_has_the_memory_and_says_why(platform: Platform) -> None:
    source = """
        import sys, numpy, torch
        def load(device):
            return torch.ones(1000, 1000)
        def handle(model, event, context):
            assert False
            return f"{sys.flags.optimize} {(model @ model)[0, 0]:g}"
    """
    path = platform.deploy("own", source, env={"PYTHONOPTIMIZE": "2"}, memory="48Mi")
    answer = platform.call(path)
    shown = platform.http.get("/system/function/own").json()["gpufaas"]

    assert (answer.status_code, answer.text) == (200, "2 1000")
    assert shown["memoryReason"] == "declared + 192 MiB: PYTHONOPTIMIZE needs a new process, which imports torch"
    assert platform.http.get("/system/status").json()["devices"][0]["used"] < 300 * MiB


READS = """
    import os
    names, find = set(), os._Environ.__getitem__
    def noted(environ, name):
        names.add(name)
        return find(environ, name)
    os._Environ.__getitem__ = noted
    import numpy, torch, safetensors.torch
    from gpufaas_core.start_env import own_process
    print(len(names), *(each for each in names if "TORCH" in each and not own_process({each: "1"})))
"""


@pytest.mark.slow
@pytest.mark.long
def test_every_variable_that_torch_reads_when_it_is_imported_needs_a_process_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(READS)], env={}, capture_output=True, check=True)

    count, *unknown = done.stdout.decode().split()
    assert int(count) > 40
    assert unknown == []
