"""What a worker has of its own: a uid, secrets, directories; and how a function gets at data of the machine."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.conftest import HTTP, Platform
from tests.waiting import until

LOOKS = """
    import json, os, pwd, tempfile

    def handle(event, context):
        secrets = os.environ["secret_mount_path"], "/var/openfaas/secrets"
        compiled = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        for folder in (compiled, os.environ["GPUFAAS_SCRATCH"], os.environ["HOME"], "/dev/shm", tempfile.gettempdir()):
            with open(f"{folder}/mine", "w") as file:
                file.write("mine")
        found = {
            "uid": os.getuid(), "gid": os.getgid(), "user": pwd.getpwuid(os.getuid()).pw_name,
            "home": os.path.expanduser("~"), "secrets": [open(f"{each}/key").read() for each in secrets],
            "owner": os.stat(f"{secrets[0]}/key").st_uid, "mode": os.stat(f"{secrets[0]}/key").st_mode & 0o777,
            "functions": os.listdir(os.path.dirname(os.path.dirname(compiled))),
        }
        return {"statusCode": 200, "body": found}
"""
READS = """
    import os

    def load(device):
        return open(os.environ["path"]).read()

    def handle(model, event, context):
        return model
"""


@pytest.fixture
def outside() -> Iterator[Path]:
    """A directory of the machine's that all its users may read."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    (folder / "data.txt").write_text("data")
    yield folder
    shutil.rmtree(folder)


def deploy(platform: Platform, name: str) -> str:
    built = platform.build(name, LOOKS, HTTP)
    platform.upload(built)
    spec = {"service": name, "image": "x", "secrets": ["key"], "annotations": {"gpufaas.bundle": built.digest}}
    assert platform.deploy_spec(spec).status_code in (200, 202)
    return f"/function/{name}"


@pytest.mark.skipif(os.geteuid() != 0, reason="functions have uids of their own where the platform is root")
def test_a_function_has_a_uid_with_secrets_and_directories_of_its_own_also_after_a_restart(
    make_platform: Callable[..., Platform],
) -> None:
    first = 1_950_001_000 + 1_000 * (os.getpid() % 100_000)  # no other platform takes it between stop and start
    uids = "--uid-range", f"{first}-{first + 9}"
    platform = make_platform("--device", "cpu:0=400MiB", "--isolation", "best", *uids).start()
    secret = {"name": "key", "namespace": "openfaas-fn", "value": "one"}
    assert platform.http.post("/system/secrets", json=secret).status_code == 201
    found = [platform.call(deploy(platform, name)).json() for name in ("first", "second")]

    said = platform.http.get("/readyz").text
    assert said.startswith("OK\nisolation best: own root, uids ")
    detail = platform.http.get("/system/function/first").json()["gpufaas"]
    assert [f"isolation {each}" for each in detail["isolation"]] == said.splitlines()[1:]
    assert [each["uid"] for each in found] == [first, first + 1]
    for each in found:
        assert each["uid"] == each["gid"] == each["owner"]
        assert (each["user"], each["home"], each["mode"]) == ("function", "/home/function", 0o600)
        assert each["secrets"] == ["one", "one"]
        assert len(each["functions"]) == 1, "another's compiled code is not there"

    assert platform.http.put("/system/secrets", json={**secret, "value": "two"}).status_code in (200, 202)
    assert platform.call("/function/first").json()["secrets"] == ["two", "two"]

    platform.stop()
    platform.start()
    until(lambda: platform.call("/function/second").status_code == 200)
    assert platform.call("/function/second").json()["uid"] == found[1]["uid"]


def test_a_load_that_lacks_a_path_of_the_machine_names_bind_which_opens_it(
    make_platform: Callable[..., Platform], outside: Path
) -> None:
    opened = outside / "opened"
    opened.mkdir(mode=0o755)
    (opened / "data.txt").write_text("data")
    bound = "--bind", str(opened)
    platform = make_platform("--device", "cpu:0=400MiB", "--isolation", "best", *bound).start()
    until(lambda: "ready in" in platform.said())
    if "own root" not in platform.said():
        pytest.skip("workers have no root of their own on this machine")
    failed = platform.call(platform.deploy("reads", READS, env={"path": f"{outside}/data.txt"}))
    assert failed.status_code == 502
    assert f"--bind {outside} shows it to functions" in failed.text
    missing = platform.call(platform.deploy("reads", READS, env={"path": f"{outside}/no.txt"}))
    assert "--bind" not in missing.text
    hidden = platform.call(platform.deploy("reads", READS, env={"path": f"{platform.data}/auth/basic-auth-password"}))
    assert "--bind" not in hidden.text
    assert platform.call(platform.deploy("reads", READS, env={"path": f"{opened}/data.txt"})).text == "data"
