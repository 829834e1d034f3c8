"""The objects of Kubernetes that a worker becomes: a pod, and a secret for its mounted secrets."""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from lightkube.models import core_v1 as k
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Pod, Secret

from gpufaas_core.model import Bytes
from gpufaas_gpu_manager.launch.containers import PORT, SECRETS
from gpufaas_gpu_manager.launch.recipes import Recipes
from gpufaas_gpu_manager.worker import Worker

CONTAINER: Final = "function"
INSTANCE: Final = "gpufaas.io/instance"
_WORKER: Final = "gpufaas.io/worker"
_FUNCTION: Final = "faas_function"
_LABEL_NAME: Final = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """What all pods have in common."""

    gateway: str = ""
    """URL by which pods reach the gateway: their OPENFAAS_URL. Empty: that of the node's other workers."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Machines that they may run on. A CPU device promises the memory of one machine: name that."""
    pull_secrets: tuple[str, ...] = ()
    """Names of secrets with logins of registries."""


def settings_from(env: Mapping[str, str]) -> PodSettings:
    """Return what ``GPUFAAS_KUBERNETES_GATEWAY``, ``_NODE`` and ``_PULL_SECRETS`` say."""
    node = env.get("GPUFAAS_KUBERNETES_NODE", "")
    pulls = env.get("GPUFAAS_KUBERNETES_PULL_SECRETS", "")
    return PodSettings(
        gateway=env.get("GPUFAAS_KUBERNETES_GATEWAY", ""),
        node_selector={"kubernetes.io/hostname": node} if node else {},
        pull_secrets=tuple(each.strip() for each in pulls.split(",") if each.strip()),
    )


def pod_name(worker: Worker, run: str) -> str:
    """Return a DNS label that no other pod has; *run* tells this run of the platform from earlier ones."""
    name = re.sub(r"[^a-z0-9-]", "-", worker.spec.name.lower()).strip("-") or "function"
    return f"{name[:40].rstrip('-')}-{run}-{worker.number}"


def secret_of(name: str, instance: str, worker: Worker, values: Mapping[str, bytes]) -> Secret:
    return Secret(
        metadata=ObjectMeta(name=name, labels=_labels(worker, instance)),
        type="Opaque",
        data={key: base64.b64encode(value).decode() for key, value in values.items()},
    )


def pod_of(
    name: str, instance: str, worker: Worker, recipes: Recipes, settings: PodSettings, *, has_secret: bool
) -> Pod:
    spec = worker.spec
    env = recipes.container_env(worker, settings.gateway or recipes.settings.env.get("OPENFAAS_URL", ""))
    resources = {"memory": str(spec.memory_limit or worker.memory)}
    if cpus := recipes.cpus(worker):
        resources["cpu"] = f"{round(cpus * 1000)}m"
    mounts: list[k.VolumeMount] = []
    volumes: list[k.Volume] = []
    if has_secret:
        mounts.append(k.VolumeMount(name="secrets", mountPath=SECRETS, readOnly=True))
        # Readable to all: which user the image runs as is not known, and the pod has one container.
        volumes.append(k.Volume(name="secrets", secret=k.SecretVolumeSource(secretName=name, defaultMode=0o444)))
    if spec.read_only:
        mounts.append(k.VolumeMount(name="tmp", mountPath="/tmp"))
        volumes.append(k.Volume(name="tmp", emptyDir=k.EmptyDirVolumeSource()))
    container = k.Container(
        name=CONTAINER,
        image=spec.image,
        # "$(NAME)" in a value would be replaced by that variable.
        env=[k.EnvVar(name=key, value=value.replace("$(", "$$(")) for key, value in env.items()],
        ports=[k.ContainerPort(name="http", containerPort=PORT)],
        resources=k.ResourceRequirements(requests=resources, limits=resources),
        securityContext=k.SecurityContext(
            allowPrivilegeEscalation=False,
            readOnlyRootFilesystem=spec.read_only,
            capabilities=k.Capabilities(drop=["ALL"], add=list(spec.capabilities)),
        ),
        volumeMounts=mounts,
    )
    return Pod(
        metadata=ObjectMeta(name=name, labels=_labels(worker, instance)),
        spec=k.PodSpec(
            restartPolicy="Never",
            automountServiceAccountToken=False,
            enableServiceLinks=False,
            terminationGracePeriodSeconds=max(1, int(recipes.settings.term_grace_s)),
            nodeSelector=dict(settings.node_selector),
            imagePullSecrets=[k.LocalObjectReference(name=each) for each in settings.pull_secrets],
            securityContext=k.PodSecurityContext(seccompProfile=k.SeccompProfile(type="RuntimeDefault")),
            containers=[container],
            volumes=volumes,
        ),
    )


def memory_change(memory: Bytes) -> dict[str, object]:
    """Return the change to a pod by which its container gets *memory*."""
    resources = {"requests": {"memory": str(memory)}, "limits": {"memory": str(memory)}}
    return {"spec": {"containers": [{"name": CONTAINER, "resources": resources}]}}


def _labels(worker: Worker, instance: str) -> dict[str, str]:
    theirs = worker.spec.labels.items()
    return {
        **{k: v for k, v in theirs if _LABEL_NAME.fullmatch(k) and LABEL_VALUE.fullmatch(v)},
        _FUNCTION: worker.spec.name,
        "app.kubernetes.io/managed-by": "gpufaas",
        "app.kubernetes.io/component": "function",
        INSTANCE: instance,
        _WORKER: str(worker.number),
    }
