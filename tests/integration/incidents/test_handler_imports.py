"""
A handler that imports the module beside it as OpenFaaS's templates do could not be deployed, and a model that was saved
in a training script could not be loaded: `__main__` of a worker was the fork server.
"""

from pathlib import Path

import msgspec
import pytest
import torch
from tests.integration.test_layers import LayerRig
from tests.waiting import eventually

from gpufaas_core.units import MiB

HANDLER = """
    import multiprocessing, os, sys
    from pathlib import Path
    import torch
    from torch import nn
    from .helper import shout
    from function import helper

    class Net(nn.Linear):
        pass

    def load(device):
        import helper as same
        assert same is helper and shout is same.shout and helper.runs == 1
        return torch.load(Path(__file__).with_name("model.pt"), weights_only=False)

    def of_child(text):
        import __main__
        return helper.shout(text), __main__.Net is Net, helper.runs

    def handle(model, event, context):
        if event.text == "fail":
            from .broken import lost
        if event.text == "other":
            import pickle
            pickle.loads(b"c__main__\\nLost\\n.")
        assert isinstance(model, Net)
        method = "spawn" if event.text == "spawn" else "fork"
        with multiprocessing.get_context(method).Pool(1) as pool:
            return {"child": pool.apply(of_child, ("a",)), "server": os.getppid(), "seed": sys.flags.hash_randomization}
"""
HELPER = """
runs = globals().get("runs", 0) + 1
def shout(text):
    return text.upper() + "!"
"""


class Net(torch.nn.Linear):
    """Of the training script."""


@pytest.mark.slow
async def test_each_kind_of_worker_has_the_modules_beside_the_handler_and_the_handler_as_main(
    rig: LayerRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Net, "__module__", "__main__")
    monkeypatch.setattr("__main__.Net", Net, raising=False)
    said, servers = [], set()
    for name, preload, env in (("plain", (), {}), ("layered", ("colorsys",), {}), ("own", (), {"PYTHONHASHSEED": "0"})):
        function = await rig.preloading(name, preload, HANDLER, env)
        folder = tmp_path / name / "function"
        (folder / "helper.py").write_text(HELPER)
        (folder / "broken.py").write_text("raise KeyError('in broken')")
        torch.save(Net(1, 1), folder / "model.pt")
        if name == "plain":
            await rig.check(function)
        memory, how = (390 * MiB, b"spawn") if name == "plain" else (300 * MiB, b"")
        status, body = await rig.call(rig.grant(function, cold=True, memory=memory), how)
        assert status == 200, body
        said.append(msgspec.json.decode(body))
        assert said[-1]["child"] == ["A!", True, 1]
        servers.add(said[-1]["server"])
        assert (await rig.call(rig.grant(function), b"other"))[1] == (
            b"AttributeError: Can't get attribute 'Lost' on <module '__main__', which has what handler.py has: define "
            b"or import it there>"
        )
        assert (await rig.call(rig.grant(function), b"fail"))[1] == b"KeyError: 'in broken'"
        await rig.end(function)
        if name == "plain":
            assert rig.node.host.standbys.taken
            rig.node.host.standbys.close()  # from now on workers are forked

    assert len(servers) == 2, "one worker came from a layer"
    assert [each["seed"] for each in said] == [1, 1, 0], "the last one is a process of its own"
    await eventually(lambda: any("in broken" in each for each in rig.logs.lines))
    assert not any("import_handler" in each for each in rig.logs.lines)
