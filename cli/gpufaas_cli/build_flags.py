"""Options of the commands that build and deploy functions."""

from pathlib import Path

import click
from click import option

from gpufaas_cli import declare, flags
from gpufaas_cli.declare import repeated
from gpufaas_cli.images import Building
from gpufaas_cli.pipeline import Overrides

build_arg = repeated("-b", "--build-arg", "build_args", says="Argument for build.py or the Dockerfile")
env = repeated("-e", "--env", says="Environment variable, over the stack file's")
label = repeated("-l", "--label", "labels", says="Label, over the stack file's")
annotation = repeated("--annotation", "annotations", says="Annotation, over the stack file's")
secret = repeated("--secret", "secrets", says="Secret that the function may read", metavar="NAME", reads=None)
shrinkwrap = option("--shrinkwrap", is_flag=True, help="Only write the build context, in build/.")
lists = option("--list", "lists", is_flag=True, help="Only list what would be packed, and what is left out and why.")

building = declare.gathered(
    "building", Building,
    build_arg,
    repeated("-o", "--build-option", "build_options", says="Packages of the template", metavar="NAME", reads=None),
    repeated("--build-label", "build_labels", says="Label of images"),
    option("--copy-extra", multiple=True, type=click.Path(path_type=Path), metavar="PATH",
                 help="Copy it beside the handler; repeatable."),
    flags.tag,
    option("--parallel", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Build N at once."),
    option("--no-cache", is_flag=True, help="Images: build every layer again."),
    option("--squash", is_flag=True, help="Images: squash the layers, where the engine can."),
    option("--pull", is_flag=True, help="Images: look for newer base images."),
    option("--disable-stack-pull", is_flag=True, help="Do not pull templates that are missing."),
    option("--offline", is_flag=True, help="Bundles: do not ask the gateway which packages its nodes provide; "
                 "assume those of this Python."),
    option("-q", "--quiet", is_flag=True, help="Do not show what docker prints."),
)  # fmt: skip

deploying = declare.options(
    declare.gathered(
        "overrides", Overrides,
        env,
        label,
        annotation,
        secret,
        repeated("--constraint", "constraints", says="Label of devices that it may run on", reads=None),
        option("--fprocess", metavar="COMMAND", help="The process that a watchdog starts."),
        option("--update/--no-update", default=True, help="Update functions that are deployed. [default: update]"),
        option("--replace", is_flag=True, help="Remove the function first, instead of updating it."),
        option("--readonly", is_flag=True, help="Containers: a root filesystem that cannot be written."),
        option("--read-template/--no-read-template", default=True,
                     help="Send the process that an image's template names."),
        declare.resources(),
        flags.namespace,
    ),
    flags.deploy_timeout,
)  # fmt: skip
