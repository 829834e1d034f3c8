"""From the template python3-torch-image to a container that answers: built by our CLI in a real engine, no torch."""

import json
import os
import secrets
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

HANDLER = """
    import os
    from pathlib import Path

    here = Path(__file__).parent

    def load(device):
        print("loading on", device, flush=True)
        return (here / "weights").read_text()

    def handle(model, event, context):
        if event.path == "/secret":
            return (Path(os.environ["secret_mount_path"]) / "key").read_bytes()
        if event.path == "/stream":
            return (f"{number}," for number in range(3))
        print("answers", event.text)
        return {
            "model": model, "said": event.text, "device": context.device, "user": os.getuid(),
            "function": context.function, "memory": os.environ["GPUFAAS_DEVICE_MEMORY"],
        }
"""
STACK = """
    provider: {name: openfaas}
    functions:
      NAME:
        lang: python3-torch-image
        handler: ./NAME
        image: IMAGE
        build_args: {BASE: "BASE-IMAGE", TORCH: ""}
        secrets: [key]
        limits: {memory: 128Mi}
"""


class Project:
    """A stack file with one function, and the CLI to deploy it."""

    def __init__(self, platform: Any, folder: Path, base: str) -> None:
        self.platform, self.folder = platform, folder
        self.name = f"img-{secrets.token_hex(3)}"
        self.image = f"{self.name}:1"
        stack = (
            textwrap.dedent(STACK).replace("NAME", self.name).replace("BASE-IMAGE", base).replace("IMAGE", self.image)
        )
        self.stack = folder / "stack.yaml"
        self.stack.write_text(stack)
        (folder / self.name).mkdir()
        (folder / self.name / "handler.py").write_text(textwrap.dedent(HANDLER))
        (folder / self.name / "requirements.txt").write_text("msgspec\n")
        (folder / self.name / "build.py").write_text("open('weights', 'w').write('made while building')\n")

    def run(self, command: str, *more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "gpufaas_cli", command, "-f", str(self.stack), *more],
            cwd=self.folder, capture_output=True, text=True, check=False,
            env={**os.environ, "OPENFAAS_URL": self.platform.url, "DOCKER_BUILDKIT": "0"},
        )  # fmt: skip


@pytest.fixture
def project(python_image: str, make_platform: Callable[..., Any], tmp_path: Path) -> Iterator[Project]:
    platform = make_platform("--functions", "docker", "--device", "cpu:0=512MiB").start()
    platform.http.post("/system/secrets", json={"name": "key", "value": "s3cret"}).raise_for_status()
    project = Project(platform, tmp_path, python_image)
    yield project
    platform.stop()
    subprocess.run(["docker", "rmi", "-f", project.image], check=False, capture_output=True)


@pytest.mark.slow  # an image is built
def test_a_function_of_the_template_is_built_deployed_called_and_asks_for_a_gpu(project: Project) -> None:
    done = project.run("up")
    assert done.returncode == 0, done.stdout + done.stderr
    http, name = project.platform.http, project.name

    first = http.post(f"/function/{name}/path", content=b"hello")

    assert first.status_code == 200, first.text
    assert first.json() == {
        "model": "made while building", "said": "hello", "device": "cpu", "user": 1000,
        "function": f"{name}.openfaas-fn", "memory": str(128 * 2**20),
    }  # fmt: skip
    assert first.headers["x-gpufaas-start"] == "disk"
    assert http.post(f"/function/{name}", content=b"again").headers["x-gpufaas-start"] == "hit"
    assert http.post(f"/function/{name}/secret").content == b"s3cret"
    assert http.post(f"/function/{name}/stream").text == "0,1,2,"
    params = {"name": name, "callId": first.headers["x-call-id"]}

    def of_first() -> list[tuple[str, str]]:
        lines = map(json.loads, http.get("/system/logs", params=params).text.splitlines())
        return [(line["stream"], line["text"]) for line in lines]

    until(of_first, "its output is in the log")
    assert of_first() == [("stdout", "answers hello")]
    assert "loading on cpu" in project.platform.log(name)

    project.stack.write_text(project.stack.read_text().replace("memory: 128Mi", "memory: 128Mi, nvidia.com/gpu: 1"))
    on_a_gpu = project.run("deploy")

    assert on_a_gpu.returncode == 1
    assert "gpu=true (limits nvidia.com/gpu), and this platform has no CUDA device" in on_a_gpu.stderr
    assert http.post(f"/function/{name}", content=b"still").json()["said"] == "still"
