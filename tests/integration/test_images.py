"""
Functions that become container images, with nothing faked: docker, its engine, and a registry that asks for a password.
What is built here is pushed, pulled by the platform, and answers.
"""

import base64
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.conftest import LIMIT_S, Platform, free_port, until

USER, PASSWORD = "me", "registry-pass"
HTPASSWD = "me:$2y$05$abcdefghijklmnopqrstuuPjvWZA9Te8qmmwSCy0c40HUw16Nv/I6\n"
"""The password as bcrypt, which is all that the registry takes."""

LABEL = "gpufaas-test=images"
DOCKERFILE = """\
FROM {base}
LABEL {label}
ARG ADDITIONAL_PACKAGE
ARG GREETING=none
ENV GREETING=$GREETING PACKAGES=$ADDITIONAL_PACKAGE
WORKDIR /home/app
COPY function/ ./function/
RUN [ "$(cat_() {{ read -r line < function/handler.txt; echo "$line"; }}; cat_)" = "mine" ]
"""
TEMPLATE = "language: web\nbuild_options:\n  - {name: dev, packages: [make, curl]}\n"


def require(is_there: object, reason: str) -> None:
    """Skip without it; fail if GPUFAAS_REQUIRE says that containers must be tested."""
    if not is_there:
        if "docker" in os.environ.get("GPUFAAS_REQUIRE", "").split(","):
            pytest.fail(reason)
        pytest.skip(reason)


class Registry:
    def __init__(self, home: Path) -> None:
        self.host = f"127.0.0.1:{free_port()}"  # a registry on loopback may be without TLS
        (home / "htpasswd").write_text(HTPASSWD)
        config = {
            "version": 0.1,
            "log": {"level": "warn"},
            "storage": {"filesystem": {"rootdirectory": str(home / "data")}},
            "http": {"addr": self.host},
            "auth": {"htpasswd": {"realm": "test", "path": str(home / "htpasswd")}},
        }
        (home / "config.yml").write_text(json.dumps(config))
        with (home / "output").open("wb") as output:
            self.process = subprocess.Popen(
                ["docker-registry", "serve", str(home / "config.yml")], stdout=output, stderr=output
            )
        self._http = httpx.Client(base_url=f"http://{self.host}", auth=(USER, PASSWORD), trust_env=False)
        until(self._answers, "the registry answers")

    def _answers(self) -> bool:
        assert self.process.poll() is None
        try:
            return self._http.get("/v2/").status_code == 200
        except httpx.TransportError:
            return False

    def tags(self, name: str) -> list[str]:
        answer = self._http.get(f"/v2/{name}/tags/list")
        return [] if answer.status_code == 404 else list(answer.json()["tags"])

    def close(self) -> None:
        self._http.close()
        self.process.terminate()
        self.process.wait(LIMIT_S)


class Project:
    """A folder with a template of OpenFaaS's kind, a function made from it, and a login for the registry."""

    def __init__(self, home: Path, base: str, registry: Registry) -> None:
        self.home, self.registry = home, registry
        self.name = f"me/fn-{secrets.token_hex(4)}"
        self.image = f"{registry.host}/{self.name}:0.1"
        self.images = [self.image]
        self.logged_in = home / "credentials"
        for path, text in {
            "template/web/template.yml": TEMPLATE,
            "template/web/Dockerfile": DOCKERFILE.format(base=base, label=LABEL),
            "template/web/function/handler.txt": "skeleton\n",
            "fn/handler.txt": "mine\n",
        }.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text)
        self.stack(self.image)
        given = ["registry-login", "-u", USER, "-s", "--server", registry.host]
        self.run(*given, given=PASSWORD).check_returncode()

    def stack(self, image: str, name: str = "fn", **more: Any) -> None:
        function = {"lang": "web", "handler": "./fn", "image": image, "build_args": {"GREETING": "hi"}, **more}
        self.images.append(image)
        self._write({name: function})

    def _write(self, functions: dict[str, Any]) -> None:
        provider = {"name": "openfaas"}
        (self.home / "stack.yaml").write_text(
            json.dumps({"version": 1.0, "provider": provider, "functions": functions})
        )

    def dockerfile(self, text: str, base: str) -> None:
        (self.home / "template/web/Dockerfile").write_text(f"FROM {base}\nLABEL {LABEL}\n{text}")

    def run(self, *args: str, given: str = "", **env: str) -> "subprocess.CompletedProcess[str]":
        env = {**os.environ, "HOME": str(self.home), "DOCKER_CONFIG": str(self.logged_in), **env}
        return subprocess.run(
            [sys.executable, "-m", "gpufaas_cli", *args],
            cwd=self.home, input=given, env=env, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip


@pytest.fixture(scope="module")
def registry(test_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    del test_image  # without an engine there is nothing to push
    require(shutil.which("docker"), "no docker command here: install docker.io to run this")
    require(shutil.which("docker-registry"), "no registry here: install docker-registry to run this")
    registry = Registry(tmp_path_factory.mktemp("registry"))
    yield registry
    registry.close()
    docker("image", "prune", "--force", "--filter", f"label={LABEL}")  # what was built again has lost its name


@pytest.fixture
def project(test_image: str, registry: Registry, tmp_path: Path) -> Iterator[Project]:
    project = Project(tmp_path, test_image, registry)
    yield project
    for image in project.images:
        forget(image)


@pytest.fixture(scope="module")
def platform(
    registry: Registry, module_platform: Callable[..., Platform], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Platform]:
    """Knows the registry's password."""
    home = tmp_path_factory.mktemp("login")
    login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (home / "config.json").write_text(json.dumps({"auths": {registry.host: {"auth": login}}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_CONFIG", str(home))
        platform = module_platform("--functions", "docker", "--device", "cpu:0=1GiB", "--auth", "on")
        platform.start()
    platform.http.auth = ("admin", (platform.data / "auth/basic-auth-password").read_text())
    yield platform
    assert platform.stop() == 0


@pytest.fixture
def gateway(platform: Platform) -> Iterator[str]:
    """The URL of the platform, with its password in it."""
    password = platform.http.auth._auth_header  # type: ignore[union-attr]
    user, _, word = base64.b64decode(password.split()[1]).decode().partition(":")
    yield f"http://{user}:{word}@127.0.0.1:{platform.port}"
    for each in platform.http.get("/system/functions").json():
        platform.http.request("DELETE", "/system/functions", json={"functionName": each["name"]}).raise_for_status()


def docker(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["docker", *args], capture_output=True, text=True, check=False)


def forget(image: str) -> None:
    docker("rmi", "--force", image)


def is_here(image: str) -> bool:
    return docker("image", "inspect", image).returncode == 0


def env_of(platform: Platform, name: str) -> dict[str, str]:
    answer = platform.http.get(f"/function/{name}/env", timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, str] = answer.json()
    return found


def one_line(done: "subprocess.CompletedProcess[str]") -> str:
    """The error of a function's step, without what docker printed before, and the count that follows it."""
    assert done.returncode == 1, done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("gpufaas: ")]
    assert "1 of 1 functions not" in lines[-1]
    assert len(lines) == 2, done.stderr
    return lines[0]


# --- docker here ---


def test_an_image_is_built_pushed_pulled_by_the_platform_and_answers(
    project: Project, registry: Registry, platform: Platform, gateway: str
) -> None:
    built = project.run("build", "-o", "dev")
    assert built.returncode == 0, built.stderr
    assert (
        f"Building: {project.image} with web template. Please wait..\nImage: {project.image} built.\n" in built.stdout
    )
    assert is_here(project.image)
    assert registry.tags(project.name) == []

    pushed = project.run("push")
    assert pushed.returncode == 0, pushed.stderr
    assert f"Pushing fn [{project.image}]" in pushed.stdout
    assert registry.tags(project.name) == ["0.1"]

    forget(project.image)
    deployed = project.run("deploy", "-g", gateway)
    assert deployed.returncode == 0, deployed.stderr
    assert "Deployed. 202 Accepted." in deployed.stdout
    assert is_here(project.image)
    env = env_of(platform, "fn")
    assert (env["GREETING"], env["PACKAGES"]) == ("hi", "make curl")


def test_up_does_all_of_it_and_again_when_something_changed(
    project: Project, registry: Registry, platform: Platform, gateway: str
) -> None:
    first = project.run("up", "-g", gateway)
    assert first.returncode == 0, first.stderr
    assert registry.tags(project.name) == ["0.1"]
    assert env_of(platform, "fn")["GREETING"] == "hi"

    project.stack(project.image, build_args={"GREETING": "changed"})
    second = project.run("up", "-g", gateway)
    assert second.returncode == 0, second.stderr
    assert env_of(platform, "fn")["GREETING"] == "changed"


def test_a_newer_image_of_the_same_tag_is_pulled_and_one_that_was_built_here_stays(
    project: Project, platform: Platform, gateway: str
) -> None:
    project.run("up", "-g", gateway).check_returncode()
    first = docker("image", "inspect", "-f", "{{.Id}}", project.image).stdout.strip()
    project.stack(project.image, build_args={"GREETING": "newer"})
    project.run("up", "--skip-deploy").check_returncode()
    docker("tag", first, project.image)  # as if it had been pushed from elsewhere

    project.run("deploy", "-g", gateway).check_returncode()
    assert env_of(platform, "fn")["GREETING"] == "newer"

    project.stack(project.image, build_args={"GREETING": "local"})
    project.run("up", "--skip-push", "-g", gateway).check_returncode()
    assert env_of(platform, "fn")["GREETING"] == "local"


def test_a_build_that_fails_says_which_step_did(project: Project, test_image: str) -> None:
    project.dockerfile("COPY none.txt .\n", test_image)

    line = one_line(project.run("build"))

    assert f"docker build of {project.image} failed: " in line
    assert "none.txt" in line


def test_a_push_without_the_registrys_password_is_refused_in_one_line(project: Project, registry: Registry) -> None:
    assert project.run("build").returncode == 0
    login = ["registry-login", "-u", USER, "-s", "--server", registry.host]

    nobody = one_line(project.run("push", DOCKER_CONFIG=str(project.home / "none")))
    project.run(*login, given="wrong").check_returncode()
    wrong = one_line(project.run("push"))

    for line in (nobody, wrong):
        assert f"docker push of {project.image} failed: " in line
        assert "auth" in line
    assert registry.tags(project.name) == []


def test_an_image_that_the_registry_lacks_or_guards_is_refused_at_deploy_in_one_line(
    project: Project, gateway: str, make_platform: Callable[..., Platform], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = one_line(project.run("deploy", "-g", gateway))

    assert f"{project.image} is not on this machine and cannot be pulled: " in missing
    assert "not found" in missing or "unknown" in missing

    project.run("build").check_returncode()
    project.run("push").check_returncode()
    forget(project.image)
    monkeypatch.setenv("DOCKER_CONFIG", str(project.home / "none"))
    stranger = make_platform("--functions", "docker", "--device", "cpu:0=256MiB").start()
    password = (stranger.data / "auth/basic-auth-password").read_text()
    guarded = one_line(project.run("deploy", "-g", f"http://admin:{password}@127.0.0.1:{stranger.port}"))
    assert "cannot be pulled: " in guarded
    assert "auth" in guarded
    assert "log in to its registry" in guarded


def test_publish_uses_buildx_or_says_that_it_is_missing(project: Project, registry: Registry) -> None:
    done = project.run("publish")

    if docker("buildx", "version").returncode == 0:
        assert done.returncode == 0, done.stderr
        assert registry.tags(project.name) == ["0.1"]
    else:
        assert "publishing images needs docker's buildx plugin: install docker-buildx" in one_line(done)


def has_buildkit() -> bool:
    env = {**os.environ, "DOCKER_BUILDKIT": "1"}
    return "--secret" in subprocess.run(["docker", "build", "--help"], env=env, capture_output=True, text=True).stdout


def ask_for_secret(project: Project, base: str) -> None:
    """A build that works with the secret only; without BuildKit the Dockerfile would not even be read."""
    (project.home / "token.txt").write_text("s3cret\n")
    project.stack(project.image, build_secrets={"token": "token.txt"})
    mounted = 'RUN --mount=type=secret,id=token read -r t < /run/secrets/token && [ "$t" = s3cret ]\n'
    project.dockerfile(mounted if has_buildkit() else "", base)


def test_build_secrets_are_mounted_or_it_is_said_what_is_missing(project: Project, test_image: str) -> None:
    ask_for_secret(project, test_image)

    done = project.run("build")

    if has_buildkit():
        assert done.returncode == 0, done.stderr
    else:
        assert "need docker's BuildKit: install docker-buildx" in one_line(done)
