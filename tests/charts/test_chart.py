"""
The chart, as Helm installs it: by Helm's own library into an API server that keeps what it is given. Each object is
held against the schemas that Kubernetes publishes, for the oldest and the newest version that we say it runs on.
"""

import asyncio
import base64
import importlib.util
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes_server import KubernetesServer

from gpufaas_cli.commands import node, services
from gpufaas_gpu_manager.launch.pod_manifest import _labels

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "gpufaas"
VERSIONS = ("1.27", "1.37")
COMMANDS = {"gateway": services.gateway, "node": node.command, "scheduler": services.scheduler}
OPTION = re.compile(r"(--[a-z0-9-]+)(=.*)?", re.DOTALL)

EVERYTHING = {
    "etcd": {
        "bundled": {"enabled": False}, "endpoints": ["e1:2379", "e2:2379"], "tls": {"secretName": "etcd-tls"},
        "auth": {"user": "gpufaas", "passwordSecretName": "etcd-login"},
    },
    "secrets": {"token": {"existing": "t"}, "key": {"existing": "k"}, "auth": {"existing": "a"}},
    "tls": {"secretName": "internal"},
    "pullSecrets": ["registry", "mirror"],
    "objectStore": {"url": "s3://b/p?endpoint=http://minio:9000", "credentialsSecretName": "s3"},
    "gateway": {
        "autoscaling": {"enabled": True}, "nodeSelector": {"role": "edge"},
        "tolerations": [{"key": "edge", "operator": "Exists"}], "extraArgs": ["--max-queue=50"],
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "ingress": {
            "enabled": True, "className": "nginx", "tlsSecretName": "cert", "annotations": {"a": "b"},
            "host": "faas.example.com",
        },
    },
    "scheduler": {
        "policy": "lalb-o3:o3_limit=10", "nodeSelector": {"role": "edge"},
        "tolerations": [{"key": "edge", "operator": "Exists"}],
        "extraArgs": ["--journal=events.jsonl"],
    },
    "node": {
        "functions": "kubernetes", "functionNamespace": "functions", "pullSecrets": ["registry"], "hostPath": "/data",
        "isolation": "strict",
        "binds": [{"hostPath": "/srv/sets", "path": "/sets"}, {"hostPath": "/out", "path": "/out", "writable": True}],
        "gpu": {"count": 2, "runtimeClassName": "nvidia", "extraArgs": ["--label=tier=gold"]},
        "cpu": {
            "enabled": True, "devices": ["cpu:0=1GiB", "cpu:1=1GiB"], "nodeSelector": {"gpu": "no"},
            "tolerations": [{"operator": "Exists"}],
        },
    },
    "networkPolicy": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
}  # fmt: skip
ONLY_CPU = {"node": {"gpu": {"enabled": False}, "cpu": {"enabled": True}}}

if missing := [each for each in ("helm_sdkpy", "kubernetes_validate") if importlib.util.find_spec(each) is None]:
    if "helm" in os.environ.get("GPUFAAS_REQUIRE", "").split(","):
        raise ModuleNotFoundError(f"{missing} are missing: run make setup-charts")
    pytest.skip(f"{', '.join(missing)} not installed: make setup-charts", allow_module_level=True)


async def helm(*arguments: str, fails: bool = False) -> str:
    """Helm keeps no release there: in the server are the chart's objects only."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("helm.py")), *arguments,
        env={**os.environ, "HELM_DRIVER": "memory"}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said, wrong = await running.communicate()
    assert (running.returncode != 0) is fails, wrong.decode()
    return (wrong if fails else said).decode()


class Installed:
    """What came of an install."""

    def __init__(self, objects: list[dict[str, Any]], notes: str) -> None:
        self.objects = objects
        self.notes = notes

    def all(self, kind: str) -> dict[str, dict[str, Any]]:
        return {each["metadata"]["name"]: each for each in self.objects if each["kind"] == kind}

    def workloads(self) -> list[dict[str, Any]]:
        return [each for kind in ("Deployment", "DaemonSet", "StatefulSet") for each in self.all(kind).values()]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[KubernetesServer]:
    server = KubernetesServer()
    await server.start()
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "it",
        "clusters": [{"name": "it", "cluster": {"server": server.url}}], "users": [{"name": "it", "user": {}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it", "namespace": "apps"}}],
    }  # fmt: skip
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    yield server
    await server.close()


async def install(server: KubernetesServer, tmp_path: Path, values: dict[str, Any], name: str = "gpufaas") -> Installed:
    config = str(tmp_path / "kubeconfig")
    release = json.loads(await helm("install", str(CHART), name, "apps", config, json.dumps(values)))
    return Installed(list(server.objects.values()), release["info"]["notes"])


async def test_helm_finds_nothing_wrong() -> None:
    found = json.loads(await helm("lint", str(CHART)))

    assert not found["Errors"]
    assert [each for each in found["Messages"] if each["Severity"] > 1] == []  # 1: it would like an icon


@pytest.mark.parametrize("values", [{}, ONLY_CPU, EVERYTHING], ids=["as it is", "CPUs only", "everything"])
async def test_each_object_is_what_kubernetes_takes_and_fits_the_others(
    server: KubernetesServer, tmp_path: Path, values: dict[str, Any]
) -> None:
    import kubernetes_validate

    installed = await install(server, tmp_path, values)

    for each in installed.objects:
        if each["kind"] == "ServiceMonitor":
            continue  # not Kubernetes' own: the Prometheus operator's
        for version in VERSIONS:
            kubernetes_validate.validate(each, version, strict=True)
    for each in installed.workloads():
        selector = each["spec"]["selector"]["matchLabels"]
        template = each["spec"]["template"]
        assert selector.items() <= template["metadata"]["labels"].items()
        volumes = {volume["name"] for volume in template["spec"].get("volumes", ())}
        volumes |= {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", ())}
        (container,) = template["spec"]["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] in ports
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
    theirs = [each["spec"]["selector"]["matchLabels"] for each in installed.workloads()]
    for budget in installed.all("PodDisruptionBudget").values():
        assert budget["spec"]["selector"]["matchLabels"] in theirs


@pytest.mark.parametrize("values", [{}, ONLY_CPU, EVERYTHING], ids=["as it is", "CPUs only", "everything"])
async def test_each_option_is_one_that_the_command_has(
    server: KubernetesServer, tmp_path: Path, values: dict[str, Any]
) -> None:
    installed = await install(server, tmp_path, values)

    for each in installed.workloads():
        (container,) = each["spec"]["template"]["spec"]["containers"]
        if "args" not in container:
            continue  # etcd's
        name, *given = container["args"]
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        for one in given:
            option = OPTION.fullmatch(one)
            assert option is not None, one
            assert option[1] in known, f"{name} has no {option[1]}"
        env = {variable["name"] for variable in container["env"]}
        assert set(re.findall(r"\$\((\w+)\)", " ".join(given))) <= env


async def test_gpus_are_asked_for_and_all_of_them_taken(server: KubernetesServer, tmp_path: Path) -> None:
    installed = await install(server, tmp_path, EVERYTHING)
    gpu, cpu = (
        installed.all("DaemonSet")[f"gpufaas-node-{kind}"]["spec"]["template"]["spec"] for kind in ("gpu", "cpu")
    )

    assert gpu["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert [each for each in gpu["containers"][0]["args"] if "device" in each] == ["--device=cuda:0", "--device=cuda:1"]
    assert "nvidia.com/gpu" not in cpu["containers"][0]["resources"]["limits"]
    for each in (gpu, cpu):
        assert {"--isolation=strict", "--bind=/sets", "--bind=/out:rw"} < set(each["containers"][0]["args"])
        mounted = {mount["mountPath"]: mount.get("readOnly") for mount in each["containers"][0]["volumeMounts"]}
        assert (mounted["/sets"], mounted["/out"]) == (True, False)
    assert "--id=$(NODE_NAME)" in gpu["containers"][0]["args"]  # a node keeps its name when its pod is replaced
    assert "--id=$(NODE_NAME)-cpu" in cpu["containers"][0]["args"]


async def test_nodes_may_do_what_the_kubernetes_backend_does_where_functions_are_and_nothing_else(
    server: KubernetesServer, tmp_path: Path
) -> None:
    installed = await install(server, tmp_path, EVERYTHING)
    role = installed.all("Role")["gpufaas-node"]
    may = {(what, verb) for rule in role["rules"] for what in rule["resources"] for verb in rule["verbs"]}

    assert role["metadata"]["namespace"] == "functions"
    assert may == {
        *(("pods", verb) for verb in ("get", "list", "watch", "create", "delete", "deletecollection")),
        ("pods/log", "get"), ("pods/resize", "patch"),
        *(("secrets", verb) for verb in ("create", "delete", "deletecollection")),
    }  # fmt: skip
    for each in installed.workloads():
        pod = each["spec"]["template"]["spec"]
        uses_it = each["metadata"]["name"].startswith("gpufaas-node")
        assert pod.get("serviceAccountName") == ("gpufaas-node" if uses_it else None)
        assert pod.get("automountServiceAccountToken", True) is uses_it


async def test_pods_of_functions_are_reached_by_gateways_and_nodes_and_reach_nothing_else_of_the_cluster(
    server: KubernetesServer, tmp_path: Path
) -> None:
    installed = await install(server, tmp_path, EVERYTHING)
    policy = installed.all("NetworkPolicy")["gpufaas-functions"]
    (incoming,), (to_gateway, to_names, outside) = policy["spec"]["ingress"], policy["spec"]["egress"]
    by_component = {
        each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: each
        for each in installed.workloads()
    }

    assert policy["metadata"]["namespace"] == "functions"
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod_labels().items()
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    (peer,) = incoming["from"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "apps"}
    (admitted,) = peer["podSelector"]["matchExpressions"]
    assert set(admitted["values"]) == set(by_component) - {"scheduler"}
    (gateway,) = to_gateway["to"]
    assert gateway["podSelector"]["matchLabels"] == by_component["gateway"]["spec"]["selector"]["matchLabels"]
    assert to_gateway["ports"] == [{"port": "http"}]
    assert {each["port"] for each in to_names["ports"]} == {53}
    blocks = [each["ipBlock"] for each in outside["to"]]
    assert [each["cidr"] for each in blocks] == ["0.0.0.0/0", "::/0"]
    assert {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"} <= set(blocks[0]["except"])
    assert blocks[1]["except"] == ["fc00::/7", "fe80::/10"]
    for each in ({}, {"networkPolicy": {"enabled": True}}):
        server.objects.clear()
        assert "gpufaas-functions" not in (await install(server, tmp_path, each)).all("NetworkPolicy")


def pod_labels() -> dict[str, str]:
    """Return the labels of each pod of a function."""
    worker = SimpleNamespace(spec=SimpleNamespace(labels={}, name="f"), number=1)
    return _labels(worker, "ours")  # type: ignore[arg-type]


async def test_secrets_are_made_once_and_kept(server: KubernetesServer, tmp_path: Path) -> None:
    installed = await install(server, tmp_path, {})
    made = installed.all("Secret")["gpufaas-cluster"]["data"]

    assert len(base64.b64decode(base64.b64decode(made["secrets-key"]))) == 32
    assert len(base64.b64decode(made["cluster-token"])) >= 32
    # As an upgrade finds them, or an install after an uninstall: what was sealed with the key stays readable.
    for key in [each for each in server.objects if each[1] != "secrets"]:
        del server.objects[key]
    labels = {"app.kubernetes.io/managed-by": "Helm"}
    owner = {"meta.helm.sh/release-name": "gpufaas", "meta.helm.sh/release-namespace": "apps"}
    for each in server.secrets():
        each["metadata"]["labels"] |= labels
        each["metadata"]["annotations"] |= owner
    again = await install(server, tmp_path, {})
    assert again.all("Secret")["gpufaas-cluster"]["data"] == made


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"etcd": {"bundled": {"enabled": False}}}, "there is no etcd: set etcd.endpoints"),
        ({"etcd": {"endpoints": ["e:2379"]}}, "exclude each other: set etcd.bundled.enabled=false to use yours"),
        ({"node": {"functions": "docker"}}, 'node.functions is "docker": it is process or kubernetes here'),
        ({"etcd": {"auth": {"user": "u"}}}, "etcd.auth.user needs etcd.auth.passwordSecretName"),
    ],
)
async def test_values_that_cannot_work_are_refused(
    server: KubernetesServer, tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    config = str(tmp_path / "kubeconfig")

    refused = await helm("install", str(CHART), "gpufaas", "apps", config, json.dumps(values), fails=True)

    assert said in refused
    assert server.objects == {}


async def test_the_notes_say_how_to_log_in(server: KubernetesServer, tmp_path: Path) -> None:
    installed = await install(server, tmp_path, {}, name="team-a")

    assert "get secret team-a-gpufaas-auth" in installed.notes
    assert "team-a-gpufaas-gateway" in installed.all("Service")
