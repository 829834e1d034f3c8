"""Functions that become container images: OpenFaaS's build context, and docker called as faas-cli calls it."""

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.unit.cli.conftest import Run
from tests.unit.cli.wire_log import WireLog

from gpufaas_cli.images import tagged
from gpufaas_core.errors import InvalidSpec

STACK = """\
version: 1.0
provider: {name: openfaas}
functions:
  fn:
    lang: go
    handler: ./fn
    image: me/fn:0.1
    build_args: {A: "1", ADDITIONAL_PACKAGE: curl}
    build_options: [dev]
    build_secrets: {token: ./token.txt}
    platforms: linux/amd64,linux/arm64
  raw: {lang: dockerfile, handler: ./raw, image: raw:latest}
configuration:
  copy: [./common]
"""


class Docker:
    """A docker command that keeps its arguments, and fails where it is told to. It has BuildKit."""

    build_help = "--secret stringArray"

    def __init__(self, folder: Path) -> None:
        self._calls, self.script = folder / "calls", folder / "bin/docker"
        self.script.parent.mkdir(parents=True)
        self.behave("")

    def behave(self, lines: str) -> None:
        self.script.write_text(
            f'#!/bin/bash\nif [ "$2" = --help ]; then echo "{self.build_help}"; exit; fi\n'
            f'printf "%s\\0" "$PWD" "$@" >> {self._calls}; echo >> {self._calls}\n{lines}\necho said $1\n'
        )
        self.script.chmod(0o755)

    def calls(self, but: str = "version") -> list[list[str]]:
        lines = self._calls.read_bytes().split(b"\0\n")[:-1] if self._calls.exists() else []
        found = [[each.decode() for each in line.split(b"\0")] for line in lines]
        return [each for each in found if each[1] != but]


@pytest.fixture(autouse=True)
def project(here: Path) -> None:
    for name, content in {
        "stack.yaml": STACK,
        "template/go/template.yml": "language: go\nfprocess: ./handler\nbuild_options:\n"
        "  - {name: dev, packages: [make, curl]}\n",
        "template/go/Dockerfile": "FROM scratch\n",
        "template/go/main.go": "package main",
        "template/go/function/handler.go": "skeleton",
        "fn/handler.go": "mine",
        "fn/build/old": "x",
        "fn/template/old": "x",
        "raw/Dockerfile": "FROM busybox\n",
        "common/shared/x.txt": "shared",
        "token.txt": "secret",
    }.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.fixture
def docker(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Docker:
    fake = Docker(tmp_path_factory.mktemp("docker"))
    monkeypatch.setenv("PATH", f"{fake.script.parent}{os.pathsep}{os.environ['PATH']}")
    return fake


@pytest.fixture
def no_docker(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("empty")))


def files(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("no_docker")
def test_shrinkwrap_writes_openfaas_build_context_and_needs_no_docker(run: Run, here: Path) -> None:
    (here / "build/fn").mkdir(parents=True)
    (here / "build/fn/stale").write_text("of an earlier build")

    result = run("build", "--shrinkwrap")

    assert result.exit_code == 0, result.output
    assert files(here / "build/fn") == {
        "template.yml": (here / "template/go/template.yml").read_text(),
        "Dockerfile": "FROM scratch\n",
        "main.go": "package main",
        "function/handler.go": "mine",
        "function/common/shared/x.txt": "shared",
    }
    assert files(here / "build/raw") == {"Dockerfile": "FROM busybox\n", "common/shared/x.txt": "shared"}
    assert (here / "build/fn").stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("no_docker")
def test_publish_can_only_write_the_context_too(run: Run, here: Path) -> None:
    assert run("publish", "fn", "--shrinkwrap").exit_code == 0
    assert (here / "build/fn/Dockerfile").is_file()


@pytest.mark.usefixtures("no_docker")
def test_the_context_of_our_own_template_has_the_packages_that_serve_the_handler(run: Run, here: Path) -> None:
    (here / "stack.yaml").write_text(
        "provider: {name: openfaas}\nfunctions: {fn: {lang: python3-torch-image, handler: ./fn, image: fn:1}}\n"
    )
    (here / "fn/handler.py").write_text("mine")

    result = run("build", "--shrinkwrap")

    assert result.exit_code == 0, result.output
    context = files(here / "build/fn")
    assert context["function/handler.py"] == "mine"
    assert {"Dockerfile", "gpufaas/gpufaas_functions/http_server.py", "gpufaas/gpufaas_core/units.py"} <= set(context)
    assert not [name for name in context if name.endswith(".pyc")]
    for line in context["Dockerfile"].splitlines():
        if line.startswith("COPY"):
            first = line.split()[1]
            assert any(name == first or name.startswith(f"{first}/") for name in context), line


@pytest.mark.usefixtures("no_docker")
@pytest.mark.parametrize("command", ["build", "publish", "push"])
def test_without_docker_it_is_said_what_is_missing(run: Run, command: str) -> None:
    result = run(command, "fn")

    assert result.exit_code == 1
    assert "there is no docker command here: install Docker" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("gpufaas: 1 of 1 functions not ")


def test_without_an_engine_it_is_said_what_is_missing(run: Run, docker: Docker) -> None:
    docker.behave('echo "Cannot connect to the Docker daemon" >&2; exit 1')

    result = run("build", "fn")

    assert result.exit_code == 1
    assert "needs a Docker engine, and none answers (Cannot connect to the Docker daemon)" in result.stderr


def test_docker_build_is_called_as_faas_cli_calls_it(
    run: Run, docker: Docker, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:1")

    result = run("build", "--no-cache", "-b", "B=2", "--build-label", "by=me", "--pull")

    assert result.exit_code == 0, result.output
    assert docker.calls() == [
        [
            str(here / "build/fn"), "build", "--no-cache", "--pull", "--build-arg", "A=1",
            "--build-arg", "ADDITIONAL_PACKAGE=curl make", "--build-arg", "B=2",
            "--build-arg", "http_proxy=http://proxy:1", "--label", "by=me",
            "--secret", f"id=token,src={here}/token.txt", "--tag", "me/fn:0.1", ".",
        ],
        [
            str(here / "build/raw"), "build", "--no-cache", "--pull", "--build-arg", "ADDITIONAL_PACKAGE=",
            "--build-arg", "B=2", "--build-arg", "http_proxy=http://proxy:1", "--label", "by=me",
            "--tag", "raw:latest", ".",
        ],
    ]  # fmt: skip
    assert "Building: me/fn:0.1 with go template. Please wait..\n" in result.stdout
    assert "Image: me/fn:0.1 built.\n" in result.stdout


@pytest.mark.usefixtures("docker")
def test_quiet_is_without_dockers_words(run: Run) -> None:
    loud, quiet = run("up", "fn", "--skip-deploy"), run("up", "fn", "--skip-deploy", "--quiet")

    assert "said build" in loud.stderr
    assert "said push" in loud.stderr
    assert quiet.stderr == ""
    assert "Image: me/fn:0.1 built." in quiet.stdout


def test_build_secrets_need_buildkit(run: Run, docker: Docker) -> None:
    docker.build_help = "--pull"
    docker.behave("")

    result = run("build", "fn")

    assert result.exit_code == 1
    assert "gpufaas: fn: build_secrets of me/fn:0.1 need docker's BuildKit: install docker-buildx" in result.stderr
    assert docker.calls() == []


def test_a_failing_build_ends_with_dockers_last_words(run: Run, docker: Docker) -> None:
    docker.behave('if [ "$1" = build ]; then echo step 1; echo "no such base" >&2; exit 3; fi')

    result = run("build", "fn")

    assert result.exit_code == 1
    assert "gpufaas: fn: docker build of me/fn:0.1 failed: no such base" in result.stderr


def test_an_unknown_build_option_is_refused(run: Run, docker: Docker) -> None:
    result = run("build", "fn", "-o", "devel")

    assert result.exit_code == 1
    assert "build option 'devel' is not one of the template's, which are: dev" in result.stderr
    assert docker.calls() == []


def test_push_pushes_what_has_a_registry_or_user(run: Run, docker: Docker) -> None:
    result = run("push")

    assert result.exit_code == 0, result.output
    assert [each[1:] for each in docker.calls()] == [["push", "me/fn:0.1"]]
    assert "Not pushed: raw:latest names no registry" in result.stdout


def test_publish_builds_for_all_platforms_and_pushes_at_once(run: Run, docker: Docker) -> None:
    result = run("publish", "fn", "--extra-tag", "stable")

    assert result.exit_code == 0, result.output
    (call,) = [each[1:] for each in docker.calls() if each[2] != "version"]
    assert call[:5] == [
        "buildx", "build", "--progress=plain", "--platform=linux/amd64,linux/arm64", "--output=type=registry,push=true",
    ]  # fmt: skip
    assert call[-5:] == ["--tag", "me/fn:0.1", "--tag", "me/fn:stable", "."]


def test_publish_says_when_buildx_is_missing(run: Run, docker: Docker) -> None:
    docker.behave('if [ "$1" = buildx ]; then exit 1; fi')

    assert "needs docker's buildx plugin" in run("publish", "fn").stderr


def test_up_builds_pushes_and_deploys_by_image_with_the_templates_process(
    run: Run, docker: Docker, wire: WireLog
) -> None:
    result = run("up")

    assert result.exit_code == 0, result.output
    assert [each[1] for each in docker.calls()] == ["build", "push", "build"]
    assert [each.json for each in wire.sent if each.method == "PUT"] == [
        {"service": "fn", "image": "me/fn:0.1", "envProcess": "./handler", "labels": {}, "annotations": {}},
        {"service": "raw", "image": "raw:latest", "labels": {}, "annotations": {}},
    ]


@pytest.mark.parametrize(
    ("args", "calls", "deployed"),
    [
        (["up", "--skip-push"], ["build"], True),
        (["up", "--skip-push", "--skip-deploy"], ["build"], False),
        (["up", "--skip-deploy"], ["build", "push"], False),
        (["up", "--publish"], ["buildx", "buildx"], True),
        (["deploy"], [], True),
        (["deploy", "--no-read-template"], [], True),
    ],
)
def test_steps_can_be_left_out(
    run: Run, docker: Docker, wire: WireLog, args: list[str], calls: list[str], deployed: bool
) -> None:
    result = run(*args, "fn")

    assert result.exit_code == 0, result.output
    assert [each[1] for each in docker.calls()] == calls
    assert (("PUT", "/system/functions") in wire.requests()) == deployed
    if args == ["deploy", "--no-read-template"]:
        assert "envProcess" not in wire.sent[-1].json


def test_several_are_built_at_once_when_asked(run: Run, docker: Docker, here: Path) -> None:
    """Each waits until the other has begun: one after the other would never end."""
    docker.behave(
        f'if [ "$1" = build ]; then touch {here}/began-$(basename $PWD);'
        f"for i in $(seq 200); do [ -e {here}/began-fn -a -e {here}/began-raw ] && exit 0; sleep 0.05; done; exit 1; fi"
    )

    result = run("build", "--parallel", "2")

    assert result.exit_code == 0, result.output


def test_a_failure_of_one_does_not_stop_the_others_in_parallel(run: Run, docker: Docker) -> None:
    docker.behave('if [ "$1" = build -a "$(basename $PWD)" = fn ]; then exit 1; fi')

    result = run("build", "--parallel", "4", "--json")

    assert result.exit_code == 1
    assert ["error" in each for each in json.loads(result.stdout)] == [True, False]


# --- tags ---


@pytest.fixture
def commit(here: Path) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@t"]
        return subprocess.run(
            ["git", *who, *arguments], cwd=here, env=env, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "--quiet", "--initial-branch=feature/x")
    git("add", "stack.yaml")
    git("commit", "--quiet", "-m", "c")
    git("tag", "v1")
    return git("rev-parse", "--short", "HEAD")


@pytest.mark.parametrize(
    ("image", "mode", "result"),
    [
        ("me/fn", "latest", "me/fn:latest"),
        ("me/fn:0.1", "latest", "me/fn:0.1"),
        ("host:5000/fn", "latest", "host:5000/fn:latest"),
        ("me/fn:0.1", "sha", "me/fn:0.1-SHA"),
        ("me/fn", "sha", "me/fn:latest-SHA"),
        ("me/fn:0.1", "branch", "me/fn:0.1-feature-x-SHA"),
        ("me/fn:0.1", "describe", "me/fn:0.1-v1"),
    ],
)
def test_tags_say_which_version(commit: str, here: Path, image: str, mode: str, result: str) -> None:
    assert tagged(image, mode, None, here) == result.replace("SHA", commit)


def test_the_digest_tag_is_of_the_handlers_files(here: Path) -> None:
    (here / "h").mkdir()
    (here / "h/b").write_text("b")
    (here / "h/a").write_text("a")
    expected = hashlib.md5(hashlib.md5(b"a").digest() + hashlib.md5(b"b").digest()).hexdigest()

    assert tagged("host:5000/fn:0.1", "digest", here / "h", here) == f"host:5000/fn:{expected}"


def test_tags_of_git_need_a_repository(here: Path) -> None:
    with pytest.raises(InvalidSpec, match="--tag needs a git repository with a commit"):
        tagged("me/fn", "sha", None, here)


def test_the_tagged_image_is_built_and_deployed(run: Run, docker: Docker, wire: WireLog, commit: str) -> None:
    result = run("up", "fn", "--tag", "sha", "--no-wait")

    assert result.exit_code == 0, result.output
    assert [each[-2] for each in docker.calls() if each[1] == "build"] == [f"me/fn:0.1-{commit}"]
    assert wire.sent[-1].json["image"] == f"me/fn:0.1-{commit}"


# --- local runs of containers ---


@pytest.mark.usefixtures("no_docker")
def test_local_run_prints_dockers_command(run: Run, here: Path) -> None:
    text = (here / "stack.yaml").read_text()
    (here / "stack.yaml").write_text(
        text.replace("    lang: go\n", "    lang: go\n    secrets: [key]\n"
                     "    limits: {memory: 64Mi, nvidia.com/gpu: 1}\n"
                     "    environment: {A: file}\n    readonly_root_filesystem: true\n", 1)
    )  # fmt: skip
    missing = run("local-run", "fn", "--print", "-p", "8081")
    (here / ".secrets").mkdir()
    (here / ".secrets/key").write_text("v")

    shown = run("local-run", "fn", "--print", "-p", "8081", "-e", "B=flag", "--network", "n").stdout.split()

    assert (missing.exit_code, "put its value into .secrets/key" in missing.stderr) == (1, True)
    assert shown[:4] == ["docker", "run", "--rm", "-i"]
    assert shown[5:] == [
        "-p=127.0.0.1:8081:8080", "--network=n", "--read-only", "--tmpfs=/tmp", "--memory=64m", "--gpus=1",
        "-e=GPUFAAS_SCRATCH=/tmp", "-e=A=file", "-e=B=flag",
        f"-v={here}/.secrets/key:/var/openfaas/secrets/key:ro", "me/fn:0.1",
    ]  # fmt: skip
    assert "one of fn, raw" in run("local-run").stderr
