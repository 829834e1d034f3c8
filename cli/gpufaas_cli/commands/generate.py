"""``gpufaas generate``: a stack file as resources of Kubernetes, for clusters that run OpenFaaS's operator."""

import yaml

from gpufaas import DEFAULT_NAMESPACE
from gpufaas_cli import build_flags, declare, flags, output
from gpufaas_cli.pipeline import Overrides, deployment, image_of, makes_bundles

_SPEC = {
    "name": "service", "image": "image", "handler": "envProcess", "labels": "labels", "annotations": "annotations",
    "environment": "envVars", "limits": "limits", "requests": "requests", "constraints": "constraints",
    "secrets": "secrets", "readOnlyRootFilesystem": "readOnlyRootFilesystem",
}  # fmt: skip
"""Fields of the resource, and what a deployment calls them."""


@declare.command("generate")
@flags.stack
@flags.tag
@build_flags.deploying
def command(selection: flags.Selection, tag: str, overrides: Overrides) -> None:
    """
    Write functions as YAML for kubectl: each as a Function of OpenFaaS's operator.

    Examples:
      gpufaas generate > functions.yaml
      gpufaas generate resize -n dev --tag sha
      gpufaas generate --filter 'cnn-*'
    """
    stack, functions = selection.read()
    for each in functions:
        if makes_bundles(stack, [each]):
            output.note(
                f"gpufaas: {each.name} becomes a bundle, and no image for Kubernetes has its code: build one, from a "
                "template of kind image or with lang dockerfile"
            )
        body = deployment(each, overrides, None, image_of(stack, each, tag))
        resource = {
            "apiVersion": "openfaas.com/v1",
            "kind": "Function",
            "metadata": {"name": body["service"], "namespace": body.get("namespace") or DEFAULT_NAMESPACE},
            "spec": {field: body[key] for field, key in _SPEC.items() if body.get(key)},
        }
        output.show("---")
        output.show(yaml.safe_dump(resource, sort_keys=False, width=10_000).rstrip())
