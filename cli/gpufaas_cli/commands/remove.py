"""``gpufaas remove``: functions by name, or those of the stack file."""

import click

from gpufaas import Refused
from gpufaas_cli import declare, flags, output
from gpufaas_cli.stack import choose_gateway


@declare.command("remove")
@flags.stack
@flags.namespace
@flags.gateway
def command(selection: flags.Selection, namespace: str | None, gateway: str | None) -> None:
    """
    Remove functions from the gateway: the named ones, else the stack file's. One that is not deployed is no error.

    Examples:
      gpufaas remove digits
      gpufaas remove                      everything that stack.yaml names
      gpufaas remove -f other.yaml --filter 'cnn-*'
    """
    if selection.names and (selection.yaml_file, selection.glob, selection.regex) == (None, None, None):
        # A name may be that of any function, not only of one in the stack file here.
        targets = [(name, namespace) for name in selection.names]
        url = flags.gateway_url(gateway)
    else:
        stack, functions = selection.read()
        targets = [(each.name, namespace or each.namespace) for each in functions]
        url = choose_gateway(gateway, stack.gateway)
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
