"""The compose files match the options of our commands, and our promises about containers. 'make cluster' runs them."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpufaas_cli.commands import node, services

ROOT = Path(__file__).parents[3]
OURS = {"gateway": services.gateway, "node": node.command, "scheduler": services.scheduler}
OVERRIDES = [[], ["docker/compose.etcd3.yml"], ["docker/compose.nvidia.yml"], ["docker/compose.local.yml"]]


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("file", ["docker-compose.yml", "docker/compose.nvidia.yml"])
def test_each_option_is_one_that_the_command_has(file: str) -> None:
    for name, service in read(file)["services"].items():
        kind = name.rpartition("-")[0]
        if kind not in OURS:
            continue
        first, *given = service["command"]
        known = {option for parameter in OURS[kind].params for option in parameter.opts}
        asked = {each for each in given if str(each).startswith("--")}
        assert first == kind
        assert asked <= known, f"{kind} has no {asked - known}"
        assert given[given.index("--id") + 1] == name


def test_no_service_is_root_or_can_write_its_image_or_has_a_capability() -> None:
    for file in ("docker-compose.yml", "docker/compose.etcd3.yml"):
        for name, service in read(file)["services"].items():
            if file != "docker-compose.yml" and name == "etcd":
                continue  # changes the one that is there
            assert not service["user"].startswith("0"), name
            assert service["read_only"] is True, name
            assert service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
            assert service["restart"] == "unless-stopped", name


def test_only_the_door_is_reached_from_outside_and_only_from_this_machine() -> None:
    published = {
        name: service["ports"] for name, service in read("docker-compose.yml")["services"].items() if "ports" in service
    }

    assert set(published) == {"door", "prometheus", "grafana"}
    assert published["door"] == ["${GPUFAAS_LISTEN:-127.0.0.1}:${GPUFAAS_PORT:-8080}:8080"]


def test_images_know_the_commit_that_they_are_made_of() -> None:
    """`/system/info` said "unknown" in a container: there is no working tree."""
    services = read("docker-compose.yml")["services"]
    ours = [each for each in services.values() if each.get("build", {}).get("dockerfile") == "docker/Dockerfile"]
    _, _, stage = (ROOT / "docker/Dockerfile").read_text().rpartition("\nFROM ")

    assert {each["build"]["args"]["REVISION"] for each in ours} == {"${GPUFAAS_REVISION:-}"}
    assert len(ours) == len([name for name in services if name.rpartition("-")[0] in OURS])
    assert stage.index("ARG REVISION") < stage.index("GPUFAAS_REVISION=${REVISION}")


def test_all_that_prometheus_scrapes_is_there() -> None:
    services = read("docker-compose.yml")["services"]
    jobs = read("docker/monitoring/prometheus.yml")["scrape_configs"]
    targets = [target for job in jobs for each in job["static_configs"] for target in each["targets"]]

    assert {each.partition(":")[0] for each in targets} == {
        name for name in services if re.match("gateway|scheduler|node|etcd", name)
    }


def compose() -> list[str]:
    """Return the command of whichever version is here; empty: none is."""
    for command in (["docker-compose"], ["docker", "compose"]):
        if shutil.which(command[0]) and subprocess.run([*command, "version"], capture_output=True).returncode == 0:
            return command
    return []


@pytest.mark.parametrize("overrides", OVERRIDES, ids=lambda files: files[0] if files else "alone")
@pytest.mark.slow
def test_compose_takes_it(overrides: list[str], tmp_path: Path) -> None:
    command = compose()
    if not command:
        pytest.skip("there is no docker-compose")
    secrets = {**read("docker-compose.yml")["secrets"]}
    files = [part for each in ("docker-compose.yml", *overrides) for part in ("-f", str(ROOT / each))]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path), "GPUFAAS_SITE_PACKAGES": "/usr/lib"}

    done = subprocess.run(
        [*command, *files, "--project-directory", str(ROOT), "config"],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert set(shown["secrets"]) == set(secrets)
    for name in ("node-1", "node-2"):  # an override adds to what is mounted, and takes nothing away
        assert any("/var/lib/gpufaas-objects" in str(each) for each in shown["services"][name]["volumes"])
