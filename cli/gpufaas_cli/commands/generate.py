"""``gpufaas generate``: a stack file as resources of Kubernetes, for clusters that run OpenFaaS's operator."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
import yaml

from gpufaas import DEFAULT_NAMESPACE
from gpufaas_cli import declare, flags, output
from gpufaas_cli.publish import deployment, image_of

_API: Final = "openfaas.com/v1"


@declare.command("generate")
@flags.stack
@click.option(
    "--tag", type=click.Choice(["latest", "sha", "branch", "describe", "digest"]), default="latest",
    help="What the image's tag says of this version.",
)  # fmt: skip
@flags.deploying
@flags.namespace
def command(
    names: tuple[str, ...], yaml_file: Path | None, glob: str | None, regex: str | None, envsubst: bool,
    tag: str, **given: Any,
) -> None:  # fmt: skip
    """
    Write functions as YAML for kubectl: each as a Function of OpenFaaS's operator.

    Examples:
      gpufaas generate > functions.yaml
      gpufaas generate resize -n dev --tag sha
      gpufaas generate --filter 'cnn-*'
    """
    stack, functions = flags.selected(names, yaml_file, glob, regex, envsubst)
    extra = flags.extra_of(given)
    for each in functions:
        body = deployment(each, extra, None, image_of(stack, each, tag))
        output.show("---")
        output.show(yaml.safe_dump(_function(body), sort_keys=False, width=10_000).rstrip())


def _function(body: Mapping[str, Any]) -> dict[str, object]:
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
        "apiVersion": _API,
        "kind": "Function",
        "metadata": {"name": body["service"], "namespace": body.get("namespace") or DEFAULT_NAMESPACE},
        "spec": {key: value for key, value in spec.items() if value},
    }
