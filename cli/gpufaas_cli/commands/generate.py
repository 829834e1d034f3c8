"""``gpufaas generate``: a stack file as resources of Kubernetes, for clusters that run OpenFaaS or Knative."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
import yaml

from gpufaas_cli import flags, output
from gpufaas_cli.client import DEFAULT_NAMESPACE
from gpufaas_cli.publish import deployment, image_of
from gpufaas_cli.stack import FILE_NAMES, Stack, StackFunction

_SECRETS: Final = "/var/openfaas/secrets"
_PORT: Final = 8080
OPENFAAS: Final = "openfaas.com/v1"
KNATIVE: Final = "serving.knative.dev/v1"


@click.command(
    "generate",
    epilog="""
\b
Examples:
  gpufaas generate > functions.yaml
  gpufaas generate resize -n dev --tag sha
  gpufaas generate --api serving.knative.dev/v1 --filter 'cnn-*'
  gpufaas generate --from-store nodeinfo --arch arm64
""",
)
@flags.stack
@click.option("--api", type=click.Choice([OPENFAAS, KNATIVE]), default=OPENFAAS, show_default=True)
@click.option("--from-store", metavar="NAME", help="A function of the store, instead of the stack file.")
@click.option("--arch", metavar="NAME", help="With --from-store: x86_64, arm64 or armhf. [default: this machine's]")
@click.option(
    "-u", "--url", metavar="URL|FILE", help="With --from-store: the store; else OPENFAAS_STORE, else OpenFaaS's."
)
@click.option(
    "--tag", type=click.Choice(["latest", "sha", "branch", "describe", "digest"]), default="latest",
    help="What the image's tag says of this version.",
)  # fmt: skip
@flags.deploying
@flags.namespace
def command(
    names: tuple[str, ...], yaml_file: Path | None, glob: str | None, regex: str | None, envsubst: bool, api: str,
    from_store: str | None, arch: str | None, url: str | None, tag: str, **given: Any,
) -> None:  # fmt: skip
    """Write functions as YAML for kubectl: a Function of OpenFaaS's operator each, or a Service of Knative."""
    if from_store:
        stack, functions = _from_store(from_store, arch, url)
    else:
        stack, functions = flags.selected(names, yaml_file, glob, regex, envsubst)
    extra = flags.extra_of(given)
    make = _openfaas if api == OPENFAAS else _knative
    for each in functions:
        body = deployment(each, extra, None, image_of(stack, each, tag))
        output.show("---")
        output.show(yaml.safe_dump(make(body), sort_keys=False, width=10_000).rstrip())


def _from_store(name: str, arch: str | None, url: str | None) -> tuple[Stack, list[StackFunction]]:
    from gpufaas_cli import stores

    found = stores.find_function(name, stores.functions(url))
    function = StackFunction(
        name=found.name, where="the store", image=found.image(arch or stores.this_platform()),
        fprocess=found.fprocess or None, environment=found.environment, labels=found.labels,
        annotations=found.annotations, readonly_root_filesystem=found.readonly_root_filesystem,
    )  # fmt: skip
    return Stack(path=Path(FILE_NAMES[0]), gateway=None, functions={found.name: function}), [function]


def _openfaas(body: Mapping[str, Any]) -> dict[str, object]:
    """specs/openfaas.md §11"""
    spec = {
        "name": body["service"],
        "image": body["image"],
        "handler": body.get("envProcess"),
        "labels": body["labels"],
        "annotations": body["annotations"],
        "environment": body.get("envVars"),
        "limits": body.get("limits"),
        "requests": body.get("requests"),
        "constraints": body.get("constraints"),
        "secrets": body.get("secrets"),
        "readOnlyRootFilesystem": body.get("readOnlyRootFilesystem"),
    }
    return {
        "apiVersion": OPENFAAS,
        "kind": "Function",
        "metadata": {"name": body["service"], "namespace": body.get("namespace") or DEFAULT_NAMESPACE},
        "spec": {key: value for key, value in spec.items() if value},
    }


def _knative(body: Mapping[str, Any]) -> dict[str, object]:
    environment = dict(body.get("envVars") or {})
    if body.get("envProcess"):
        environment = {"fprocess": body["envProcess"], **environment}
    secrets = list(body.get("secrets") or [])
    resources = {key: body[key] for key in ("limits", "requests") if body.get(key)}
    container = {
        "name": body["service"],
        "image": body["image"],
        "ports": [{"containerPort": _PORT}],
        "env": [{"name": key, "value": value} for key, value in sorted(environment.items())],
        "resources": resources,
        "securityContext": {"readOnlyRootFilesystem": True} if body.get("readOnlyRootFilesystem") else None,
        "volumeMounts": [
            {"name": each.replace(".", "-"), "mountPath": f"{_SECRETS}/{each}", "subPath": each, "readOnly": True}
            for each in secrets
        ],
    }
    inner: dict[str, object] = {"containers": [{key: value for key, value in container.items() if value}]}
    if secrets:
        inner["volumes"] = [{"name": each.replace(".", "-"), "secret": {"secretName": each}} for each in secrets]
    described = {key: body[key] for key in ("labels", "annotations") if body[key]}
    return {
        "apiVersion": KNATIVE,
        "kind": "Service",
        "metadata": {"name": body["service"], "namespace": body.get("namespace") or DEFAULT_NAMESPACE},
        "spec": {"template": {**({"metadata": described} if described else {}), "spec": inner}},
    }
