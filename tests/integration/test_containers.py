"""Functions that have only an image, in a real Docker engine: what the platform makes of what their spec asks for."""

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpufaas_gpu_manager.containers import Containers

LIMIT_S = 60.0


def until(claim: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not claim():
        assert time.monotonic() < end, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.02)


class Docker:
    """The platform, its engine, and an image to deploy."""

    def __init__(self, platform: Any, image: str) -> None:
        import docker

        self.platform = platform
        self.http: httpx.Client = platform.http
        self.image = image
        self.engine = docker.from_env(timeout=30)

    def deploy(self, name: str, image: str | None = None, **spec: Any) -> httpx.Response:
        return self.http.post("/system/functions", json={"service": name, "image": image or self.image, **spec})

    def call(self, name: str, path: str = "", **kwargs: Any) -> httpx.Response:
        return self.http.post(f"/function/{name}{path}", timeout=LIMIT_S, **kwargs)

    def containers(self, name: str = "") -> list[Any]:
        """Return those of this platform: others may run on this machine at the same time."""
        instance = hashlib.sha256(bytes(self.platform.data.resolve())).hexdigest()[:16]
        labels = [f"gpufaas.instance={instance}", *([f"faas_function={name}"] if name else [])]
        return list(self.engine.containers.list(all=True, filters={"label": labels}, ignore_removed=True))


@pytest.fixture(scope="module")
def docker(test_image: str, module_platform: Callable[..., Any]) -> Iterator[Docker]:
    platform = module_platform("--functions", "docker", "--device", "cpu:0=1GiB").start()
    docker = Docker(platform, test_image)
    yield docker
    platform.stop()
    assert docker.containers() == []  # it leaves none behind
    docker.engine.close()


def test_an_image_is_deployed_called_logged_and_removed(docker: Docker) -> None:
    assert docker.deploy("web").status_code in (200, 202)

    first = docker.call("web", "/echo", content=b"hello")
    second = docker.call("web", "/seen?a=1", headers={"x-mine": "yes"})

    assert (first.status_code, first.content, first.headers["x-gpufaas-start"]) == (200, b"hello", "miss")
    assert second.headers["x-gpufaas-start"] == "hit"
    assert second.json()["target"] == "/seen?a=1"
    assert ["x-mine", "yes"] in second.json()["headers"]
    assert "listening on 8080" in docker.platform.log("web")
    assert len(docker.containers("web")) == 1
    docker.http.request("DELETE", "/system/functions", json={"functionName": "web"}).raise_for_status()
    until(lambda: not docker.containers("web"), "its container is gone")


def test_the_container_is_what_its_spec_asks_for(docker: Docker) -> None:
    docker.http.post("/system/secrets", json={"name": "key", "value": "s3cret"}).raise_for_status()
    docker.deploy(
        "asked", envProcess="cat", envVars={"MINE": "1"}, secrets=["key"], labels={"team": "a"},
        limits={"memory": "96Mi", "cpu": "500m"}, readOnlyRootFilesystem=True,
    ).raise_for_status()  # fmt: skip

    env = docker.call("asked", "/env").json()
    container = docker.containers("asked")[0].attrs
    host = container["HostConfig"]

    expected = {"fprocess": "cat", "MINE": "1", "OPENFAAS_NAME": "asked", "OPENFAAS_NAMESPACE": "openfaas-fn"}
    assert expected.items() <= env.items()
    assert env["OPENFAAS_URL"] == f"http://gateway.openfaas:{docker.platform.port}"
    assert docker.call("asked", "/secret?key").content == b"s3cret"
    assert docker.call("asked", "/write?/var/openfaas/secrets/key").status_code == 500
    assert docker.call("asked", "/write?/etc/x").status_code == 500
    assert docker.call("asked", "/write?/tmp/x").content == b"written"
    assert (host["Memory"], host["NanoCpus"], host["ReadonlyRootfs"]) == (96 * 2**20, 500_000_000, True)
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["PortBindings"] in ({}, None)
    assert container["Config"]["Labels"]["team"] == "a"
    shown = docker.http.get("/system/function/asked").json()
    assert shown["envVars"] == {"MINE": "1"}


def test_one_that_takes_more_than_its_limit_is_told_so(docker: Docker) -> None:
    docker.deploy("greedy", limits={"memory": "64Mi"}).raise_for_status()

    answer = docker.call("greedy", f"/eat?{300 * 2**20}")

    assert answer.status_code == 502
    assert "out of memory at its limit of 64 MiB" in answer.text
    assert docker.call("greedy", "/echo", content=b"again").content == b"again"


def test_a_container_that_is_killed_from_outside_is_started_by_the_next_call(docker: Docker) -> None:
    docker.deploy("killed").raise_for_status()
    docker.call("killed", "/echo").raise_for_status()

    docker.containers("killed")[0].kill()

    until(lambda: not docker.containers("killed"), "its container is gone")
    assert docker.call("killed", "/echo", content=b"back").content == b"back"


def test_an_image_that_cannot_be_had_is_refused_in_plain_words(docker: Docker) -> None:
    answer = docker.deploy("nowhere", image="127.0.0.1:9/no/such:1")

    assert answer.status_code == 400
    assert "image: 127.0.0.1:9/no/such:1 is not on this machine and cannot be pulled" in answer.text
    assert docker.http.get("/system/function/nowhere").status_code == 404


def test_an_image_without_a_server_says_what_was_waited_for(docker: Docker) -> None:
    docker.deploy("mute", envVars={"PORT": "8079"}, annotations={"gpufaas.load-stall": "1s"}).raise_for_status()

    answer = docker.call("mute", "/echo")

    assert answer.status_code == 502
    assert "has yet to listen on port 8080" in answer.text


def test_a_function_reaches_the_gateway_by_its_conventional_name(docker: Docker) -> None:
    docker.deploy("reaches").raise_for_status()
    docker.call("reaches", "/echo").raise_for_status()

    found = (
        docker.containers("reaches")[0]
        .exec_run(["/bin/sh", "-c", 'while read line; do echo "$line"; done < /etc/hosts'])
        .output.decode()
    )

    network = docker.engine.networks.get("gpufaas").attrs["IPAM"]["Config"][0]["Gateway"]
    assert f"{network}\tgateway.openfaas\n" in found


async def test_containers_of_an_earlier_run_are_removed_and_those_of_others_are_not(docker: Docker) -> None:
    def leave(instance: str) -> str:
        labels = {"gpufaas.instance": instance, "gpufaas.worker": "1", "faas_function": "left"}
        made = docker.engine.containers.run(docker.image, detach=True, labels=labels)
        return str(made.id)

    earlier, another = secrets.token_hex(8), secrets.token_hex(8)
    mine, other = leave(earlier), leave(another)
    containers = Containers(earlier, 8080)

    await containers.start()

    left = {each.id for each in docker.engine.containers.list(all=True, filters={"label": "faas_function=left"})}
    assert mine not in left
    assert other in left
    await containers.close()
    docker.engine.containers.get(other).remove(force=True)


def test_a_body_of_any_size_passes_through(docker: Docker) -> None:
    docker.deploy("large").raise_for_status()

    def pieces() -> Iterator[bytes]:
        for _ in range(160):
            yield b"x" * 65536

    answer = docker.call("large", "/seen", content=pieces())

    assert json.loads(answer.content)["bytes"] == 160 * 65536


def test_an_image_that_may_be_on_a_gpu_takes_one_call_at_a_time_whatever_its_size(docker: Docker) -> None:
    """As a model does: it is placed by the policy, and its bodies are read whole before it holds the device."""
    docker.deploy("one", annotations={"gpufaas.device": "any"}, limits={"memory": "96Mi"}).raise_for_status()
    docker.call("one", "/echo").raise_for_status()

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: docker.call("one", "/chunked"), range(4)))

    assert {each.text for each in answers} == {"one,two,three"}
    assert (
        docker.call("one", "/count").json()["connections"] == 2
    )  # that which looked whether it is ready, and one slot
    assert json.loads(docker.call("one", "/seen", content=b"x" * (5 * 2**20)).content)["bytes"] == 5 * 2**20
    assert docker.http.get("/system/function/one").json()["gpufaas"]["slots"] == 1


def test_an_image_that_asks_for_a_gpu_is_refused_where_there_is_none(docker: Docker) -> None:
    answer = docker.deploy("cuda", limits={"nvidia.com/gpu": "1"})

    assert answer.status_code == 400
    assert "gpu=true (limits nvidia.com/gpu), and this platform has no CUDA device" in answer.text


def test_without_an_engine_the_deploy_says_what_is_missing(
    make_platform: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    platform = make_platform("--device", "cpu:0=256MiB").start()

    answer = platform.http.post("/system/functions", json={"service": "web", "image": "web:1"})

    assert answer.status_code == 400
    assert "has only an image (web:1): the Docker engine does not answer" in answer.text
