"""
What a worker found in memory when it started was wrong, and nothing said so: random numbers that other workers had,
too, modules of the directory in which the platform had been started, and no time zone of its own.
"""

import os
import signal
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.test_layers import LayerRig
from tests.waiting import eventually

PATHS = """
    import os, sys
    def load(device):
        return None
    def handle(model, event, context):
        import http
        return {"path": sys.path, "http": http.__file__, "torch": "torch" in sys.modules, "server": os.getppid()}
"""


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


async def test_nothing_is_imported_from_the_directory_in_which_the_platform_was_started(
    elsewhere: LayerRig, tmp_path: Path
) -> None:
    plain = await elsewhere.first(await elsewhere.preloading("plain", (), PATHS))
    layered = await elsewhere.first(await elsewhere.preloading("layered", ("colorsys",), PATHS))

    assert plain["torch"]
    assert plain["server"] != layered["server"]
    for said, name in ((plain, "plain"), (layered, "layered")):
        assert said["path"][:3] == [str(tmp_path / name / part) for part in ("function", "site")] + [
            str(tmp_path / "installed")
        ]
        assert not {"", ".", str(tmp_path / "here")} & set(said["path"])
        assert not said["http"].startswith(str(tmp_path))
    assert elsewhere.said == []


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
    import multiprocessing, os, random, sys
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
        return {"first": first, "own": own, "server": os.getppid()}
"""


async def test_no_two_workers_draw_the_same_numbers_however_they_were_made_and_an_authors_seed_counts(
    elsewhere: LayerRig, tmp_path: Path
) -> None:
    (tmp_path / "installed" / "chancy.py").write_text(textwrap.dedent(CHANCY))
    rig, said = elsewhere, []
    pools = rig.node.host.standbys, lambda: rig.node.host.layers.all()[0].standbys
    for name, preload in (("plain", ()), ("layered", ("chancy",))):
        functions = [await rig.preloading(f"{name}{number}", preload, DRAWS) for number in range(2)]
        for function in functions:  # a standby each, and of a layer at first a fork
            said.append(await rig.first(function))
            await rig.end(function)
        pool = pools[0] if not preload else pools[1]()
        await eventually(lambda pool=pool: pool.pids)
        said.append(await rig.first(functions[0]))
        pool.close()  # from now on workers are forked
        await rig.end(functions[0])
        said.append(await rig.first(functions[0]))
        await rig.end(functions[0])
        assert pool.taken
    first = rig.node.host.fork_server
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: rig.node.host.fork_server != first)
    said.append(await rig.first(await rig.preloading("later", (), DRAWS)))

    assert len({each["server"] for each in said}) == 3
    for what in {key for each in said for key in each["first"]}:
        drawn = [str(each["first"][what]) for each in said if what in each["first"]]
        assert len(drawn) == len(set(drawn)) >= 4, what
    assert len({str(each["own"]) for each in said}) == 1
