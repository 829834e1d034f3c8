"""``gpufaas remove``: one function by name, or those of the stack file."""

from pathlib import Path

import click

from gpufaas import Refused
from gpufaas_cli import declare, flags, output
from gpufaas_cli.stack import choose_gateway


@declare.command("remove")
@flags.stack
@flags.namespace
@flags.gateway
def command(
    names: tuple[str, ...], yaml_file: Path | None, glob: str | None, regex: str | None, envsubst: bool,
    namespace: str | None, gateway: str | None,
) -> None:  # fmt: skip
    """
    Remove functions from the gateway: the named ones, else the stack file's. One that is gone is no error.

    Examples:
      gpufaas remove digits
      gpufaas remove                      everything that stack.yaml names
      gpufaas remove -f other.yaml --filter 'cnn-*'
    """
    if names and yaml_file is None and glob is None and regex is None:
        # By name it may be any function, not only one of the stack file that happens to be here.
        targets = [(name, namespace) for name in names]
        url = flags.gateway_url(gateway)
    else:
        read, functions = flags.selected(names, yaml_file, glob, regex, envsubst)
        targets = [(each.name, namespace or each.namespace) for each in functions]
        url = choose_gateway(gateway, read.gateway)
    failed: list[str] = []
    with flags.connect(url) as client:
        for name, where in targets:
            output.show(f"Deleting: {name}.{where or ''}")
            try:
                removed = client.remove(name, where)
            except Refused as exc:
                output.note(f"gpufaas: {name}: {exc}")
                failed.append(name)
                continue
            output.show("Removing old function." if removed else "No existing function to remove.")
    if failed:
        output.note(f"gpufaas: {len(failed)} of {len(targets)} functions not removed: {', '.join(failed)}")
        raise click.exceptions.Exit(1)
