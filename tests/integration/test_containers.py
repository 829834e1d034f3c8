"""Functions that have only an image, in a real Docker engine: what the platform makes of what their spec asks for."""

import base64
import hashlib
import json
import secrets
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.waiting import LIMIT_S, until

from gpufaas_core.origin import GATEWAY_NAMES
from gpufaas_gpu_manager.launch.containers import Containers


class Docker:
    """The platform, its engine, and an image to deploy."""

    def __init__(self, platform: Any, image: str) -> None:
        import docker

        self.platform = platform
        self.http: httpx.Client = platform.http
        self.image = image
        self.engine = docker.from_env(timeout=LIMIT_S)

    def deploy(self, name: str, image: str | None = None, **spec: Any) -> httpx.Response:
        return self.http.post("/system/functions", json={"service": name, "image": image or self.image, **spec})

    def call(self, name: str, path: str = "", **kwargs: Any) -> httpx.Response:
        return self.http.post(f"/function/{name}{path}", timeout=LIMIT_S, **kwargs)

    def networks(self) -> dict[str, Any]:
        """Return those of this platform by namespace."""
        found = self.engine.networks.list(filters={"label": f"gpufaas.instance={self._instance()}"})
        return {each.attrs["Labels"]["gpufaas.namespace"]: each for each in found}

    def _instance(self) -> str:
        return hashlib.sha256(bytes(self.platform.data.resolve())).hexdigest()[:16]

    def containers(self, name: str = "") -> list[Any]:
        """Return those of this platform: others may run on this machine at the same time."""
        labels = [f"gpufaas.instance={self._instance()}", *([f"faas_function={name}"] if name else [])]
        return list(self.engine.containers.list(all=True, filters={"label": labels}, ignore_removed=True))


@pytest.fixture(scope="module")
def docker(test_image: str, module_platform: Callable[..., Any]) -> Iterator[Docker]:
    platform = module_platform("--functions", "docker", "--device", "cpu:0=1GiB").start()
    docker = Docker(platform, test_image)
    yield docker
    platform.stop()
    assert (docker.containers(), docker.networks()) == ([], {})  # it leaves none behind
    docker.engine.close()


def test_an_image_is_deployed_called_logged_and_removed(docker: Docker) -> None:
    assert docker.deploy("web").status_code in (200, 202)

    first = docker.call("web", "/echo", content=b"hello")
    second = docker.call("web", "/seen?a=1", headers={"x-mine": "yes"})

    assert (first.status_code, first.content, first.headers["x-gpufaas-start"]) == (200, b"hello", "disk")
    assert second.headers["x-gpufaas-start"] == "hit"
    assert second.json()["target"] == "/seen?a=1"
    assert ["x-mine", "yes"] in second.json()["headers"]

    def listening() -> list[str]:
        lines = docker.http.get("/system/logs", params={"name": "web"}).text.splitlines()
        return [line["stream"] for line in map(json.loads, lines) if line["text"] == "listening on 8080"]

    until(listening, "its output is in the log")
    assert listening() == ["stdout"]
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
    assert env["OPENFAAS_URL"].startswith(f"http://gateway.openfaas:{docker.platform.port}/from/")
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

    assert answer.status_code == 507
    assert "out of memory at its limit of 64 MiB" in answer.text
    assert docker.call("greedy", "/echo", content=b"again").content == b"again"


def test_a_container_that_is_killed_from_outside_is_started_by_the_next_call(docker: Docker) -> None:
    docker.deploy("killed").raise_for_status()
    docker.call("killed", "/echo").raise_for_status()

    docker.containers("killed")[0].kill()

    until(lambda: "killed" not in docker.platform.residents() and not docker.containers("killed"), "it is gone")
    assert docker.call("killed", "/echo", content=b"back").content == b"back"


def test_copies_are_containers_of_their_own_replaced_when_they_die_and_gone_when_scaled_down(docker: Docker) -> None:
    docker.deploy("many", annotations={"gpufaas.memory": "64Mi"}).raise_for_status()

    def ready(replicas: int) -> bool:
        shown = docker.http.get("/system/function/many").json()
        return shown["availableReplicas"] == len(docker.containers("many")) == replicas

    def hosts(calls: int) -> set[str]:
        return {docker.call("many", "/env").json()["HOSTNAME"] for _ in range(calls)}

    docker.http.post("/system/scale-function/many", json={"replicas": 4}).raise_for_status()
    until(lambda: ready(4), "four containers")
    first = hosts(8)
    assert len(first) == 4

    killed = next(each for each in docker.containers("many") if each.id.startswith(min(first)))
    killed.kill()
    until(lambda: killed.id not in {each.id for each in docker.containers("many")} and ready(4), "another in its place")
    assert len(hosts(8) & first) == 3

    docker.http.post("/system/scale-function/many", json={"replicas": 1}).raise_for_status()
    until(lambda: ready(1), "one is left")
    assert len(hosts(2)) == 1


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


def test_an_image_is_ready_once_the_server_behind_its_watchdog_listens(docker: Docker) -> None:
    """The watchdog listens at once, and answered the first calls of stock images with an empty 500."""
    behind = {"mode": "http", "upstream_url": "http://127.0.0.1:8080"}
    docker.deploy("behind", envVars=behind).raise_for_status()
    late = {"envVars": behind | {"upstream_url": "http://127.0.0.1:5000"}, "annotations": {"gpufaas.load-stall": "1s"}}
    docker.deploy("late", **late).raise_for_status()

    assert docker.call("behind", "/echo", content=b"hello").content == b"hello"
    answer = docker.call("late", "/echo", content=b"hello")
    assert answer.status_code == 502
    assert "has yet to listen on port 8080, and on 5000 behind its watchdog" in answer.text


ASK = """
import os, sys, urllib.error, urllib.request
headers = {"Authorization": sys.argv[1]} if sys.argv[1] else {}
for method, path in (each.split() for each in sys.argv[2:]):
    body = b"hi" if method == "POST" else None
    try:
        at = "" if path.startswith("http") else os.environ["OPENFAAS_URL"]
        asked = urllib.request.Request(at + path, body, headers, method=method)
        with urllib.request.urlopen(asked, timeout=float(os.environ.get("WITHIN", "20"))) as answer:
            print(answer.status, answer.read(2).decode())
    except urllib.error.HTTPError as exc:
        print(exc.code, exc.read().decode().strip())
    except OSError:
        print("not reached")
"""


def ask_gateway(docker: Docker, name: str, *requests: str, authorization: str = "", timeout_s: float = 20) -> list[str]:
    """Send *requests* from inside the function's container; return status and text of each answer."""
    python = str(Path(sys.executable).resolve())
    done = docker.containers(name)[0].exec_run(
        [python, "-c", ASK, authorization, *requests], environment={"WITHIN": str(timeout_s)}
    )
    return str(done.output.decode()).splitlines()


def test_a_function_reaches_others_by_the_gateways_conventional_name_and_nothing_more(docker: Docker) -> None:
    docker.deploy("reaches").raise_for_status()
    docker.call("reaches", "/echo").raise_for_status()
    said = ask_gateway(
        docker, "reaches", "GET /healthz", "POST /function/reaches/echo", "POST /async-function/reaches/echo",
        "GET /system/functions", "POST /system/functions", "GET //system/functions",
        "GET /function/../system/functions",
        *(f"POST http://{name}:{docker.platform.port}/function/reaches/echo" for name in GATEWAY_NAMES),
    )  # fmt: skip

    assert said[:3] == ["200 OK", "200 hi", "202 "]
    assert [line.partition(" ")[0] for line in said[3:7]] == ["401", "401", "401", "404"]
    assert said[7:] == ["200 hi"] * 4
    assert docker.http.get("/system/functions").status_code == 200


def test_the_functions_network_is_for_functions(docker: Docker) -> None:
    docker.deploy("resident").raise_for_status()
    network = docker.networks()["openfaas-fn"].attrs["IPAM"]["Config"][0]["Gateway"]

    # From this machine one comes with the address that one goes to, which is in the network: so with another.
    transport = httpx.HTTPTransport(local_address="127.0.0.1")
    with httpx.Client(transport=transport, trust_env=False, timeout=LIMIT_S) as other:
        answer = other.get(f"http://{network}:{docker.platform.port}/healthz")

    assert (answer.status_code, answer.text) == (403, "this address is for functions in containers\n")


def test_where_no_password_is_asked_for_containers_reach_only_what_is_public(
    test_image: str, make_platform: Callable[..., Any]
) -> None:
    platform = make_platform("--functions", "docker", "--device", "cpu:0=256MiB", "--auth", "off").start()
    docker = Docker(platform, test_image)
    docker.deploy("reaches").raise_for_status()
    docker.call("reaches", "/echo").raise_for_status()

    (said,) = ask_gateway(docker, "reaches", "GET /system/functions")

    assert said.startswith("403 ")
    assert "start it with --auth on" in said
    assert platform.stop() == 0
    docker.engine.close()


def test_functions_of_one_namespace_reach_each_other_and_all_reach_the_gateway_but_none_those_of_another(
    docker: Docker,
) -> None:
    for name, namespace in (("caller", "red"), ("friend", "red"), ("stranger", "blue")):
        docker.http.post("/system/namespaces", json={"name": namespace, "annotations": {"openfaas": "1"}})
        docker.deploy(name, namespace=namespace).raise_for_status()
        docker.call(f"{name}.{namespace}", "/echo").raise_for_status()
    addresses = {}
    for name in ("friend", "stranger"):
        (joined,) = docker.containers(name)[0].attrs["NetworkSettings"]["Networks"].values()
        addresses[name] = f"http://{joined['IPAddress']}:8080/echo"

    said = ask_gateway(docker, "caller", f"POST {addresses['friend']}", "POST /function/stranger.blue/echo")
    refused = ask_gateway(docker, "caller", f"POST {addresses['stranger']}", timeout_s=2)

    assert said == ["200 hi", "200 hi"]
    assert refused == ["not reached"]
    assert {"red", "blue"} <= docker.networks().keys()


def test_a_network_that_was_pruned_is_there_again_for_the_next_start(docker: Docker) -> None:
    docker.http.post("/system/namespaces", json={"name": "green", "annotations": {"openfaas": "1"}})
    docker.deploy("late", namespace="green").raise_for_status()
    docker.networks()["green"].remove()

    assert docker.call("late.green", "/echo", content=b"hello").content == b"hello"
    assert ask_gateway(docker, "late", "GET /healthz") == ["200 OK"]


def test_a_function_keeps_only_the_capabilities_that_it_names(docker: Docker) -> None:
    docker.deploy("bare", annotations={"gpufaas.capabilities": "none"}).raise_for_status()
    docker.deploy("few", annotations={"gpufaas.capabilities": "CAP_CHOWN kill"}).raise_for_status()
    wrong = docker.deploy("wrong", annotations={"gpufaas.capabilities": "NET_RAW"})

    def effective(name: str) -> int:
        docker.call(name, "/echo").raise_for_status()
        python = str(Path(sys.executable).resolve())
        read = [python, "-c", "print(open('/proc/1/status').read())"]
        status = docker.containers(name)[0].exec_run(read).output.decode()
        return int(status.split("CapBnd:")[1].split()[0], 16)

    assert effective("bare") == 0
    assert effective("few") == 1 << 0 | 1 << 5  # CAP_CHOWN, CAP_KILL
    assert wrong.status_code == 400
    assert "'NET_RAW': name those to keep of CHOWN," in wrong.text


def test_with_a_password_containers_meet_the_whole_gateway(test_image: str, make_platform: Callable[..., Any]) -> None:
    platform = make_platform("--functions", "docker", "--device", "cpu:0=256MiB", "--auth", "on").start()
    user, password = "admin", (platform.data / "auth/basic-auth-password").read_text()
    platform.http.auth = (user, password)
    docker = Docker(platform, test_image)
    docker.deploy("reaches").raise_for_status()
    docker.call("reaches", "/echo").raise_for_status()
    basic = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

    nobody = ask_gateway(docker, "reaches", "GET /system/functions")
    admin = ask_gateway(docker, "reaches", "GET /system/functions", authorization=basic)

    assert (nobody, admin) == (["401 invalid credentials"], ["200 [{"])
    assert platform.stop() == 0
    assert docker.containers() == []
    docker.engine.close()


async def test_containers_of_an_earlier_run_are_removed_and_those_of_others_are_not(docker: Docker) -> None:
    def leave(instance: str) -> str:
        labels = {"gpufaas.instance": instance, "gpufaas.worker": "1", "faas_function": "left"}
        made = docker.engine.containers.run(docker.image, detach=True, labels=labels)
        return str(made.id)

    earlier, another = secrets.token_hex(8), secrets.token_hex(8)
    mine, other = leave(earlier), leave(another)
    containers = Containers(earlier, "http://gateway.openfaas:8080")

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
    assert docker.call("one", "/count").json()["most"] == 1, "at once"
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
